"""The turns of a session come back as they were, and what they share is kept once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.capture.token_buffer import FIRST_BLOCK, SessionFull, Tape, Tapes
from etude.types import Finish, Ids, Turn


def ids_of(*token_ids: int) -> Ids:
    return np.array(token_ids, np.int32)


def turn_of(prompt: Sequence[int], completion: Sequence[int] = ()) -> Turn:
    sampled = len(completion)
    return Turn(
        prompt_ids=ids_of(*prompt),
        completion_ids=ids_of(*completion),
        logprobs=np.full(sampled, -1.0, np.float32),
        versions=np.zeros(sampled, np.int32),
        finish=Finish.STOP,
    )


def texts(tapes: Tapes) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in tapes.whole()]


def test_a_tape_takes_what_begins_with_it_or_what_it_begins_with() -> None:
    tape = Tape()
    assert tape.takes(ids_of(1, 2))
    tape.lay(ids_of(1, 2))
    view = tape.beginning(2)
    assert all(tape.takes(ids_of(*ids)) for ids in ([], [1], [1, 2], [1, 2, 3]))
    assert not any(tape.takes(ids_of(*ids)) for ids in ([2], [1, 3], [1, 3, 2]))
    tape.lay(ids_of(1, 2, 3))
    tape.lay(ids_of(1))
    assert len(tape) == 3
    assert tape.beginning(3).tolist() == [1, 2, 3]
    assert view.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7


@given(st.integers(0, 9 * FIRST_BLOCK), st.integers(0, 9 * FIRST_BLOCK), st.integers(0, 9 * FIRST_BLOCK))
def test_agreement_is_the_length_of_what_both_begin_with(laid: int, asked: int, parting: int) -> None:
    tape, ids = Tape(), np.arange(asked, dtype=np.int32)
    tape.lay(np.arange(laid, dtype=np.int32))
    ids[parting:] += 1
    assert tape.agreement(ids) == min(laid, asked, parting)


TOKENS = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), TOKENS, st.lists(TOKENS, min_size=1, max_size=2))))
def test_whatever_is_recorded_comes_back_and_the_longest_beginning_is_found(
    moves: list[tuple[int, int, list[int], list[list[int]]]],
) -> None:
    """Turns that continue, branch off or start afresh, with true and false words about what they continue."""
    tapes, known = Tapes(), list[tuple[list[int], list[int]]]()
    for pick, cut, fresh, said in moves:
        earlier = pick % len(known) if known else None
        begun = [] if earlier is None else [token for part in known[earlier] for token in part][: cut or None]
        prompt = [*begun, *fresh]
        best = max(
            (index for index, (read, out) in enumerate(known) if [*read, *out] == prompt[: len(read) + len(out)]),
            key=lambda index: (len(known[index][0]) + len(known[index][1]), index),
            default=None,
        )
        assert tapes.longest_beginning(ids_of(*prompt)) == best
        tapes.record([turn_of(prompt, completion) for completion in said], earlier if cut % 2 else best)
        known += [(prompt, completion) for completion in said]
        assert texts(tapes) == known
    assert tapes.tokens <= sum(len(read) + len(said) for read, said in known)


def test_turns_of_one_branch_lie_on_one_tape() -> None:
    tapes = Tapes()
    tapes.record([turn_of([1, 2], [3]), turn_of([1, 2], [4])], None)
    tapes.record([turn_of([1, 2, 3, 5], [6])], 0)
    tapes.record([turn_of([1, 2, 4, 5], [6])], 1)  # its reply was said beside the one that went on the tape
    tapes.record([turn_of([1, 2], [7])], 0)
    assert tapes[0].tape is tapes[1].tape is tapes[2].tape is tapes[4].tape
    assert tapes[3].tape is not tapes[2].tape
    assert tapes.tokens == 4 + 4 + 5


def test_a_copy_goes_on_by_itself() -> None:
    tapes = Tapes(max_turns=3)
    tapes.record([turn_of([1, 2], [3])], None)
    copied = tapes.copy()
    tapes.record([turn_of([1, 2, 3, 4])], 0)
    copied.record([turn_of([1, 2, 3, 5]), turn_of([1, 2, 3, 5])], 0)
    assert texts(tapes) == [([1, 2], [3]), ([1, 2, 3, 4], [])]
    assert texts(copied) == [([1, 2], [3]), ([1, 2, 3, 5], []), ([1, 2, 3, 5], [])]
    assert (tapes.tokens, copied.tokens) == (5, 7)
    with pytest.raises(SessionFull):
        copied.check_room(1)
    tapes.check_room(1)


def test_a_branch_takes_six_bytes_a_token_at_most() -> None:
    tapes, ids = Tapes(), np.arange(50_000, dtype=np.int32)
    for length in range(1, 50_001, 997):
        tapes.record([turn_of(ids[:length].tolist())], len(tapes) - 1 if len(tapes) else None)
        base = tapes[0].prompt_ids.base
        assert base is not None
        assert base.nbytes <= 6 * length
    assert tapes.tokens == len(tapes[0].tape)
