"""The turns of a session come back as they were, and what they share is kept once."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.capture.conversations import FIRST_BLOCK, SessionFull, TokenBuffer, TurnStore
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


def texts(store: TurnStore) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in store.whole()]


def test_a_tape_takes_what_begins_with_it_or_what_it_begins_with() -> None:
    buffer = TokenBuffer()
    assert buffer.fits(ids_of(1, 2))
    buffer.extend(ids_of(1, 2))
    view = buffer.prefix(2)
    assert all(buffer.fits(ids_of(*ids)) for ids in ([], [1], [1, 2], [1, 2, 3]))
    assert not any(buffer.fits(ids_of(*ids)) for ids in ([2], [1, 3], [1, 3, 2]))
    buffer.extend(ids_of(1, 2, 3))
    buffer.extend(ids_of(1))
    assert len(buffer) == 3
    assert buffer.prefix(3).tolist() == [1, 2, 3]
    assert view.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7


@given(st.integers(0, 9 * FIRST_BLOCK), st.integers(0, 9 * FIRST_BLOCK), st.integers(0, 9 * FIRST_BLOCK))
def test_agreement_is_the_length_of_what_both_begin_with(laid: int, asked: int, parting: int) -> None:
    buffer, ids = TokenBuffer(), np.arange(asked, dtype=np.int32)
    buffer.extend(np.arange(laid, dtype=np.int32))
    ids[parting:] += 1
    assert buffer.shared_with(ids) == min(laid, asked, parting)


TOKENS = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), TOKENS, st.lists(TOKENS, min_size=1, max_size=2))))
def test_whatever_is_recorded_comes_back_and_the_longest_beginning_is_found(
    moves: list[tuple[int, int, list[int], list[list[int]]]],
) -> None:
    """Turns that continue, branch off or start afresh, with true and false words about what they continue."""
    store, known = TurnStore(), list[tuple[list[int], list[int]]]()
    for pick, truncated, fresh, said in moves:
        earlier = pick % len(known) if known else None
        begun = [] if earlier is None else [token for part in known[earlier] for token in part][: truncated or None]
        prompt = [*begun, *fresh]
        best = max(
            (index for index, (read, out) in enumerate(known) if [*read, *out] == prompt[: len(read) + len(out)]),
            key=lambda index: (len(known[index][0]) + len(known[index][1]), index),
            default=None,
        )
        assert store.longest_prefix(ids_of(*prompt)) == best
        store.record([turn_of(prompt, completion) for completion in said], earlier if truncated % 2 else best)
        known += [(prompt, completion) for completion in said]
        assert texts(store) == known
    assert store.tokens <= sum(len(read) + len(said) for read, said in known)


def test_turns_of_one_branch_lie_on_one_tape() -> None:
    store = TurnStore()
    store.record([turn_of([1, 2], [3]), turn_of([1, 2], [4])], None)
    store.record([turn_of([1, 2, 3, 5], [6])], 0)
    store.record([turn_of([1, 2, 4, 5], [6])], 1)  # its reply was said beside the one that went on the tape
    store.record([turn_of([1, 2], [7])], 0)
    assert store[0].buffer is store[1].buffer is store[2].buffer is store[4].buffer
    assert store[3].buffer is not store[2].buffer
    assert store.tokens == 4 + 4 + 5


def test_a_copy_goes_on_by_itself() -> None:
    store = TurnStore(max_turns=3)
    store.record([turn_of([1, 2], [3])], None)
    copied = store.copy()
    store.record([turn_of([1, 2, 3, 4])], 0)
    copied.record([turn_of([1, 2, 3, 5]), turn_of([1, 2, 3, 5])], 0)
    assert texts(store) == [([1, 2], [3]), ([1, 2, 3, 4], [])]
    assert texts(copied) == [([1, 2], [3]), ([1, 2, 3, 5], []), ([1, 2, 3, 5], [])]
    assert (store.tokens, copied.tokens) == (5, 7)
    with pytest.raises(SessionFull):
        copied.check_room(1)
    store.check_room(1)


def test_a_branch_takes_six_bytes_a_token_at_most() -> None:
    store, ids = TurnStore(), np.arange(50_000, dtype=np.int32)
    for length in range(1, 50_001, 997):
        store.record([turn_of(ids[:length].tolist())], len(store) - 1 if len(store) else None)
        base = store[0].prompt_ids.base
        assert base is not None
        assert base.nbytes <= 6 * length
    assert store.tokens == len(store[0].buffer)
