"""Who stands before the same upstream in `bench gateway`, each a process of its own on a core of its own.

etude             our gateway as it is shipped; conversations are sessions, so every token is kept and handed over
etude-uncaptured  the same without sessions: each call stands alone and nothing is kept
bare              a pass-through that reads nothing (gateway_proxy.py)
litellm           LiteLLM's proxy, one worker as well; in an environment of its own, since its pins exclude ours
direct            nobody: the upstream itself, and with it the most that the load can ask
"""

import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self, final

from bench import programs, usage
from bench.gateway.load import Endpoint
from etude.errors import InfrastructureError

START_DEADLINE_S = 120.0
END_DEADLINE_S = 10.0
POLL_S = 0.1
LOG_TAIL_BYTES = 1500
KEEP_ALIVE_S = 75
"""For LiteLLM, which by default hangs up on callers that it kept waiting; ours has the same."""
LITELLM_VARIABLE = "ETUDE_LITELLM_PYTHON"
LITELLM_PYTHON = Path(".venv-litellm/bin/python")
NO_KEY = "sk-anything"
"""For contestants that ask for no key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Settings that every contestant receives."""

    upstream: str
    """URL without a path."""
    model: Path
    """A folder with the tokenizer that the upstream's tokens are of."""
    scratch: Path
    """For files of the contestant's own."""
    port: int
    """To listen on, on the loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start command and address of a contestant."""

    command: tuple[str, ...]
    endpoint: Endpoint
    ready: str
    """A path that is answered with 200 once it serves."""
    environment: Mapping[str, str] = field(default_factory=dict)


def launch_etude(site: Site, *, sessions: bool = True) -> Launch:
    """Our gateway, from its command line."""
    keys = site.scratch / "keys.json"
    command = (sys.executable, "-m", "etude")
    made = subprocess.run(
        [*command, "keys", "add", str(keys)], capture_output=True, text=True, check=True, env=programs.environment()
    )
    serve = ("gateway", "--model", str(site.model), "--engine", site.upstream, "--port", str(site.port))
    return Launch(
        command=(*command, *serve, "--keys", str(keys)),
        endpoint=Endpoint(port=site.port, key=made.stdout.strip(), sessions=sessions),
        ready="/healthz",
    )


def launch_uncaptured(site: Site) -> Launch:
    """Our gateway, with a key that is bound to no session."""
    return launch_etude(site, sessions=False)


def launch_bare(site: Site) -> Launch:
    """The pass-through."""
    return Launch(
        command=(sys.executable, "-m", "bench.gateway.proxy", str(site.port), site.upstream),
        endpoint=Endpoint(port=site.port, key=NO_KEY),
        ready="/health",
    )


def launch_litellm(site: Site) -> Launch:
    """LiteLLM's proxy with the one key it insists on, without a database and telemetry, which would only slow it."""
    key = f"sk-{secrets.token_hex(32)}"
    config = site.scratch / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: policy\n"
        "    litellm_params:\n"
        f"      {{model: openai/policy, api_base: '{site.upstream}/v1', api_key: {NO_KEY}}}\n"
        "litellm_settings: {telemetry: false, request_timeout: 600, num_retries: 0}\n",
        encoding="utf-8",
    )
    litellm = litellm_python().with_name("litellm")
    return Launch(
        command=(
            *(str(litellm), "--config", str(config), "--host", "127.0.0.1", "--port", str(site.port)),
            *("--num_workers", "1", "--keepalive_timeout", str(KEEP_ALIVE_S)),
        ),
        endpoint=Endpoint(port=site.port, key=key),
        ready="/health/liveliness",
        environment={
            "LITELLM_MASTER_KEY": key,
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MODE": "PRODUCTION",
        },
    )


CONTESTANTS: Final[Mapping[str, Callable[[Site], Launch]]] = MappingProxyType(
    {
        "etude": launch_etude,
        "etude-uncaptured": launch_uncaptured,
        "bare": launch_bare,
        "litellm": launch_litellm,
    }
)
"""All but ``direct``, for which nothing is started."""


def litellm_python() -> Path:
    """The interpreter of LiteLLM's environment. Raises :class:`~etude.errors.InfrastructureError` if there is none."""
    named = os.environ.get(LITELLM_VARIABLE)
    python = Path(named) if named else LITELLM_PYTHON
    if not python.with_name("litellm").is_file():
        raise InfrastructureError(
            f"litellm was not measured: no litellm beside {python}. Install constraints-litellm.txt into an environment"
            f" in {LITELLM_PYTHON.parents[1]}, or name its interpreter in {LITELLM_VARIABLE}"
        )
    return python.absolute()


@final
class Server:
    """A process that serves HTTP on the loopback; leaving it ends the process."""

    def __init__(self, name: str, command: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**programs.environment(), **environment},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Id of the started process."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """Seconds that the process and its descendants took so far."""
        return usage.cpu_s(usage.family(self.pid))

    @property
    def peak_bytes(self) -> int:
        """Resident memory at its highest."""
        return usage.peak_bytes(usage.family(self.pid))

    def await_ready(self, url: str) -> None:
        """Wait until ``url`` is answered with 200. Raises :class:`~etude.errors.InfrastructureError` if it is not."""
        ends_s = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < ends_s:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=END_DEADLINE_S) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(POLL_S)
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        sys.stderr.write(f"{tail}\n")
        raise InfrastructureError(f"{self._name} does not serve: {tail.splitlines()[-1] if tail else 'no output'}")
