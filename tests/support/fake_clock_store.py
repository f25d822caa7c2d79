"""A store whose clock moves only when told to, for tests of leases, ages and grace."""

from etude.objects import ObjectEntry, ObjectStore


class FakeClockStore:
    """A memory store that lives in the seconds of ``now_s``."""

    def __init__(self, now_s: float = 1e9) -> None:
        inner = ObjectStore("memory://")
        self.url = inner.url
        self.get, self.stream, self.exists, self.list = inner.get, inner.stream, inner.exists, inner.list
        self.delete, self.remove_partial = inner.delete, inner.remove_partial
        self.now_s = now_s
        self._inner = inner
        self._written_s: dict[str, float] = {}

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object now; false when it is there."""
        created = self._inner.put_if_absent(key, data)
        if created:
            self._written_s[key] = self.now_s
        return created

    def renew(self, key: str, data: bytes) -> None:
        """Write an object again, now."""
        self._inner.renew(key, data)
        self._written_s[key] = self.now_s

    def entries(self, prefix: str) -> "list[ObjectEntry]":
        """Objects below a folder, with the times of this clock."""
        return [
            ObjectEntry(key=one.key, size_bytes=one.size_bytes, modified_s=self._written_s.get(one.key, self.now_s))
            for one in self._inner.entries(prefix)
        ]

    def now(self) -> float:
        """The time that the clock was set to."""
        return self.now_s
