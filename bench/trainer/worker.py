"""The process of one contestant of `bench trainer`: takes a step when it is told to, and says how long it took.

    bench.py ──a line──▶ this program: the machine's matmul peak, then one step ──seconds, peak, memory──▶ bench.py

A process of its own, in an environment of its own, gives every contestant its own libraries and threads. The peak is
measured right before each step, so that a machine that is slow for a while is slow for both.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import IO, Any, final

from bench.trainer.contestants import CONTESTANTS, Setup

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Linux's files that report, and reset, the peak memory of a process."""
PEAK_ROUNDS = 2
"""Products of each size before each step; the fastest of all counts."""


@final
class Turns:
    """The other end of the pipe; a :class:`~bench.trainer.contestants.Turns`."""

    def __init__(self, setup: Setup, answers: IO[str]) -> None:
        self._setup = setup
        self._answers = answers
        self._peak = 0.0
        self._started_s = 0.0

    def begin(self) -> None:
        """Wait for the turn. Raises ``SystemExit`` when there will be none."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        self._peak = matmul_peak(self._setup.device, self._setup.dtype)
        forget_memory(self._setup.device)
        self._started_s = time.perf_counter()

    def end(self) -> None:
        """Report the duration of a step."""
        settle(self._setup.device)
        seconds = time.perf_counter() - self._started_s
        self.tell(seconds=seconds, peak=self._peak, memory_bytes=most_memory(self._setup.device))

    def tell(self, **message: Any) -> None:
        """One message."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def matmul_peak(device: str, dtype: str) -> float:
    """The most floating-point operations per second that a product of two square matrices reaches now."""
    import torch

    best = 0.0
    for side in (1024, 2048) if device == "cpu" else (4096, 8192):
        a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        for _ in range(PEAK_ROUNDS):
            settle(device)
            started_s = time.perf_counter()
            torch.mm(a, b)
            settle(device)
            best = max(best, 2 * side**3 / (time.perf_counter() - started_s))
    return best


def forget_memory(device: str) -> None:
    """Count the most memory from now on."""
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif RESET.exists():
        RESET.write_text("5")


def most_memory(device: str) -> int | None:
    """The most bytes since :func:`forget_memory`: of the card's tensors, or of the process, its programs included.

    ``None`` where the system does not say.
    """
    if device != "cpu":
        import torch

        return int(torch.cuda.max_memory_allocated())
    line = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return None if line is None else int(line[1]) * 1024


def settle(device: str) -> None:
    """Wait until the device has completed its work."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def main() -> None:
    """Take the steps; what libraries print goes to standard error."""
    setup = Setup(**json.loads(sys.argv[1]))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        contestant = CONTESTANTS[setup.contestant](setup)
        turns = Turns(setup, answers)
        turns.tell(settings=contestant.settings)
        contestant.run(turns)


if __name__ == "__main__":
    main()
