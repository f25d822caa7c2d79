"""Published weights are read back bit for bit: at every version, from everywhere, after restarts and failures."""

from collections.abc import Callable
from dataclasses import replace
from threading import Event

import numpy as np
import pytest

from etude.errors import DamagedError, FencedError, InfrastructureError, UserError
from etude.objects import Objects, ObjectStore
from etude.types import TensorSpec, WeightVersion
from etude.weights.chunks import Layout
from etude.weights.compact import Compactor
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import ReceiveOptions, Receiver, pull
from etude.weights.records import commit_key, pack_key
from etude.weights.repair import repair
from etude.weights.state import ELEMENTS, State, StoredTensor, snapshot
from faulty_store import Failure, FaultyStore
from synthetic_updates import alike, synthetic_version

SMALL = PublishOptions(codec="gaps", chunk_numbers=256, pack_bytes=1500, encoders=2, uploads=2)
PLAIN = replace(SMALL, anchor_every=0, compact=False)


def memory_log(key: bytes | None = None) -> WeightLog:
    return WeightLog(ObjectStore("memory://"), key=key)


def publish(log: WeightLog, *versions: int, options: PublishOptions = SMALL) -> list[WeightVersion]:
    with Publisher(log, options) as publisher:
        records = [
            publisher.publish(synthetic_version(version), version=version, step=version).result(60)
            for version in versions
        ]
        publisher.settle()
    return records


def assert_holds(receiver: Receiver, version: int) -> None:
    weights = receiver.weights()
    assert receiver.version == weights.version == version
    assert weights.digest == state_digest(weights.state) == state_digest(synthetic_version(version))
    assert alike(weights.state, synthetic_version(version))


# --- Every version, from everywhere ---


@pytest.mark.parametrize("codec", ["auto", "gaps", "classes"])
def test_a_receiver_that_follows_holds_every_version(codec: str) -> None:
    log = memory_log()
    with Publisher(log, replace(SMALL, codec=codec)) as publisher, Receiver(log) as receiver:
        for version in range(20):
            record = publisher.publish(synthetic_version(version), version=version, step=7 * version).result(60)
            assert (record.base, record.step) == (version - 1 if version else None, 7 * version)
            arrival = receiver.advance()
            assert (arrival.version, arrival.digest, arrival.faults) == (version, record.digest, ())
            assert arrival.links == 1
            assert_holds(receiver, version)


def test_deltas_are_small() -> None:
    log = memory_log()
    full, delta = publish(log, 0, 1, options=replace(PLAIN, chunk_numbers=1 << 22))
    assert (full.kind, delta.kind) == ("full", "delta")
    assert delta.size_bytes < full.size_bytes / 5


@pytest.mark.parametrize("target", range(10))
@pytest.mark.parametrize("have", [None, 0, 3, 4, 7, 9])
def test_every_version_can_be_had_from_every_other(have: int | None, target: int) -> None:
    log = every_version()
    with Receiver(log) as receiver:
        if have is not None:
            receiver.advance(have)
        receiver.advance(target)
        assert_holds(receiver, target)


def every_version() -> WeightLog:
    log = memory_log()
    publish(log, *range(10), options=replace(SMALL, anchor_every=4))
    return log


def test_going_back_takes_an_inverse_link_where_there_is_one() -> None:
    log = memory_log()
    publish(log, *range(6), options=replace(PLAIN, chunk_numbers=1 << 22))
    assert Compactor(log).link(5, 2) is not None
    with Receiver(log) as receiver:
        receiver.advance()
        assert [edge.kind for edge in receiver.plan(2).edges] == ["inverse"]
        arrival = receiver.advance(2)
        assert (arrival.links, arrival.changes.whole) == (1, False)
        assert_holds(receiver, 2)


@pytest.mark.parametrize("way", [(0, 1), (0, 1, 2, 7), (7, 2), (2, 0, 9)])
def test_an_arrival_names_all_that_changed(way: tuple[int, ...]) -> None:
    log = every_version()
    Compactor(log).link(7, 2)
    with Receiver(log) as receiver:
        receiver.advance(way[0])
        for target in way[1:]:
            before = snapshot(receiver.weights().state)
            arrival = receiver.advance(target)
            for name, runs in receiver.changed(arrival).items():
                for run in runs:
                    before[name].numbers[run.indices.astype(np.int64)] = run.bits
            assert arrival.changes.whole or alike(before, synthetic_version(target))


def test_a_fresh_receiver_starts_from_the_newest_anchor() -> None:
    log = every_version()
    assert [(link.source, link.target) for link in log.links()] == [(0, 4), (4, 8), (None, 4), (None, 8)]
    with Receiver(log) as receiver:
        assert [(edge.source, edge.target) for edge in receiver.plan().edges] == [(None, 8), (8, 9)]
        receiver.advance()
        assert_holds(receiver, 9)


def test_versions_may_start_anywhere_and_leave_gaps() -> None:
    log = memory_log()
    with Receiver(log) as receiver:
        for version, base in ((5, None), (6, 5), (9, 6), (10, 9), (100, 10)):
            (record,) = publish(log, version, options=PLAIN)
            assert record.base == base
            receiver.advance()
            assert_holds(receiver, version)


def test_announced_packs_are_fetched_before_the_commit() -> None:
    store = FaultyStore(ObjectStore("memory://"))
    log = WeightLog(store)
    publish(log, 0, 1, options=replace(PLAIN, pack_bytes=1))
    with Receiver(log) as receiver:
        receiver.advance(0)
        early = receiver.prefetch()
        assert early == sum(pack.size_bytes for pack in publish(log, 1)[0].packs) > 0
        store.calls.clear()
        receiver.advance()
        assert not [key for method, key in store.calls if method == "get" and key.startswith("packs/")]
        assert_holds(receiver, 1)


def test_signed_weights_are_only_read_with_the_key() -> None:
    log = memory_log(b"k" * 32)
    publish(log, 0, 1)
    assert alike(pull(WeightLog(log.store, key=b"k" * 32)).state, synthetic_version(1))
    with pytest.raises(DamagedError, match="signature is wrong"):
        pull(WeightLog(log.store, key=b"x" * 32))


# --- While the trainer goes on ---


def test_publishing_does_not_wait_for_the_store() -> None:
    gate = Event()
    store = FaultyStore(ObjectStore("memory://"), sleep=lambda _: assert_opened(gate))
    log = WeightLog(store)
    with Publisher(log, PLAIN) as publisher:
        publisher.publish(synthetic_version(0), version=0, step=0).result(60)
        store.fail(dict.fromkeys(range(1000), Failure.SLOW))
        first = publisher.publish(synthetic_version(1), version=1, step=1)
        second = publisher.publish(synthetic_version(2), version=2, step=2)
        with pytest.raises(InfrastructureError, match=r"version 2 was not read within 0.05 s"):
            second.wait_read(0.05)
        assert not first.done
        with pytest.raises(InfrastructureError, match=r"version 1 was not committed in 0.01 s"):
            first.result(0.01)
        gate.set()
        assert [first.result(60).version, second.result(60).version] == [1, 2]


def assert_opened(gate: Event) -> None:
    assert gate.wait(60)


def test_tensors_may_change_once_they_have_been_read() -> None:
    log, live = memory_log(), snapshot(synthetic_version(0))
    with Publisher(log, SMALL) as publisher:
        publications = []
        for version in range(6):
            for name, tensor in synthetic_version(version).items():
                live[name].data[...] = tensor.data
            publications.append(publisher.publish(live, version=version, step=version))
            assert publications[-1].wait_read(60) > 0
        assert [publication.result(60).version for publication in publications] == list(range(6))
    for version in range(6):
        assert alike(pull(log, version).state, synthetic_version(version))


def test_uploads_that_hang_do_not_keep_the_trainer_from_changing_its_tensors() -> None:
    gate = Event()
    store = FaultyStore(ObjectStore("memory://"), sleep=lambda _: assert_opened(gate))
    with Publisher(WeightLog(store), replace(PLAIN, pack_bytes=1)) as publisher:
        publisher.publish(synthetic_version(0), version=0, step=0).result(60)
        store.fail(dict.fromkeys(range(3, 1000), Failure.SLOW))  # but the look at version 0 and at pleas
        publication = publisher.publish(synthetic_version(1), version=1, step=1)
        publication.wait_read(60)
        assert not publication.done
        gate.set()
        assert publication.result(60).version == 1


# --- Restarts and failures ---


def test_a_restarted_publisher_goes_on_with_deltas() -> None:
    log = memory_log()
    publish(log, 0, 1, 2)
    (record,) = publish(log, 3)
    assert (record.kind, record.base) == ("delta", 2)
    assert alike(pull(log, 3).state, synthetic_version(3))


def test_publishing_again_after_a_crash_changes_nothing() -> None:
    log = memory_log()
    records = publish(log, *range(6))
    assert publish(log, 3, 4, 5, options=replace(SMALL, codec="classes")) == records[3:]
    assert alike(pull(log).state, synthetic_version(5))


def test_a_fenced_publisher_leaves_the_log_as_it_was_and_goes_back() -> None:
    log = memory_log()
    with Publisher(log, SMALL) as ours, Publisher(log, SMALL) as other:
        ours.publish(synthetic_version(0), version=0, step=0).result(60)
        other.publish(synthetic_version(1), version=1, step=1).result(60)
        with pytest.raises(FencedError):
            ours.publish(synthetic_version(99), version=1, step=1).result(60)
        assert alike(pull(log).state, synthetic_version(1))
        assert ours.publish(synthetic_version(2), version=2, step=2).result(60).base == 1
    assert alike(pull(log).state, synthetic_version(2)), "what was refused must not be built upon"


@pytest.mark.parametrize("codec", ["gaps", "classes"])
def test_a_version_that_failed_is_taken_back(codec: str) -> None:
    store = FaultyStore(ObjectStore("memory://"))
    log = WeightLog(store)
    with Publisher(log, replace(PLAIN, codec=codec)) as publisher:
        publisher.publish(synthetic_version(0), version=0, step=0).result(60)
        store.fail(dict.fromkeys(range(4, 1000), Failure.REFUSED))
        failed = publisher.publish(synthetic_version(31), version=1, step=1)
        with pytest.raises(InfrastructureError):
            failed.result(60)
        store.fail({})
        failed.wait_read(0)
        assert publisher.publish(synthetic_version(1), version=1, step=1).result(60).base == 0
        assert publisher.publish(synthetic_version(3), version=3, step=3).result(60).base == 1
    assert alike(pull(log, 1).state, synthetic_version(1))
    assert alike(pull(log).state, synthetic_version(3))


def test_another_try_may_announce_other_packs() -> None:
    store = FaultyStore(ObjectStore("memory://"))
    log = WeightLog(store)
    with Publisher(log, replace(SMALL, pack_bytes=1, anchor_every=1)) as publisher:
        publisher.publish(synthetic_version(0), version=0, step=0).result(60)
        publisher.publish(synthetic_version(1), version=1, step=1).result(60)
        publisher.settle()
        log.store.delete(commit_key(1))
        assert publisher.publish(synthetic_version(2), version=2, step=2).result(60).base is None
        publisher.settle()
    assert alike(pull(log).state, synthetic_version(2))


@pytest.mark.parametrize("restart", [False, True])
def test_over_a_damaged_commit_everything_is_published_again(restart: bool) -> None:
    log = memory_log()
    with Receiver(log) as behind, Publisher(log, PLAIN) as publisher:
        for version in range(4):
            publisher.publish(synthetic_version(version), version=version, step=version).result(60)
        behind.advance(2)
        log.store.renew(commit_key(3), b"{}")
        with pytest.raises(DamagedError, match=r"commits/00000003.json is damaged"):
            behind.advance()
        if restart:
            (record,) = publish(log, 4, options=PLAIN)
        else:
            record = publisher.publish(synthetic_version(4), version=4, step=4).result(60)
        assert record.kind == "full"
        behind.advance()
        assert_holds(behind, 4)


def test_a_reader_that_no_way_leads_on_is_helped_by_the_next_version() -> None:
    log = memory_log()
    with Receiver(log) as behind, Publisher(log, PLAIN) as publisher:
        records = [publisher.publish(synthetic_version(v), version=v, step=v).result(60) for v in range(4)]
        behind.advance(2)
        log.store.delete(*(pack_key(pack.digest) for pack in records[3].packs))
        with pytest.raises(DamagedError, match="is not in memory"):
            behind.advance()
        kinds = [publisher.publish(synthetic_version(v), version=v, step=v).result(60).kind for v in range(4, 8)]
        assert kinds == ["full", "delta", "delta", "delta"], "once"
        behind.advance()
        assert_holds(behind, 7)


def test_what_follows_a_commit_may_fail_without_harm() -> None:
    log = memory_log()
    with Publisher(log, replace(SMALL, anchor_every=0)) as publisher:
        for version in range(33):
            record = publisher.publish(synthetic_version(version), version=version, step=version).result(60)
            if version == 1:
                log.store.delete(*(pack_key(pack.digest) for pack in record.packs))
            if version in (4, 16):
                with pytest.raises(DamagedError, match="is not in memory"):
                    publisher.settle()
            elif version > 16:
                publisher.settle()
    assert (16, 32) in [(link.source, link.target) for link in log.links()]


def test_a_changed_layout_is_refused() -> None:
    log = memory_log()
    with Publisher(log, SMALL) as publisher:
        publisher.publish(synthetic_version(0), version=0, step=0).result(60)
        with pytest.raises(ValueError, match=r"'counter' differs from the version before"):
            fewer = {name: tensor for name, tensor in synthetic_version(1).items() if name != "counter"}
            publisher.publish(fewer, version=1, step=1).result(60)
        with pytest.raises(ValueError, match=r"'layer.bf16' differs from the version before"):
            publisher.publish(synthetic_version(1, columns=8), version=1, step=1).result(60)
        assert publisher.publish(synthetic_version(1), version=1, step=1).result(60).kind == "delta"
    with Publisher(log, SMALL) as restarted, pytest.raises(ValueError, match=r"layer.bf16"):
        restarted.publish(synthetic_version(2, columns=8), version=2, step=2).result(60)


# --- What readers refuse, and what they get around ---


def test_asking_for_what_was_never_published_is_the_users_mistake() -> None:
    log = memory_log()
    with pytest.raises(UserError, match="no weight version is published"):
        pull(log)
    with Receiver(log) as receiver, pytest.raises(ValueError, match="holds nothing yet"):
        receiver.weights()
    publish(log, 0, 1)
    with pytest.raises(UserError, match=r"weight version 5 is not published .* the newest is 1"):
        pull(log, 5)
    with Publisher(log) as publisher, pytest.raises(ValueError, match="-1 is negative"):
        publisher.publish(synthetic_version(0), version=-1, step=0)


def test_a_broken_way_is_left_for_an_older_one() -> None:
    """Regression: past a sound-looking anchor that turned out broken nothing older was looked for."""
    log = memory_log()
    publish(log, *range(10), options=replace(SMALL, anchor_every=4, compact=False))
    for link in log.links():
        log.store.delete(*(pack_key(pack.digest) for pack in link.packs))
    with Receiver(log) as receiver:
        arrival = receiver.advance()
        assert len(arrival.faults) == 2
        assert_holds(receiver, 9)


@pytest.mark.parametrize("breakage", [ObjectStore.delete, lambda store, key: store.renew(key, b"ETP2 torn")])
def test_what_cannot_be_had_is_named(breakage: Callable[[ObjectStore, str], None]) -> None:
    store = ObjectStore("memory://")
    log = WeightLog(store)
    records = publish(log, *range(4), options=PLAIN)
    broken = pack_key(records[2].packs[0].digest)
    breakage(store, broken)
    with Receiver(log) as receiver:
        with pytest.raises(DamagedError, match=rf"version 3 cannot be reached.*{broken}"):
            receiver.advance()
        assert receiver.version == 1
        assert_holds(receiver, 1)


def rot(receiver: Receiver) -> None:
    for tensor in receiver.weights().state.values():
        tensor.data[...] ^= 1


def test_a_copy_that_rotted_is_found_out_and_read_again() -> None:
    log = memory_log()
    publish(log, 0, 1)
    with Receiver(log) as receiver:
        receiver.advance()
        assert receiver.scrub() == 0
        rot(receiver)
        assert receiver.scrub() > 0
        assert_holds(receiver, 1)
        rot(receiver)
        publish(log, 2)
        arrival = receiver.advance()
        assert arrival.faults
        assert_holds(receiver, 2)


def test_every_type_of_tensor_survives() -> None:
    log, draw = memory_log(), np.random.default_rng(3)

    def weights(seed: int) -> State:
        state = {}
        for dtype, element in ELEMENTS.items():
            data = draw.integers(0, 256, 7 * element.per_value * element.size_bytes, np.uint8)
            state[dtype] = StoredTensor(spec=TensorSpec(name=dtype, dtype=dtype, shape=(7,)), data=data)
        return state

    states = [weights(version) for version in range(3)]
    with Publisher(log, SMALL) as publisher:
        for version, state in enumerate(states):
            publisher.publish(state, version=version, step=0).result(60)
    for version, state in enumerate(states):
        assert alike(pull(log, version).state, state)


@pytest.mark.parametrize("rows", [1 << 60, 10 << 30])
def test_a_state_larger_than_can_be_meant_is_refused_before_it_takes_memory(rows: int) -> None:
    """Regression: a layout of 2^60 numbers hung its reader, one larger than the memory ended it."""
    log = memory_log()
    spec = TensorSpec(name="embed", dtype="F32", shape=(rows,))
    layout = Layout(specs=(spec,))
    (record,) = publish(log, 0, options=PLAIN)
    log.commit(replace(record, version=1, layout=log.put_layout(layout.to_bytes())))
    with Receiver(log, ReceiveOptions(most_bytes=1 << 20)) as receiver:
        with pytest.raises(DamagedError, match=rf"layout of weight version 1 is of {4 * rows:,} bytes, expected"):
            receiver.advance()
        receiver.advance(0)
        assert_holds(receiver, 0)


# --- What only the log itself may say ---


KEY = b"the key that signs records"


def copy(source: Objects, target: Objects) -> None:
    for folder in ("commits", "links", "packs", "layouts"):
        for key in source.list(folder):
            if (data := source.get(key)) is not None and not target.put_if_absent(key, data):
                target.renew(key, data)


def test_deleted_records_take_no_reader_back() -> None:
    """Regression: without any key, a running reader was moved from 8 to 5, and a new one began with 5."""
    log = memory_log(KEY)
    publish(log, *range(9), options=PLAIN)
    with Receiver(WeightLog(log.store, key=KEY)) as running:
        running.advance()
        log.store.delete(*(commit_key(version) for version in (6, 7, 8)))
        with pytest.raises(DamagedError, match=r"newest weight version in .* is 5, but version 8 was published"):
            running.advance()
        assert_holds(running, 8)
        informed = WeightLog(log.store, key=KEY, at_least=8)
        with Receiver(informed) as joining, pytest.raises(DamagedError, match="is 5, but version 8 was published"):
            joining.advance()
        log.store.delete(*(commit_key(version) for version in range(6)))
        with pytest.raises(DamagedError, match="is None, but version 8 was published"):
            running.advance()
        assert_holds(running, 8)


def test_who_names_an_older_version_goes_back_to_it() -> None:
    log = memory_log(KEY)
    publish(log, *range(4), options=PLAIN)
    log.store.delete(commit_key(3))
    with Receiver(WeightLog(log.store, key=KEY, at_least=3)) as receiver:
        receiver.advance(1)
        assert_holds(receiver, 1)
        receiver.advance()
        assert_holds(receiver, 2)


def test_another_log_is_not_followed_though_it_bears_the_same_signature() -> None:
    """Regression: the commits of another run with the same key were followed as if they were ours."""
    log, other = memory_log(KEY), memory_log(KEY)
    publish(log, *range(3), options=PLAIN)
    with Publisher(other, PLAIN) as publisher:
        for version in range(6):
            publisher.publish(synthetic_version(40 + version), version=version, step=version).result(60)
    ours = log.records.log_id()
    assert ours is not None and ours != other.records.log_id()
    with Receiver(WeightLog(log.store, key=KEY)) as running:
        running.advance()
        copy(other.store, log.store)
        with pytest.raises(DamagedError, match=rf"is of log {other.records.log_id()}, this is log {ours}"):
            running.advance()
        assert_holds(running, 2)
    with pytest.raises(DamagedError, match=f"this is log {ours}"):
        pull(WeightLog(other.store, key=KEY, log_id=ours))
    publisher = Publisher(WeightLog(other.store, key=KEY, log_id=ours), PLAIN)
    with publisher, pytest.raises(FencedError, match="give each run a store of its own"):
        publisher.publish(synthetic_version(6), version=0, step=6).result(60)
    with pytest.raises(UserError, match="does not have 32 hex digits"):
        WeightLog(log.store, log_id="mine")


def test_what_continues_another_history_is_not_followed() -> None:
    """The log forked: a writer with the key deleted versions and published others instead."""
    log = memory_log(KEY)
    publish(log, *range(4), options=PLAIN)
    with Receiver(WeightLog(log.store, key=KEY)) as running:
        running.advance()
        log.store.delete(commit_key(2), commit_key(3))
        with Publisher(WeightLog(log.store, key=KEY), PLAIN) as publisher:
            for version in (2, 3, 4):
                publisher.publish(synthetic_version(50 + version), version=version, step=version).result(60)
        with pytest.raises(DamagedError, match="it continues another history"):
            running.advance()
        assert_holds(running, 3)


def test_a_lost_first_record_stops_no_reader() -> None:
    log = memory_log(KEY)
    publish(log, 0, 1, options=PLAIN)
    log_id = log.records.log_id()
    log.store.delete("log.json")
    assert alike(pull(WeightLog(log.store, key=KEY)).state, synthetic_version(1))
    publish(WeightLog(log.store, key=KEY), 2, options=PLAIN)
    assert WeightLog(log.store, key=KEY).records.log_id() == log_id
    assert [one.name for one in repair(WeightLog(log.store, key=KEY))] == ["log.json"]
    assert not list(repair(WeightLog(log.store, key=KEY)))
