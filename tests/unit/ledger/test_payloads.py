"""Routes and sampling masks in storage: read back as written, damage is named, and unused files are deleted."""

import hashlib
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.ledger.payloads import Payloads
from etude.objects import ObjectStore, StoreOptions
from etude.types import NO_ROUTE, Finish, PayloadRef, SamplingMask, Turn
from fake_clock_store import FakeClockStore


def make_turn(seed: int = 0, *, routes: bool = True, masked: bool = True) -> Turn:
    random = np.random.default_rng(seed)
    prompt, sampled = int(random.integers(1, 9)), int(random.integers(1, 9))
    ids = random.integers(0, 100, sampled, np.int32)
    sets = [np.unique(np.append(random.integers(0, 100, 5), token)) if token % 2 else np.zeros(0) for token in ids]
    offsets = np.cumsum([0, *map(len, sets)], dtype=np.int64)
    return Turn(
        prompt_ids=random.integers(0, 100, prompt, np.int32),
        completion_ids=ids,
        logprobs=-random.random(sampled, np.float32),
        versions=np.zeros(sampled, np.int32),
        finish=Finish.STOP,
        temperature=0.7,
        routes=random.integers(0, 384, (prompt + sampled - 1, 3, 8)).astype(np.uint16) if routes else None,
        sampling_mask=SamplingMask(offsets=offsets, token_ids=np.concatenate(sets).astype(np.int32))
        if masked
        else None,
    )


def in_folder(folder: Path) -> Payloads:
    return Payloads(ObjectStore(str(folder)))


def ref_of(turn: Turn) -> PayloadRef:
    assert turn.payload is not None
    return turn.payload


def nothing_to_ask() -> list[PayloadRef]:
    """Fails the test: this is called only if there are old files."""
    return pytest.fail("nothing is old enough to ask")


def files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), routes=st.booleans(), masked=st.booleans())
def test_a_turn_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, seed: int, routes: bool, masked: bool
) -> None:
    payloads, turn = in_folder(tmp_path_factory.mktemp("payloads")), make_turn(seed, routes=routes, masked=masked)
    stored = payloads.store(turn, "s")
    assert (stored.routes, stored.sampling_mask) == (None, None)
    assert (stored.payload is None) == (not routes and not masked)
    (back,) = payloads.fetch([stored])
    assert (back.routes is None, back.sampling_mask is None, back.payload) == (not routes, not masked, None)
    if turn.routes is not None and back.routes is not None:
        assert back.routes.dtype == np.uint16
        assert np.array_equal(back.routes, turn.routes)
    if turn.sampling_mask is not None and back.sampling_mask is not None:
        assert np.array_equal(back.sampling_mask.offsets, turn.sampling_mask.offsets)
        assert np.array_equal(back.sampling_mask.token_ids, turn.sampling_mask.token_ids)


def test_a_file_is_named_by_its_digest_and_nothing_else_is_left(tmp_path: Path) -> None:
    ref = ref_of(in_folder(tmp_path).store(make_turn(), "s"))
    assert files(tmp_path) == [tmp_path / ref.digest[:2] / f"{ref.digest}.safetensors"]
    assert files(tmp_path)[0].stat().st_size == ref.size_bytes


def test_a_sweep_takes_what_is_old_and_not_in_use(tmp_path: Path) -> None:
    payloads = in_folder(tmp_path)
    old, needed, new = (payloads.store(make_turn(seed), "s") for seed in range(3))
    assert payloads.sweep(nothing_to_ask, list, older_than_s=60) == 0
    for turn in (old, needed):
        digest = ref_of(turn).digest
        os.utime(tmp_path / digest[:2] / f"{digest}.safetensors", (0, 0))
    assert payloads.sweep(lambda: [ref_of(needed)], list, older_than_s=60) == 1
    assert {file.stem for file in files(tmp_path)} == {ref_of(needed).digest, ref_of(new).digest}


def test_equal_turns_of_a_session_share_a_file_and_those_of_two_sessions_do_not(tmp_path: Path) -> None:
    payloads = in_folder(tmp_path)
    first, again, other = (payloads.store(make_turn(), session) for session in ("a", "a", "b"))
    assert first.payload == again.payload != other.payload
    payloads.drop([ref_of(first), ref_of(first)])
    assert len(files(tmp_path)) == 1
    assert payloads.fetch([other])[0].routes is not None


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    payloads = in_folder(tmp_path)
    stored = payloads.store(make_turn(), "s")
    (file,) = files(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    if damage != "missing":
        file.write_bytes(data if damage == "flipped" else data[:40])
    with pytest.raises(DamagedError, match=ref_of(stored).digest):
        payloads.fetch([stored])


def continuing(ids: list[int], completion: list[int]) -> Turn:
    """A turn whose every row of routes depends on all tokens read so far, as an engine's does."""
    read = [*ids, *completion][:-1]
    rows = [zlib.crc32(repr(read[: at + 1]).encode()) % 384 for at in range(len(read))]
    sampled = np.array(completion, np.int32)
    return Turn(
        prompt_ids=np.array(ids, np.int32),
        completion_ids=sampled,
        logprobs=-np.ones(len(sampled), np.float32),
        versions=np.zeros(len(sampled), np.int32),
        finish=Finish.STOP,
        routes=np.array(rows, np.uint16).reshape(-1, 1, 1),
    )


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans(), TOKENS, TOKENS), min_size=1, max_size=6))
def test_what_turns_go_on_from_is_written_once_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, bool, bool, list[int], list[int]]]
) -> None:
    """Turns that continue an earlier one or start anew, with or without the known part."""
    payloads, sent, stored = in_folder(tmp_path_factory.mktemp("payloads")), list[Turn](), list[Turn]()
    for pick, goes_on, leaves_out, fresh, completion in moves:
        earlier = sent[pick % len(sent)] if sent and goes_on else None
        begun = [] if earlier is None else [*earlier.prompt_ids.tolist(), *earlier.completion_ids.tolist()]
        sent.append(continuing([*begun, *fresh], completion))
        stored.append(payloads.store(sent[-1], "s", stored=max(len(begun) - 1, 0) if leaves_out else 0))
    for before, after in zip(sent, payloads.fetch(stored), strict=True):
        assert before.routes is not None and after.routes is not None
        assert after.routes.dtype == np.uint16
        assert after.routes.tolist() == before.routes.tolist()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), TOKENS, TOKENS), min_size=1, max_size=6))
def test_routes_of_sampled_tokens_come_back_where_no_others_are_kept(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, bool, list[int], list[int]]]
) -> None:
    payloads, sent, stored = in_folder(tmp_path_factory.mktemp("payloads")), list[Turn](), list[Turn]()
    for pick, goes_on, fresh, completion in moves:
        earlier = sent[pick % len(sent)] if sent and goes_on else None
        begun = [] if earlier is None else [*earlier.prompt_ids.tolist(), *earlier.completion_ids.tolist()]
        sent.append(continuing([*begun, *fresh], completion))
        stored.append(payloads.store(sent[-1], "s", sampled_only=True))
    for before, after in zip(sent, payloads.fetch(stored), strict=True):
        assert before.routes is not None and after.routes is not None
        recorded = (after.routes != NO_ROUTE).all((1, 2))
        assert recorded[len(before.prompt_ids) - 1 :].all(), "the rows that produced its sampled tokens"
        assert (after.routes[recorded] == before.routes[recorded]).all()


def test_routes_of_long_prompts_are_not_written_where_they_are_not_replayed(tmp_path: Path) -> None:
    payloads, turn = in_folder(tmp_path), continuing([*range(100)] * 5, [1, 2])
    (whole, short) = (payloads.store(turn, "s", sampled_only=only).payload for only in (False, True))
    assert whole is not None and short is not None
    assert short.size_bytes < whole.size_bytes / 3


def test_routes_are_compressed_and_read_as_they_are_where_they_are_not(tmp_path: Path) -> None:
    payloads, turn = in_folder(tmp_path), make_turn(masked=False)
    turn = replace(turn, routes=np.random.default_rng(0).integers(0, 128, (turn.length - 1, 60, 8), np.uint16))
    stored = payloads.store(turn, "s")
    assert stored.payload is not None and turn.routes is not None
    assert stored.payload.size_bytes < 0.6 * turn.routes.nbytes
    (file,) = files(tmp_path)
    plain = zstandard.decompress(file.read_bytes())
    ref = PayloadRef(digest=hashlib.sha256(plain).hexdigest(), size_bytes=len(plain))
    (tmp_path / ref.digest[:2]).mkdir(exist_ok=True)
    (tmp_path / ref.digest[:2] / f"{ref.digest}.safetensors").write_bytes(plain)
    for after in payloads.fetch([stored, replace(stored, payload=ref)]):
        assert after.routes is not None and np.array_equal(after.routes, turn.routes)


def test_routes_of_a_branch_take_files_and_memory_once(tmp_path: Path) -> None:
    payloads, ids, stored = in_folder(tmp_path), [1], list[Turn]()
    for number in range(60):
        turn = continuing(ids, [number])
        stored.append(payloads.store(turn, "s", stored=max(len(ids) - 31, 0)))
        ids = [*ids, number, *range(30)]
    turns = payloads.fetch(stored)
    assert len({turn.routes.ctypes.data for turn in turns if turn.routes is not None}) == 1
    rows = sum((file.stat().st_size - 200) // 2 for file in files(tmp_path))
    assert rows < 2 * len(ids)


def test_routes_that_no_earlier_turn_has_are_missed_by_name(tmp_path: Path) -> None:
    payloads, first = in_folder(tmp_path), continuing([1, 2], [3])
    second = payloads.store(continuing([1, 2, 3, 4], [5]), "s", stored=2)
    (_, back) = payloads.fetch([payloads.store(first, "s"), second])
    assert back.routes is not None
    other = payloads.store(continuing([1, 1], [3]), "s")
    for turns in (
        [second],
        [other, second],
        [second, payloads.store(first, "s")],
        [replace(first, routes=None), second],
    ):
        with pytest.raises(DamagedError, match=f"{ref_of(second).digest}.* is of another turn"):
            payloads.fetch(turns)


def test_payloads_in_a_bucket_are_as_those_in_a_folder(endpoint: str) -> None:
    options = StoreOptions(
        endpoint=endpoint, allow_http=True, region="us-east-1", access_key_id="id", secret_access_key="secret"
    )
    store = ObjectStore("s3://bucket/runs/one/payloads", options)
    payloads, turns = Payloads(store), [make_turn(seed) for seed in range(6)]
    stored = [payloads.store(turn, "s") for turn in turns]
    for turn, back in zip(turns, payloads.fetch(stored), strict=True):
        assert turn.routes is not None and back.routes is not None
        assert np.array_equal(back.routes, turn.routes)
    payloads.drop([ref_of(stored[0])])
    damaged = ref_of(stored[1])
    store.renew(f"{damaged.digest[:2]}/{damaged.digest}.safetensors", b"rot")
    for turn, words in ((stored[0], "is missing"), (stored[1], "does not match")):
        with pytest.raises(DamagedError, match=f"payload s3://bucket/runs/one/payloads/.*{words}"):
            payloads.fetch([turn])
    assert payloads.sweep(nothing_to_ask, list, older_than_s=60) == 0


def test_ages_are_told_by_the_storage_alone() -> None:
    store = FakeClockStore(now_s=5e9)
    payloads = Payloads(store)
    old = payloads.store(make_turn(1), "s")
    store.now_s += 120
    new = payloads.store(make_turn(2), "s")
    assert payloads.sweep(list, list, older_than_s=60) == 1
    with pytest.raises(DamagedError, match=ref_of(old).digest):
        payloads.fetch([old])
    assert payloads.fetch([new])[0].routes is not None
