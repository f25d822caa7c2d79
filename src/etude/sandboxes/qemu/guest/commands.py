"""Commands inside of a virtual machine: started, fed, watched and ended, any number at a time.

A command ends with its first process, and its answer is given then; what it left running goes on, and what that
prints is thrown away. At its deadline, or when nobody waits for it any more, everything it started is killed: each
command has a control group of its own. Owns processes and pipes; the loop is :mod:`etude.sandboxes.qemu.guest.agent`'s.
"""

import errno
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from etude.sandboxes.outputs import CappedOutput
from etude.sandboxes.qemu.guest import system
from etude.sandboxes.qemu.guest.filesystem import GROUP, World

CHUNK_BYTES = 64 << 10
FLOOD_CHUNKS = 16
"""Most that is read of one output before others have their turn."""
NOT_FOUND, NOT_RUNNABLE = 127, 126
"""Exit codes of a shell for a program that does not exist and one that cannot be run."""


class Command:
    """One command from its start to its answer."""

    def __init__(self, number: int, order: dict[str, Any], stdin: bytes, world: World) -> None:
        """Start it. ``order`` says ``argv``, ``environment`` and ``timeout_s``. Raises ``OSError``."""
        self.number = number
        self.started_at = time.monotonic()
        self.deadline = self.started_at + float(order["timeout_s"])
        self.timed_out = False
        self.outputs = (CappedOutput(), CappedOutput())
        self._stdin = memoryview(stdin)
        self._group = f"{GROUP}/c{number}"
        os.mkdir(self._group)  # noqa: PTH102 - a fresh copy has no code ready for more
        environment = {**world.environment, **order["environment"]}
        theirs, self._pipes = _pipes()
        self.process = os.fork()
        if self.process == 0:
            _become(order["argv"], environment, theirs, (self._group, world))
        for end in theirs:
            os.close(end)
        self.handle = os.pidfd_open(self.process)

    def watch(self, selector: selectors.BaseSelector, ended: Callable[["Command"], None]) -> None:
        """Be woken for input, output and the end; ``ended`` is called once, when the answer can be given."""
        stdin, *outputs = self._pipes
        if self._stdin:
            selector.register(stdin, selectors.EVENT_WRITE, lambda: self._feed(selector, stdin))
        else:
            os.close(stdin)
        for pipe, output in zip(outputs, self.outputs, strict=True):
            selector.register(pipe, selectors.EVENT_READ, _Drain(selector, pipe, output))
        selector.register(self.handle, selectors.EVENT_READ, lambda: self._end(selector, ended))

    def kill(self, *, timed_out: bool = False) -> None:
        """Kill it and all that it started."""
        self.timed_out |= timed_out
        self.deadline = float("inf")
        system.write(f"{self._group}/cgroup.kill", "1")

    def answer(self) -> dict[str, Any]:
        """How it ended."""
        stdout, stderr = self.outputs
        return {
            "exit_code": self.exit_code,
            "stdout": stdout.text,
            "stderr": stderr.text,
            "timed_out": self.timed_out,
            "truncated": stdout.truncated or stderr.truncated,
            "seconds": time.monotonic() - self.started_at,
        }

    def _feed(self, selector: selectors.BaseSelector, pipe: int) -> None:
        try:
            self._stdin = self._stdin[os.write(pipe, self._stdin[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]
        if not self._stdin:
            selector.unregister(pipe)
            os.close(pipe)

    def _end(self, selector: selectors.BaseSelector, ended: Callable[["Command"], None]) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.exit_code = 128 - code if code < 0 else code
        selector.unregister(self.handle)
        os.close(self.handle)
        for key in list(selector.get_map().values()):
            if isinstance(key.data, _Drain) and key.data.output in self.outputs:
                key.data()
        with suppress(OSError):  # something of it still runs
            os.rmdir(self._group)  # noqa: PTH106 - as above
        ended(self)


class _Drain:
    """Reads one output of a command, and goes on when it has ended, for what it left running."""

    def __init__(self, selector: selectors.BaseSelector, pipe: int, output: CappedOutput) -> None:
        self._selector = selector
        self._pipe = pipe
        self.output = output

    def __call__(self) -> None:
        for _ in range(FLOOD_CHUNKS):
            try:
                chunk = os.read(self._pipe, CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self._selector.unregister(self._pipe)
                os.close(self._pipe)
                return
            self.output.add(chunk)


def kill_groups() -> None:
    """Kill every command and all that it started; what is being forked is killed, too."""
    for group in GROUP.glob("c*/"):
        system.write(f"{group}/cgroup.kill", "1")


def sweep_groups() -> None:
    """Remove the control groups of commands of which nothing runs any more."""
    for group in GROUP.glob("c*/"):
        with suppress(OSError):
            group.rmdir()


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Their and our ends of standard input, output and error; ours never block."""
    (stdin, feed), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
    for pipe in (feed, out, err):
        os.set_blocking(pipe, False)
    return (stdin, stdout, stderr), (feed, out, err)


def _become(
    argv: list[str], environment: dict[str, str], pipes: tuple[int, int, int], place: tuple[str, World]
) -> NoReturn:
    """Turn a fresh child into the command."""
    code = NOT_RUNNABLE
    try:
        group, world = place
        system.write(f"{group}/cgroup.procs", "0")
        system.write("/proc/self/oom_score_adj", "0")  # the agent's own is that of what is never killed
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        world.enter()
        os.closerange(3, 4096)
        os.execvpe(argv[0], argv, environment)
    except FileNotFoundError:
        os.write(2, f"{argv[0]}: command not found\n".encode("utf-8", "surrogateescape"))
        code = NOT_FOUND
    except OSError as error:
        words = os.strerror(error.errno or errno.EIO)
        os.write(2, f"{argv[0]}: {words}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(code)
