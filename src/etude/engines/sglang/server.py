"""An SGLang server's settings, as its command line and its environment: SGLang 0.5.23 (``srt/arg_groups``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etude.engines.server_process import HOST, ServerCommand, find_interpreter, without_our_python

PYTHON_VARIABLE = "ETUDE_SGLANG_PYTHON"
"""Environment variable that names the interpreter of SGLang's environment."""
MODULE = "sglang.launch_server"
BEFORE_TEMPERATURE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Environment variable that returns logprobs before the temperature, which differ from those of the sampled
distribution.
"""


def find_python(configured: str = "") -> Path:
    """The interpreter of SGLang's environment: the configured one, ``ETUDE_SGLANG_PYTHON``, or ``.venv-sglang`` in the
    current folder.

    Raises :class:`~etude.errors.UserError` when there is none.
    """
    return find_interpreter(
        configured,
        variable=PYTHON_VARIABLE,
        default=".venv-sglang/bin/python",
        missing="no SGLang: {path} is missing; install sglang into an environment of its own and name its Python in "
        f"engine.options.python or {PYTHON_VARIABLE}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServer:
    """The settings of a server."""

    python: Path
    """The interpreter of SGLang's environment."""
    model: Path
    """A Hugging Face checkpoint; no tokenizer is needed."""
    version: int
    """The weight version of the checkpoint."""
    port: int
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_length: int
    """Tokens of one sequence."""
    max_running: int
    """Sequences decoded together."""
    routes: bool
    """Return the experts of each token."""
    extra: tuple[str, ...] = ()
    """Further arguments, e.g. ``--tp-size``, ``2``."""

    def command(self, inherited: Mapping[str, str]) -> ServerCommand:
        """The command, with its own environment variables over the ``inherited`` ones."""
        values = {
            "--model-path": self.model,
            "--weight-version": self.version,
            "--host": HOST,
            "--port": self.port,
            "--device": self.device,
            "--dtype": self.dtype,
            "--context-length": self.max_length,
            "--max-running-requests": self.max_running,
            "--sampling-defaults": "openai",  # the checkpoint's defaults would change requests
            "--log-level": "warning",
        }
        # Token ids in and out; a lower number is served first, as in the engine protocol.
        flags = ["--skip-tokenizer-init", "--enable-priority-scheduling", "--schedule-low-priority-values-first"]
        flags += ["--enable-return-routed-experts"] if self.routes else []
        pairs = [text for name, value in values.items() for text in (name, str(value))]
        variables = {name: value for name, value in without_our_python(inherited).items() if name != BEFORE_TEMPERATURE}
        variables |= {
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health samples, and waits for a pause to end
        }
        argv = [str(self.python), "-m", MODULE, *pairs, *flags, *self.extra]
        return ServerCommand(name="SGLang", argv=argv, environment=variables, port=self.port)
