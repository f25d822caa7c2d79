"""A vLLM server as a child process: its command line, its environment, its start and its end.

Owns the process. vLLM lives in a Python environment of its own, because its dependencies exclude ours; we never import
it. What is said to it is ``vllm.py``'s. Measured on two cores: 25–35 s from start to health, most of it three imports
of vLLM, one after the other.
"""

import os
import subprocess
import sys
import time
from asyncio import sleep
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

import orjson

import etude
from etude.engines.api_client import ApiClient, RequestLimits
from etude.engines.vllm import process_guard
from etude.errors import EngineUnavailable, UserError

PYTHON_VARIABLE = "ETUDE_VLLM_PYTHON"
"""Environment variable that names the interpreter of vLLM's environment."""
HOST = "127.0.0.1"
"""The server takes commands that load files and run code: it listens to this machine only."""
MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = "etude.engines.vllm.extension.EtudeWorker"
TRANSFER = '{"backend":"etude"}'
POLL_S = 0.2
TAIL_BYTES = 4000
"""Length of the log's end in the error of a start that failed."""
STOP_S = 7.0
"""Time in which all of its processes have to end: longer than the guard waits until it kills them, and less than we
have ourselves.
"""


def find_python(configured: str = "") -> Path:
    """The interpreter of vLLM's environment: the configured one, ``ETUDE_VLLM_PYTHON``, or ``.venv-vllm`` here.

    Raises :class:`~etude.errors.UserError` when there is none.
    """
    path = Path(configured or os.environ.get(PYTHON_VARIABLE) or ".venv-vllm/bin/python").absolute()
    if not path.exists():
        raise UserError(f"no vLLM: {path} is missing; `make .venv-vllm/stamp` installs it, or set {PYTHON_VARIABLE}")
    return path


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
    """Return what top-p and top-k left over."""
    extra: tuple[str, ...] = field(default=())
    """Further arguments, e.g. ``--tensor-parallel-size``, ``2``."""

    def __post_init__(self) -> None:
        if self.device == "cpu" and (self.routes or self.sampling_mask):
            raise ValueError(
                "vLLM returns routes and kept sets from its Model Runner V2 only, which needs Triton; the Triton on "
                "PyPI has no CPU backend, and vLLM 0.32 refuses to start ('Model Runner V2 requires Triton'): use a "
                "GPU, or set routes and kept_sets to false"
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
            "--logprobs-mode": "processed_logprobs",  # of what was sampled from, after temperature, top-k and top-p
            "--generation-config": "vllm",  # the checkpoint's own sampling defaults would change what we ask for
            "--worker-extension-cls": EXTENSION,
            "--weight-transfer-config": TRANSFER,
            "--uvicorn-log-level": "warning",
        }
        # Token ids in and out are its "scale-out" interface; text is not our business, so it loads no tokenizer.
        flags = ["--enable-scale-out", "--skip-tokenizer-init"]
        flags += ["--enforce-eager"] if self.device == "cpu" else []
        flags += ["--enable-return-routed-experts"] if self.routes else []
        flags += ["--return-sampling-mask"] if self.sampling_mask else []
        pairs = [text for name, value in values.items() for text in (name, str(value))]
        return [str(self.python), "-m", MODULE, *pairs, *flags, *self.extra]

    def environment(self, inherited: Mapping[str, str], package_folder: Path) -> dict[str, str]:
        """The environment variables: its own, over what is inherited; Python's are not, they are of our environment.

        ``package_folder`` holds étude's package and nothing else.
        """
        variables = {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
        variables |= {
            "PYTHONPATH": str(package_folder),
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight transfer are there in no other mode
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # seconds; longer than a client keeps an idle connection
            "HF_HUB_OFFLINE": "1",
        }
        if self.routes or self.sampling_mask:
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if self.device == "cpu":
            variables |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_cache_gb),
                "VLLM_CPU_OMP_THREADS_BIND": self.cpu_cores,
            }
        return variables

    def limits(self) -> RequestLimits:
        """The bounds of what it can serve. Raises :class:`~etude.errors.UserError` if the checkpoint has no readable
        config.
        """
        file = self.model / "config.json"
        try:
            vocab_size = int(orjson.loads(file.read_bytes())["vocab_size"])
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} does not say vocab_size: {type(error).__name__}: {error}") from error
        return RequestLimits(vocab_size=vocab_size, max_length=self.max_length)


@final
class VllmProcess:
    """A running server and its log; the server ends with this process, even if that is killed."""

    def __init__(self, server: VllmServer, folder: Path) -> None:
        """Start it. ``folder`` gets its log, and a link to étude's package."""
        self.server = server
        self.base_url = f"http://{HOST}:{server.port}"
        self.log = folder / "vllm.log"
        environment = server.environment(os.environ, _package_folder(folder))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, process_guard.__file__, *server.command()],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,  # Ctrl-C is ours to handle; docs/engines.md says why it is no session of its own
            )

    @property
    def pid(self) -> int:
        """Process id of the guard that holds it."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True until the server ends."""
        return self._process.poll() is None

    async def ready(self, client: ApiClient, timeout_s: float) -> None:
        """Wait until it answers.

        Raises :class:`~etude.errors.EngineUnavailable` with the end of its log if it ends first or takes too long.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if not self.is_running:
                raise EngineUnavailable(f"vLLM ended with {self._process.returncode} as it started:\n{self._tail()}")
            try:
                await client.text("/health")
                return
            except EngineUnavailable as error:
                if time.monotonic() > deadline_s:
                    raise EngineUnavailable(
                        f"vLLM is not healthy after {timeout_s:g} s; its log ends\n{self._tail()}"
                    ) from error
            await sleep(POLL_S)

    def stop(self) -> None:
        """End it and all its children; calling it twice is harmless."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")


def _package_folder(folder: Path) -> Path:
    """A folder to import étude from, without the rest of our environment: our torch and numpy are not vLLM's."""
    parent = folder / "python"
    parent.mkdir(parents=True, exist_ok=True)
    link = parent / "etude"
    target = Path(etude.__file__).parent
    if not link.is_symlink() or link.readlink() != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return parent
