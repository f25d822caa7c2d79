"""Base class of resources whose context ends with ``close()``, as ``contextlib.closing`` does for a single block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A resource that :meth:`close` releases; leaving its context closes it."""

    @abstractmethod
    def close(self) -> None:
        """Release it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
