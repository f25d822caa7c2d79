"""The process of one contestant of `bench engine`, and the caller's end of it.

    caller ── one order per line ──▶ worker ── one answer per line ──▶ caller

A process of its own makes CPU seconds and memory all a contestant's, and lets it run in an environment of its own: the
worker imports nothing of étude but the contestant. What libraries print goes to a log, whose tail is in the error when
a worker fails. A worker ends when its orders end, so none outlives its caller.
"""

import json
import os
import random
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, final

from bench import usage
from bench.engine.contestants import CONTESTANTS, Contestant, Order, Setup, as_json
from bench.programs import environment
from etude.errors import InfrastructureError, UserError
from etude.types import Json

START_DEADLINE_S = 300.0
ORDER_DEADLINE_S = 600.0
END_DEADLINE_S = 10.0
LOG_TAIL_BYTES = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load for one timing: batches of random prompts, in sequence."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    temperature: float
    vocabulary: int
    seed: int
    """Seed of prompts and sampling: two loads of one seed are equal."""
    least_s: float = 0.0
    """Batches continue until their total time reaches this; there is always one."""
    stamped: bool = False

    def order(self, repetition: int) -> Order:
        """The batch number ``repetition``. No prompt comes twice, not even in another cell: it would be in a cache."""
        source = random.Random(f"{self.seed} {self.batch} {self.temperature} {repetition}")
        prompts = [[source.randrange(self.vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.batch)]
        return Order(
            prompts=prompts,
            new_tokens=self.new_tokens,
            temperature=self.temperature,
            seed=source.randrange(1 << 30),
            stamped=self.stamped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of a load."""

    tokens: int
    """Sampled."""
    cpu_s: float
    """User and system, of the process and its descendants."""
    wall_s: float
    first_token_s: float | None
    """Median over completions."""
    peak_bytes: int
    """Resident memory at its highest, since the process started."""


# ── the caller's end ────────────────────────────────────────────────────────────────────────────────────────────────


@final
class Worker:
    """A contestant's process; leaving it ends the process."""

    def __init__(self, setup: Setup, log: Path) -> None:
        python = python_of(setup.contestant)
        self._name = setup.contestant
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [str(python), "-m", "bench.engine.worker", json.dumps(asdict(setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=_environment(setup, python),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._end()
        self._stdout.close()

    def await_ready(self) -> dict[str, Json]:
        """Wait until the model is loaded; returns the settings. Raises as :meth:`run`."""
        settings = self._read(START_DEADLINE_S)
        assert isinstance(settings, dict)
        return settings

    def run(self, load: Load) -> Timing:
        """Time a load. Raises :class:`~etude.errors.InfrastructureError` when the process fails or takes too long."""
        answer = self._ask("run", asdict(load))
        return Timing(**answer)

    def sample(self, order: Order) -> list[dict[str, Any]]:
        """Fill an order; returns the fields of :class:`~bench.engine.contestants.Sampled`. Raises alike."""
        answer: list[dict[str, Any]] = self._ask("sample", asdict(order))
        return answer

    def _ask(self, verb: str, body: Mapping[str, Any]) -> Any:
        try:
            self._stdin.write(json.dumps({"verb": verb, **body}).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error
        return self._read(ORDER_DEADLINE_S)

    def _read(self, deadline_s: float) -> Any:
        readable, _, _ = select.select([self._stdout], [], [], deadline_s)
        if not readable:
            raise self._failure(f"gave no answer in {deadline_s:.0f} s")
        line = self._stdout.readline()
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def _failure(self, what: str) -> InfrastructureError:
        self._end()  # it may still be writing its traceback
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        last = tail.splitlines()[-1] if tail else "no output"
        sys.stderr.write(f"{tail}\n")
        return InfrastructureError(f"{self._name} {what}: {last}")

    def _end(self) -> None:
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


def available_cores() -> tuple[int, ...]:
    """The processors that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def python_of(contestant: str) -> Path:
    """The interpreter that a contestant runs in. Raises :class:`~etude.errors.InfrastructureError` if there is none."""
    if contestant != "vllm":
        return Path(sys.executable)
    from etude.engines.vllm.process import find_python

    try:
        return find_python()
    except UserError as error:
        raise InfrastructureError(f"vllm was not measured: {error}") from error


def _environment(setup: Setup, python: Path) -> dict[str, str]:
    """Variables for one contestant: as many threads as cores, and for vLLM what its documentation asks for on CPUs."""
    threads = str(len(setup.cores))
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": "1000",  # idle threads that spin would be counted as work
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if setup.contestant == "vllm":
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, setup.cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(map(str, preloaded(python))),
        }
    return {**environment(), **variables}


def preloaded(python: Path) -> list[Path]:
    """The libraries that vLLM's documentation preloads on CPUs, those of them that are installed."""
    places = (python.parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu"))
    names = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    result = ([place / name for place in places if (place / name).is_file()] for name in names)
    return [files[0] for files in result if files]


# ── the worker's end ────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str]) -> None:
    """Fill orders from standard input until there are no more."""
    fields = json.loads(arguments[0])
    setup = Setup(**fields | {"cores": tuple(fields["cores"])})
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print
        os.sched_setaffinity(0, setup.cores)
        contestant = CONTESTANTS[setup.contestant](setup)
        _say(answers, contestant.settings)
        for line in sys.stdin:
            fields = json.loads(line)
            verb = fields.pop("verb")
            if verb == "run":
                _say(answers, asdict(timed(contestant, Load(**fields))))
            else:
                _say(answers, as_json(contestant.generate(Order(**fields))))


def timed(contestant: Contestant, load: Load) -> Timing:
    """Run a load. Raises :class:`~etude.errors.InfrastructureError` when tokens are missing."""
    tokens = repetition = 0
    firsts: list[float] = []
    cpu_s, started_s = tree_cpu_s(), time.perf_counter()
    while not repetition or time.perf_counter() - started_s < load.least_s:
        sampled = contestant.generate(load.order(repetition))
        repetition += 1
        tokens += sum(len(one.token_ids) for one in sampled)
        firsts += [one.first_token_s for one in sampled if one.first_token_s is not None]
    wall_s, cpu_s = time.perf_counter() - started_s, tree_cpu_s() - cpu_s
    if tokens != (due := repetition * load.batch * load.new_tokens):
        raise InfrastructureError(f"{tokens} of {due} tokens were sampled: a figure would mean nothing")
    first_s = sorted(firsts)[len(firsts) // 2] if firsts else None
    return Timing(tokens=tokens, cpu_s=cpu_s, wall_s=wall_s, first_token_s=first_s, peak_bytes=tree_peak_bytes())


def tree_cpu_s() -> float:
    """User and system seconds of this process, of children that ended and of descendants that live."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + usage.cpu_s(usage.descendants(os.getpid()))


def tree_peak_bytes() -> int:
    """Resident memory of this process and its descendants, each at its highest."""
    return usage.peak_bytes(usage.family(os.getpid()))


def _say(answers: IO[str], answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
