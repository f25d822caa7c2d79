"""Records are read back as written, and damage is detected."""

import json
import zlib
from base64 import b85decode
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.ledger.records import HACKED, decode_rollout, encode_rollout, is_hacked
from etude.ledger.turns import encode_turns
from etude.types import (
    Branch,
    Disposition,
    Finish,
    Hint,
    Ids,
    Observation,
    PayloadRef,
    Rollout,
    RolloutStage,
    RolloutStatus,
    Routes,
    Turn,
    TurnKind,
    Verdict,
)

REFS = st.builds(
    PayloadRef, digest=st.text("0123456789abcdef", min_size=64, max_size=64), size_bytes=st.integers(0, 2**40)
)
TEXT = st.text(max_size=20)
VERDICTS = st.builds(
    Verdict,
    disposition=st.sampled_from(Disposition),
    reason=TEXT,
    flags=st.lists(TEXT, max_size=2).map(tuple),
    hacked=st.booleans(),
    graded=st.floats(allow_nan=False),
    impossible=st.booleans(),
)

OBSERVATIONS = st.builds(
    Observation, user=TEXT, day=st.integers(0), template=TEXT, arm=TEXT, prompt_tokens=st.integers(0)
)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    prompt, completion = draw(st.integers(0, 20)), draw(st.integers(0, 10))
    return Turn(
        prompt_ids=random.integers(0, 2**31 - 1, prompt, np.int32),
        completion_ids=random.integers(0, 2**31 - 1, completion, np.int32),
        logprobs=-random.random(completion, np.float32),
        versions=random.integers(0, 1000, completion, np.int32),
        finish=draw(st.sampled_from(Finish)),
        temperature=draw(st.floats(0, 2)),
        kind=draw(st.sampled_from(TurnKind)),
        payload=draw(st.none() | REFS),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    its_turns = tuple(draw(st.lists(turns(), max_size=4)))
    status = draw(st.sampled_from(RolloutStatus)) if its_turns else RolloutStatus.FAILED_INFRA
    numbers = st.floats(allow_nan=False)
    count = len(its_turns)
    hinted = draw(st.lists(st.integers(0, count - 1), unique=True)) if count else []
    branches = st.builds(Branch, rollout_id=TEXT, turns=st.integers(1, max(count - 1, 1)))
    return Rollout(
        rollout_id=draw(TEXT),
        group_index=draw(st.integers(0)),
        slot=draw(st.integers(0, 127)),
        attempt=draw(st.integers(0, 9)),
        status=status,
        reward=draw(numbers) if status is RolloutStatus.GRADED else None,
        reward_parts=draw(st.dictionaries(TEXT, numbers, max_size=3)),
        reason=draw(TEXT),
        counts=draw(st.dictionaries(TEXT, st.integers(0), max_size=3)),
        turns=its_turns,
        seconds=draw(st.floats(0, 1e6)),
        stage_s=draw(st.dictionaries(st.sampled_from(RolloutStage), st.floats(0, 1e6))),
        verdict=draw(st.none() | VERDICTS),
        turn_rewards=tuple(draw(st.just([]) | st.lists(numbers, min_size=count, max_size=count))),
        hints=tuple(Hint(turn=turn, text=draw(st.text(min_size=1)), source=draw(TEXT)) for turn in hinted),
        branch=draw(st.none() | branches) if count > 1 else None,
        observation=draw(st.none() | OBSERVATIONS),
        session_id=draw(TEXT),
    )


def scalars(rollout: Rollout) -> tuple[object, ...]:
    return tuple(getattr(rollout, name) for name in Rollout.__slots__ if name != "turns")


@settings(deadline=None, max_examples=50)
@given(rollouts())
def test_a_rollout_survives_its_record_bit_for_bit(rollout: Rollout) -> None:
    record = encode_rollout(rollout)
    assert is_hacked(record) == (rollout.verdict is not None and rollout.verdict.hacked)
    decoded = decode_rollout(record)
    assert scalars(decoded) == scalars(rollout)
    assert len(decoded.turns) == len(rollout.turns)
    for ours, theirs in zip(decoded.turns, rollout.turns, strict=True):
        assert (ours.finish, ours.kind) == (theirs.finish, theirs.kind)
        assert (ours.temperature, ours.payload) == (theirs.temperature, theirs.payload)
        for name in ("prompt_ids", "completion_ids", "logprobs", "versions"):
            array, original = getattr(ours, name), getattr(theirs, name)
            assert array.dtype == original.dtype
            assert array.tobytes() == original.tobytes()


FIRST_FORM = (
    b"c-o~<+fKtU3@vx~iz&|&S_{1J#&=B9lr?S}Elr}t;i75Mz6^d1J6pFgc%#)x9AD0{{c>IuD-oPAF5z4&@jMbij7OpkF8R5(3f{^0K%QtEl39`|5u"
    b"x||syKiWQ{>7vNCk?^1H8$=Y?J$^{d4YRKu%l<gqSS~uX9{RXPF|VMX!-5YM1O$HcNAAgxXof{xVa)LQuNKoTqg3E^5?Ut|fr~vzbARgN>0bvrR="
    b"KX7ui4y#!8fq=_)z4>eTlo+P4P7#MQ6D@?&=mX+|q9d=WbZD7|BuddNn$1YEbE_cVPgg`3{kcXO(&&v<vB#YW)3<(_3KAzH6KWGiu7Q5fX+wKp<Q"
    b"y~}s`$?m$X6xDdswj$U!f>AvZg%%A;jZ9s^F;??^U3}T!X@DwVph20"
)
"""A rollout as it was written before turns were a blob of their own."""


def test_a_record_of_the_first_form_is_still_read() -> None:
    record = zlib.decompress(b85decode(FIRST_FORM))
    rollout = decode_rollout(record)
    one, two = rollout.turns
    assert (one.prompt_ids.tolist(), one.completion_ids.tolist()) == ([5, 6], [1])
    assert (two.prompt_ids.tolist(), two.completion_ids.tolist()) == ([5, 6, 1, 7], [8, 9])
    assert (two.logprobs.tolist(), two.versions.tolist()) == ([-0.5, -0.25], [3, 4])
    assert (one.finish, one.temperature, one.payload) == (Finish.STOP, 1.0, None)
    assert (two.finish, two.temperature) == (Finish.LENGTH, 0.5)
    assert two.payload == PayloadRef(digest="ab" * 32, size_bytes=12)
    assert (rollout.rollout_id, rollout.reward, rollout.reward_parts) == ("r", 0.5, {"tests": 0.5})
    assert rollout.verdict is not None
    assert rollout.verdict.flags == ("f",)
    assert {turn.kind for turn in rollout.turns} == {TurnKind.ACT}
    assert (rollout.turn_rewards, rollout.hints, rollout.branch) == ((), (), None)
    assert scalars(decode_rollout(encode_rollout(rollout))) == scalars(rollout)
    for damaged in (*(record[:end] for end in range(len(record))), record + b"\0"):
        with pytest.raises(DamagedError, match=f"unreadable rollout record of {len(damaged)} bytes"):
            decode_rollout(damaged)


def test_a_record_of_the_first_form_may_have_no_turns() -> None:
    failed = Rollout(rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.FAILED_INFRA, reward=None)
    record = encode_rollout(failed, with_turns=False)
    listed = json.dumps(json.loads(record[4:]) | {"turns": []}).encode()
    assert decode_rollout(len(listed).to_bytes(4, "little") + listed) == failed


def a_rollout(*its_turns: Turn) -> Rollout:
    return Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=its_turns
    )


def a_turn(prompt_ids: Ids, finish: Finish = Finish.STOP, routes: Routes | None = None) -> Turn:
    one = np.ones(1, np.int32)
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=one,
        logprobs=-np.ones(1, np.float32),
        versions=one,
        finish=finish,
        routes=routes,
    )


def test_turns_may_be_stored_beside_a_record() -> None:
    rollout = a_rollout(a_turn(np.arange(100, dtype=np.int32)))
    record = encode_rollout(rollout, with_turns=False)
    assert len(record) < len(encode_rollout(rollout)) - 400
    decoded = decode_rollout(record, rollout.turns)
    assert (scalars(decoded), decoded.turns) == (scalars(rollout), rollout.turns)
    with pytest.raises(DamagedError, match="unreadable rollout record"):
        decode_rollout(record)


def test_mappings_may_be_read_only() -> None:
    numbers = MappingProxyType({"tests": 1})
    rollout = a_rollout(a_turn(np.ones(1, np.int32)))
    rollout = replace(rollout, reward_parts=numbers, counts=numbers, stage_s=numbers)
    assert scalars(decode_rollout(encode_rollout(rollout))) == scalars(rollout)


def test_a_turn_that_spells_a_verdict_is_none() -> None:
    spelled = np.frombuffer(HACKED.ljust(16), np.int32)
    record = encode_rollout(a_rollout(a_turn(spelled)))
    assert HACKED in record
    assert not is_hacked(record)


def test_a_branch_is_recorded_once_however_often_it_was_read() -> None:
    ids = np.arange(20_000, dtype=np.int32)
    turns = [
        a_turn(ids[:length], finish) for length, finish in zip(range(100, 20_001, 100), list(Finish) * 100, strict=True)
    ]
    rollout = a_rollout(*turns)
    record = encode_rollout(rollout)
    assert len(record) < ids.nbytes + 100 * len(turns) + 2_000
    assert encode_rollout(decode_rollout(record)) == record


@settings(deadline=None, max_examples=50)
@given(rollouts(), st.data())
def test_a_cut_or_lengthened_rollout_record_is_damaged(rollout: Rollout, data: st.DataObject) -> None:
    record = encode_rollout(rollout)
    cut = record[: data.draw(st.integers(0, len(record) - 1))]
    for damaged in (cut, record + b"\0"):
        with pytest.raises(DamagedError, match="unreadable rollout record"):
            decode_rollout(damaged)


def test_a_header_that_says_something_else_is_damaged() -> None:
    failed = '{"status": "failed_infra", "verdict": '
    no_object = ["7", "[]", "{", "[" * 100_000]
    fields = ["{}", '{"status": "unknown"}', f"{failed}7}}", f"{failed}{{}}}}", f'{failed}null, "surplus": 1}}']
    for header in no_object + fields:
        record = len(header).to_bytes(4, "little") + header.encode() + encode_turns([])
        with pytest.raises(DamagedError, match="unreadable rollout record"):
            decode_rollout(record)


def test_routes_never_get_into_a_record() -> None:
    turn = a_turn(np.ones(1, np.int32), routes=np.zeros((1, 1, 2), np.uint16))
    with pytest.raises(ValueError, match="store them in a payload file first"):
        encode_rollout(a_rollout(turn))
