"""A process that takes over a transfer repeats only the parts in transfer, whatever the region's store has lost."""

import hashlib
from collections.abc import Iterator

import pytest

from etude.errors import DamagedError, InfrastructureError
from etude.objects import ObjectStore
from etude.types import WeightPack
from etude.weights.log import WeightLog
from etude.weights.pack_parts import FOLDER, SHARE, PackParts
from etude.weights.records import pack_key

DATA = bytes(range(256)) * 4096
PACK = WeightPack(digest=hashlib.sha256(DATA).hexdigest(), size_bytes=len(DATA), first=0, last=0)


class FarStore:
    """A distant store that counts the bytes it sends, and stops answering after ``most_bytes``."""

    def __init__(self, data: bytes | None = DATA, most_bytes: int = len(DATA)) -> None:
        self.url, self.sent, self.most_bytes = "far", 0, most_bytes
        self._data = data

    def get(self, key: str) -> bytes | None:
        assert key == pack_key(PACK.digest)
        self.sent += len(self._data or b"")
        return self._data

    def stream(self, key: str, first: int, part_bytes: int) -> Iterator[bytes] | None:
        assert key == pack_key(PACK.digest)
        return None if self._data is None else self._parts(self._data, first, part_bytes)

    def _parts(self, data: bytes, first: int, part_bytes: int) -> Iterator[bytes]:
        for start in range(first, len(data), part_bytes):
            part = data[start : start + part_bytes]
            self.sent += len(part)
            if self.sent > self.most_bytes:
                raise InfrastructureError("the link was cut")
            yield part


def fetch(far: FarStore, region: ObjectStore, *, is_long: bool = True) -> bytes:
    parts = PackParts(region)
    parts.look()
    data = parts.fetch(WeightLog(far), PACK, lambda: is_long)  # type: ignore[arg-type]  # reads are all it is asked for
    parts.drop(PACK)
    return data


@pytest.mark.parametrize("broken_at", [1, len(DATA) // 3, len(DATA) - 1])
def test_who_goes_on_fetches_the_rest_and_one_part_again(broken_at: int) -> None:
    region, first, second = ObjectStore("memory://"), FarStore(most_bytes=broken_at), FarStore()
    with pytest.raises(InfrastructureError):
        fetch(first, region)
    assert fetch(second, region) == DATA
    assert first.sent + second.sent <= len(DATA) * (1 + 1 / SHARE)
    assert not region.list(FOLDER), "the pack is there now"


def test_parts_that_are_not_what_the_pack_is_are_fetched_again() -> None:
    region, far = ObjectStore("memory://"), FarStore()
    region.put_if_absent(f"{FOLDER}/{PACK.digest}/{0:012d}", b"x" * 1000)
    region.put_if_absent(f"{FOLDER}/{PACK.digest}/{2000:012d}", b"behind a gap")
    assert fetch(far, region) == DATA
    assert not region.list(FOLDER)


def test_a_short_transfer_keeps_no_parts() -> None:
    region = ObjectStore("memory://")
    with pytest.raises(InfrastructureError):
        fetch(FarStore(most_bytes=len(DATA) // 2), region, is_long=False)
    assert not region.list(FOLDER)


def test_a_pack_that_is_not_there_is_damage() -> None:
    with pytest.raises(DamagedError, match="is not in far"):
        fetch(FarStore(data=None), ObjectStore("memory://"))
