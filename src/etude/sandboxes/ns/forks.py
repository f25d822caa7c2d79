"""Forked children of the launcher, none of which may continue as the launcher. Standard library alone."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType


class End:
    """A block that always ends the process, so that a child never continues as the launcher."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
        os._exit(1)


@contextmanager
def held_child(prepare: Callable[[], None], failure: str) -> Iterator[int]:
    """Fork a child that calls ``prepare`` and waits while the block is open, so that its namespaces can be opened.

    Raises ``OSError`` with the message ``failure`` if the child fails.
    """
    ready, done = os.pipe(), os.pipe()
    process = os.fork()
    if process == 0:
        with End():
            prepare()
            os.write(ready[1], b"1")
            os.close(done[1])
            os.read(done[0], 1)
            os._exit(0)
    os.close(ready[1])
    try:
        if not os.read(ready[0], 1):
            raise OSError(failure)
        yield process
    finally:
        for descriptor in (ready[0], *done):
            os.close(descriptor)
        os.waitpid(process, 0)
