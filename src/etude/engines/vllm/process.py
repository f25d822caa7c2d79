"""A vLLM server's settings, as its command line and its environment.

The protocol is in ``engine.py``. Measured on two cores: 25–35 s from start to health, mostly for three successive
imports of vLLM.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import etude
from etude.engines.server_process import HOST, ServerCommand, ServerProcess, find_interpreter, without_our_python

PYTHON_VARIABLE = "ETUDE_VLLM_PYTHON"
"""Environment variable that names the interpreter of vLLM's environment."""
MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = "etude.engines.vllm.extension.EtudeWorker"
SERVED_ADAPTERS = 2
"""Adapters in one step of a server: the newest version, and the one of completions in progress."""
TRANSFER = '{"backend":"etude"}'


def find_python(configured: str = "") -> Path:
    """The interpreter of vLLM's environment: the configured one, ``ETUDE_VLLM_PYTHON``, or ``.venv-vllm`` in the
    current folder.

    Raises :class:`~etude.errors.UserError` when there is none.
    """
    return find_interpreter(
        configured,
        variable=PYTHON_VARIABLE,
        default=".venv-vllm/bin/python",
        missing=f"no vLLM: {{path}} is missing; `make .venv-vllm/stamp` installs it, or set {PYTHON_VARIABLE}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """The settings of a server. Raises ``ValueError`` for those that the device cannot satisfy."""

    python: Path
    """The interpreter of vLLM's environment; it also needs orjson and zstandard (see ``constraints-vllm.txt``)."""
    model: Path
    """A Hugging Face checkpoint; no tokenizer is needed."""
    port: int
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = 4096
    """Tokens of one sequence."""
    max_running: int = 64
    """Sequences decoded together."""
    cpu_cache_gb: int = 1
    """Key/value cache on a CPU, in GiB; on a GPU vLLM takes what is free."""
    cpu_cores: str = "auto"
    """Cores of a CPU worker, as vLLM spells them: ``0-1``, ``auto``."""
    routes: bool = False
    """Return the experts of each token."""
    sampling_mask: bool = False
    """Return the tokens that remain after top-p and top-k."""
    lora_rank: int = 0
    """Largest rank of adapters that can be loaded while it serves; 0 for none."""
    api_key: str = field(default="", repr=False)
    """The key of all sampling requests (``VLLM_API_KEY``); empty for none. vLLM does not protect other requests."""
    extra: tuple[str, ...] = field(default=())
    """Further arguments, e.g. ``--tensor-parallel-size``, ``2``."""

    def __post_init__(self) -> None:
        if self.device == "cpu" and (self.routes or self.sampling_mask):
            raise ValueError(
                "vLLM returns routes and sampling masks only from its Model Runner V2, which needs Triton; the Triton "
                "on PyPI has no CPU backend, and vLLM 0.32 refuses to start ('Model Runner V2 requires Triton'): use "
                "a GPU, or set routes and sampling_mask to false"
            )

    def command(self) -> list[str]:
        """The command line."""
        values = {
            "--model": self.model,
            "--dtype": self.dtype,
            "--host": HOST,
            "--port": self.port,
            "--max-model-len": self.max_length,
            "--max-num-seqs": self.max_running,
            "--scheduling-policy": "priority",
            "--logprobs-mode": "processed_logprobs",  # of the sampled distribution: after temperature, top-k and top-p
            "--generation-config": "vllm",  # the checkpoint's sampling defaults would change requests
            "--worker-extension-cls": EXTENSION,
            "--weight-transfer-config": TRANSFER,
            "--uvicorn-log-level": "warning",
        }
        # The "scale-out" interface takes and returns token ids; étude sends no text, so vLLM loads no tokenizer.
        flags = ["--enable-scale-out", "--skip-tokenizer-init"]
        flags += ["--enforce-eager"] if self.device == "cpu" else []
        flags += ["--enable-return-routed-experts"] if self.routes else []
        flags += ["--return-sampling-mask"] if self.sampling_mask else []
        if self.lora_rank:
            loras = {"--max-lora-rank": self.lora_rank, "--max-loras": SERVED_ADAPTERS}
            flags += ["--enable-lora", *(str(word) for pair in loras.items() for word in pair)]
        pairs = [text for name, value in values.items() for text in (name, str(value))]
        return [str(self.python), "-m", MODULE, *pairs, *flags, *self.extra]

    def environment(self, inherited: Mapping[str, str], package_folder: Path) -> dict[str, str]:
        """The environment variables: its own, and the inherited ones except those of Python, which are of étude's
        environment.

        ``package_folder`` holds étude's package and nothing else.
        """
        variables = without_our_python(inherited) | {
            "PYTHONPATH": str(package_folder),
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight transfer exist only in this mode
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # seconds; longer than a client keeps an idle connection
            "HF_HUB_OFFLINE": "1",
        }
        if self.api_key:
            variables["VLLM_API_KEY"] = self.api_key
        if self.lora_rank:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.routes or self.sampling_mask:
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self.device == "cpu":
            variables |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_cache_gb),
                "VLLM_CPU_OMP_THREADS_BIND": self.cpu_cores,
            }
        return variables


def start(server: VllmServer, folder: Path) -> ServerProcess:
    """Start a server. ``folder`` gets its log, and a link to étude's package."""
    environment = server.environment(os.environ, _package_folder(folder))
    return ServerProcess(
        ServerCommand(name="vLLM", argv=server.command(), environment=environment, port=server.port), folder
    )


def _package_folder(folder: Path) -> Path:
    """A folder to import étude from, without the rest of its environment: vLLM has its own torch and numpy."""
    parent = folder / "python"
    parent.mkdir(parents=True, exist_ok=True)
    link = parent / "etude"
    target = Path(etude.__file__).parent
    if not link.is_symlink() or link.readlink() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return parent
