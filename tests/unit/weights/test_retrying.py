"""Calls that a waiting store retries, and that nothing is lost while it is away."""

from pathlib import Path
from typing import final

import pytest

from etude.errors import InfrastructureError
from etude.objects import Objects, ObjectStore, RetryingStore, StoreOptions
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher
from etude.weights.pull import pull
from faulty_store import Failure, FaultyStore
from s3_server import S3Server
from smalldisk import fill, small_disk
from synthetic_updates import synthetic_version


class Counted:
    """Counts failures and successes, and does not wait."""

    def __init__(self) -> None:
        self.failures = 0
        self.successes = 0

    def failed(self, error: InfrastructureError, *, again: bool) -> None:
        self.failures += 1

    def succeeded(self) -> None:
        self.successes += 1


@final
class Bucket(Counted):
    """An S3 server that goes away, and is back after a number of failures."""

    def __init__(self) -> None:
        super().__init__()
        self._server = S3Server()
        self._server.make_bucket()
        self.options = StoreOptions(
            endpoint=self._server.endpoint,
            allow_http=True,
            region="us-east-1",
            access_key_id="id",
            secret_access_key="secret",
            retries=0,
        )

    def leave(self) -> None:
        self._server.stop()

    def failed(self, error: InfrastructureError, *, again: bool) -> None:
        super().failed(error, again=again)
        if self.failures == 3:
            self._server = S3Server(self._server.port)


def test_failures_are_tried_again_and_answers_are_not(tmp_path: Path) -> None:
    faulty, outages = FaultyStore(ObjectStore("memory://")), Counted()
    store = RetryingStore(faulty.url, lambda: faulty, outages)
    assert store.get("a") is None
    assert store.put_if_absent("a", b"1")
    assert not store.put_if_absent("a", b"2")
    assert (outages.failures, outages.successes) == (0, 0)
    faulty.fail({0: Failure.REFUSED, 1: Failure.REFUSED, 3: Failure.REFUSED})
    assert store.get("a") == b"1"
    assert store.list("") == ["a"]
    assert (outages.failures, outages.successes) == (3, 2)
    faulty.fail({0: Failure.ANSWER_LOST})
    assert not store.put_if_absent("c", b"3"), "it was there already, by this very call"
    assert store.get("c") == b"3"


def test_a_disk_that_is_full_is_left_to_who_makes_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk)
        store = RetryingStore(str(disk), lambda: ObjectStore(str(disk)), Counted())
        with pytest.raises(InfrastructureError, match="No space left on device"):
            store.put_if_absent("a", bytes(4096))


def test_a_bucket_that_goes_away_and_comes_back_has_every_version() -> None:
    bucket = Bucket()
    try:
        url = "s3://bucket/run"

        def opened() -> Objects:
            return ObjectStore(url, bucket.options)

        log = WeightLog(RetryingStore(url, opened, bucket))
        with Publisher(log) as publisher:
            publisher.publish(synthetic_version(0), version=0, step=0).result()
            bucket.leave()
            record = publisher.publish(synthetic_version(1), version=1, step=1).result()
        assert bucket.failures >= 3
        assert record.base == 0, "nothing has to be published anew"
        assert pull(log).digest == record.digest == state_digest(synthetic_version(1))
    finally:
        bucket.leave()
