"""Published weights come back bit for bit, over restarts and whatever breaks in the store."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from etude.errors import DamagedError, FencedError, UserError
from etude.types import TensorSpec, WeightVersion
from etude.weights.log import commit, read_commit, versions
from etude.weights.publish import Publisher
from etude.weights.pull import PulledWeights, pull
from etude.weights.state import State, StoredTensor, state_digest
from etude.weights.store import ObjectStore
from etude.weights.verify import verify


def weights(version: int) -> State:
    """A state that drifts a little with every version."""
    values = np.random.default_rng(7).standard_normal(2000, np.float32)
    values[version::50] *= np.float32(1.001)
    spec = TensorSpec(name="w", dtype="F32", shape=(2000,))
    counter = TensorSpec(name="n", dtype="I64", shape=())
    return {
        "w": StoredTensor(spec=spec, data=values.view(np.uint8)),
        "n": StoredTensor(spec=counter, data=np.array([version], "<i8").view(np.uint8)),
    }


def publish_all(store: ObjectStore, count: int, full_every: int = 4) -> list[WeightVersion]:
    publisher = Publisher(store, full_every=full_every)
    return [publisher.publish(weights(version), version=version, step=version) for version in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> tuple[ObjectStore, Path]:
    return ObjectStore(str(tmp_path / "weights")), tmp_path / "weights"


def test_first_and_every_nth_version_are_full_the_rest_small_deltas() -> None:
    records = publish_all(ObjectStore("memory://"), 10)
    assert [record.kind for record in records] == ["full", *["delta"] * 3, "full", *["delta"] * 3, "full", "delta"]
    assert [record.base for record in records[:5]] == [None, 0, 1, 2, None]
    assert records[1].size_bytes < records[0].size_bytes / 3
    assert [record.step for record in records] == list(range(10))


@pytest.mark.parametrize("have", [None, 0, 3, 5, 6, 9])
@pytest.mark.parametrize("target", [None, 0, 2, 4, 6])
def test_every_version_comes_back_from_everywhere(have: int | None, target: int | None) -> None:
    store = ObjectStore("memory://")
    publish_all(store, 10)
    held = None if have is None else pull(store, have)
    pulled = pull(store, target, have=held)
    assert pulled.version == (9 if target is None else target)
    assert pulled.digest == state_digest(pulled.state) == state_digest(weights(pulled.version))


def test_a_version_at_hand_is_not_fetched_again(folder: tuple[ObjectStore, Path]) -> None:
    store, path = folder
    records = publish_all(store, 3)
    held = pull(store)
    for record in records:
        (path / record.object_key).unlink()
    assert pull(store, have=held) is held


def test_only_the_missing_deltas_are_fetched(folder: tuple[ObjectStore, Path]) -> None:
    store, path = folder
    records = publish_all(store, 4)
    held = pull(store, 1)
    for record in records[:2]:
        (path / record.object_key).unlink()
    assert pull(store, 3, have=held).digest == records[3].digest


def test_weights_of_another_log_are_not_built_upon() -> None:
    mine, other = ObjectStore("memory://"), ObjectStore("memory://")
    publish_all(mine, 3)
    Publisher(other).publish(weights(77), version=1, step=1)
    assert pull(mine, 2, have=pull(other, 1)).digest == state_digest(weights(2))


def test_asking_for_what_was_never_published_is_the_users_mistake() -> None:
    store = ObjectStore("memory://")
    with pytest.raises(UserError, match="no weight version is published"):
        pull(store)
    publish_all(store, 2)
    with pytest.raises(UserError, match=r"weight version 5 is not published .* the newest is 1"):
        pull(store, 5)


def test_a_restarted_publisher_goes_on_with_deltas() -> None:
    store = ObjectStore("memory://")
    publish_all(store, 3)
    record = Publisher(store, full_every=4).publish(weights(3), version=3, step=3)
    assert (record.kind, record.base) == ("delta", 2)
    assert pull(store, 3).digest == state_digest(weights(3))


@pytest.mark.parametrize(("version", "base"), [(2, 1), (3, 1), (4, None), (7, None)])
def test_the_base_is_the_newest_version_since_the_last_full_one(version: int, base: int | None) -> None:
    store = ObjectStore("memory://")
    publish_all(store, 2)
    assert Publisher(store, full_every=4).publish(weights(9), version=version, step=9).base == base


def test_a_log_may_start_anywhere() -> None:
    store = ObjectStore("memory://")
    assert Publisher(store).publish(weights(5), version=5, step=5).kind == "full"


def test_publishing_again_after_a_crash_changes_nothing() -> None:
    store = ObjectStore("memory://")
    records = publish_all(store, 6)
    publisher = Publisher(store, full_every=4)
    again = [publisher.publish(weights(version), version=version, step=99) for version in range(3, 7)]
    assert again[:3] == records[3:]
    assert (again[3].version, again[3].base) == (6, 5)


def test_a_payload_without_a_commit_does_not_hinder(folder: tuple[ObjectStore, Path]) -> None:
    store, path = folder
    record = publish_all(store, 2)[1]
    (path / "commits/00000001.json").unlink()
    assert versions(store) == [0]
    again = Publisher(store, full_every=4).publish(weights(1), version=1, step=1)
    assert again.object_key == record.object_key
    assert pull(store).version == 1


def test_a_fenced_publisher_leaves_the_log_as_it_was() -> None:
    store = ObjectStore("memory://")
    publisher = Publisher(store)
    publisher.publish(weights(0), version=0, step=0)
    Publisher(store).publish(weights(1), version=1, step=1)
    with pytest.raises(FencedError):
        publisher.publish(weights(99), version=1, step=1)
    assert pull(store).digest == state_digest(weights(1))
    publisher.publish(weights(2), version=2, step=2)
    assert pull(store).digest == state_digest(weights(2)), "what was refused must not be built upon"


def test_training_in_place_does_not_corrupt_the_next_delta() -> None:
    store, live = ObjectStore("memory://"), np.zeros(8, np.uint8)
    state = {"w": StoredTensor(spec=TensorSpec(name="w", dtype="F32", shape=(2,)), data=live)}
    publisher = Publisher(store)
    for version in range(3):
        live += 1
        publisher.publish(state, version=version, step=version)
    assert [pull(store, version).state["w"].data[0] for version in range(3)] == [1, 2, 3]


def test_a_changed_layout_is_refused() -> None:
    publisher = Publisher(ObjectStore("memory://"))
    publisher.publish(weights(0), version=0, step=0)
    with pytest.raises(ValueError, match=r"tensor 'n' .* differs from its base"):
        publisher.publish({"w": weights(1)["w"]}, version=1, step=1)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="full_every=0"):
        Publisher(ObjectStore("memory://"), full_every=0)
    with pytest.raises(ValueError, match="-1 is negative"):
        Publisher(ObjectStore("memory://")).publish(weights(0), version=-1, step=0)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


BREAKAGES: dict[str, Callable[[Path], None]] = {"is damaged": flip, "is missing": Path.unlink}


@pytest.mark.parametrize("symptom", sorted(BREAKAGES))
def test_a_broken_object_is_named_and_isolated(folder: tuple[ObjectStore, Path], symptom: str) -> None:
    store, path = folder
    records = publish_all(store, 9)
    BREAKAGES[symptom](path / records[5].object_key)
    for version in (5, 6, 7):
        with pytest.raises(
            DamagedError, match=f"{records[5].object_key} of weight version 5 {symptom}.*weights verify"
        ):
            pull(store, version)
    assert pull(store, 4).version == 4
    assert pull(store, 8).version == 8
    checks = list(verify(store))
    assert [check.version for check in checks] == list(range(9))
    assert [check.version for check in checks if check.fault] == [5, 6, 7]
    assert all(f"{records[5].object_key} of weight version 5 {symptom}" in str(check.fault) for check in checks[5:8])
    assert [check.record for check in checks] == records


def test_a_damaged_leftover_is_not_committed(folder: tuple[ObjectStore, Path]) -> None:
    store, path = folder
    record = publish_all(store, 2)[1]
    (path / "commits/00000001.json").unlink()
    flip(path / record.object_key)
    with pytest.raises(DamagedError, match="delete it and publish again"):
        Publisher(store, full_every=4).publish(weights(1), version=1, step=1)
    assert versions(store) == [0]


def test_a_record_that_lies_about_the_state_is_found_out() -> None:
    store, forged = ObjectStore("memory://"), ObjectStore("memory://")
    for record in publish_all(store, 3):
        payload = store.get(record.object_key)
        assert payload is not None
        forged.put_if_absent(record.object_key, payload)
        digest = "0" * 64 if record.version == 1 else record.digest
        commit(forged, dataclasses.replace(record, digest=digest))
    with pytest.raises(DamagedError, match=r"gives the state .* its commit record says 000000000000"):
        pull(forged, 2)
    assert [bool(check.fault) for check in verify(forged)] == [False, True, True]


def test_a_base_with_the_right_shapes_and_wrong_bytes_is_found_out() -> None:
    store = ObjectStore("memory://")
    publish_all(store, 2)
    rotten = PulledWeights(version=0, digest=state_digest(weights(0)), state=weights(3))
    with pytest.raises(DamagedError, match="gives the state"):
        pull(store, 1, have=rotten)


def test_verify_finds_gaps_and_damaged_records(folder: tuple[ObjectStore, Path]) -> None:
    store, path = folder
    publish_all(store, 8)
    (path / "commits/00000001.json").unlink()
    (path / "commits/00000006.json").write_bytes(b"{}")
    faults = {check.version: check.fault for check in verify(store)}
    assert [version for version, fault in faults.items() if fault] == [2, 3, 6, 7]
    assert "weight version 1 is not in the log" in str(faults[3])
    assert "commits/00000006.json is damaged" in str(faults[7])


def test_verify_of_a_sound_log_finds_nothing() -> None:
    store = ObjectStore("memory://")
    publish_all(store, 6)
    assert [check.fault for check in verify(store)] == [None] * 6
    assert [check.record for check in verify(store)] == [read_commit(store, version) for version in range(6)]
    assert list(verify(ObjectStore("memory://"))) == []
