"""A store that fails when told to: in front of any other, for tests and rehearsals.

This file owns the failures that object stores are known for and nothing of storing. Which calls fail is decided
beforehand, by number, so that every run with the same calls fails in the same places.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from threading import Lock
from typing import TypeVar, final

from etude.errors import InfrastructureError
from etude.objects import ObjectEntry, Objects

_Answer = TypeVar("_Answer")


class Failure(Enum):
    """A failure of one call."""

    REFUSED = "refused"
    """It fails without an effect, as with a server error."""
    ANSWER_LOST = "answer lost"
    """It takes effect, but fails: the connection broke after the request had arrived."""
    SLOW = "slow"
    """It takes effect, late."""
    GONE = "gone"
    """It and all later calls fail without an effect: the network, or the caller, is dead."""


@final
class FaultyStore:
    """Passes calls on to ``inner``, except as ``failures`` (call number from 0 → failure) defines.

    ``calls`` records method and key of each call, in order. Safe to share between threads; calls are numbered in order
    of arrival.
    """

    def __init__(
        self,
        inner: Objects,
        failures: Mapping[int, Failure] | None = None,
        *,
        slow_s: float = 0.01,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.calls: list[tuple[str, str]] = []
        self._inner = inner
        self._failures = dict(failures or {})
        self._slow_s = slow_s
        self._sleep = sleep
        self._is_gone = False
        self._lock = Lock()

    @property
    def url(self) -> str:
        """The actual store of the objects."""
        return self._inner.url

    def fail(self, failures: Mapping[int, Failure]) -> None:
        """Replace the plan from now on: the next call is number 0, and a dead network works again."""
        with self._lock:
            self._failures = dict(failures)
            self._is_gone = False
            self.calls.clear()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("put_if_absent", key, lambda: self._inner.put_if_absent(key, data))

    def renew(self, key: str, data: bytes) -> None:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        self._call("renew", key, lambda: self._inner.renew(key, data))

    def get(self, key: str) -> bytes | None:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("get", key, lambda: self._inner.get(key))

    def stream(self, key: str, first: int, part_bytes: int) -> Iterator[bytes] | None:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("stream", key, lambda: self._inner.stream(key, first, part_bytes))

    def exists(self, key: str) -> bool:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("exists", key, lambda: self._inner.exists(key))

    def entries(self, prefix: str) -> "list[ObjectEntry]":
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("entries", prefix, lambda: self._inner.entries(prefix))

    def list(self, prefix: str) -> "list[str]":
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("list", prefix, lambda: self._inner.list(prefix))

    def delete(self, *keys: str) -> None:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        self._call("delete", " ".join(keys), lambda: self._inner.delete(*keys))

    def remove_partial(self, older_than_s: float) -> int:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("remove_partial", "", lambda: self._inner.remove_partial(older_than_s))

    def now(self) -> float:
        """See :class:`~etude.objects.ObjectStore`; may fail."""
        return self._call("now", "", self._inner.now)

    def _call(self, method: str, key: str, act: Callable[[], _Answer]) -> _Answer:
        with self._lock:
            number = len(self.calls)
            self.calls.append((method, key))
            failure = self._failures.get(number)
            self._is_gone |= failure is Failure.GONE
            if self._is_gone:
                failure = Failure.GONE
        what = f"object store {self.url}: call {number}, {method} {key!r}"
        if failure in (Failure.REFUSED, Failure.GONE):
            raise InfrastructureError(f"{what}: {failure.value}, as planned")
        if failure is Failure.SLOW:
            self._sleep(self._slow_s)
        answer = act()
        if failure is Failure.ANSWER_LOST:
            raise InfrastructureError(f"{what}: {failure.value}, as planned")
        return answer


def random_failures(seed: int, calls: int, rate: float) -> dict[int, Failure]:
    """Passing failures for the first ``calls`` calls, each with probability ``rate``; equal seeds give equal ones."""
    if not 0 <= rate <= 1:
        raise ValueError(f"a rate of failures of {rate} is no probability")
    draw = random.Random(seed)
    kinds = (Failure.REFUSED, Failure.ANSWER_LOST, Failure.SLOW)
    return {number: draw.choice(kinds) for number in range(calls) if draw.random() < rate}
