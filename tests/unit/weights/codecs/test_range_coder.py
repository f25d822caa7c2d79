"""The range coder, compared with exact arithmetic on unbounded integers and with the entropy of its input."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.jit import borrowing
from etude.weights.codecs.range_coder import (
    LIKELY_BITS,
    SEEN_BITS,
    Models,
    Words,
    begin_reading,
    begin_writing,
    carry,
    finish_writing,
    fresh_models,
    inherit,
    is_whole,
    learn,
    read,
    read_plain,
    write,
    write_plain,
)

Script = npt.NDArray[np.int64]
"""[n, 3] what to code: 0 for a decision or the width of plain bits, the value, the model."""


@borrowing
def write_script(script: Script, models: Models, words: Words) -> tuple[int, int]:
    writer = begin_writing()
    for line in range(script.shape[0]):
        width, value, index = script[line, 0], script[line, 1], script[line, 2]
        is_plain = width > 0
        writer = write_plain(writer, words, value, width) if is_plain else write(writer, words, models, index, value)
    return finish_writing(writer, words)


@borrowing
def read_script(script: Script, models: Models, words: Words, values: Script) -> bool:
    reader = begin_reading(words)
    for line in range(script.shape[0]):
        width, index = script[line, 0], script[line, 2]
        if width:
            reader, values[line, 1] = read_plain(reader, words, width)
        else:
            reader, values[line, 1] = read(reader, words, models, index)
    return is_whole(reader, words)


@borrowing
def carry_into(words: Words, at: int) -> None:
    carry(words, at)


@borrowing
def learn_from(models: Models, ones: Script) -> None:
    for line in range(ones.shape[0]):
        learn(models, ones[line, 2], ones[line, 1])


@borrowing
def inherit_models(models: Models) -> None:
    inherit(models)


def symbols(ones: npt.NDArray[np.bool_], index: int = 0) -> Script:
    script = np.zeros((len(ones), 3), np.int64)
    script[:, 1] = ones
    script[:, 2] = index
    return script


def written(script: Script, models: Models) -> Words:
    words = np.full(len(script) + 4, 0xAAAAAAAA, np.uint32)
    front, back = write_script(script, models.copy(), words)
    return np.concatenate([words[:front], words[len(words) - back :]])


def assert_round_trip(script: Script, models: Models) -> Words:
    words = written(script, models)
    values = script.copy()
    values[:, 1] = -1
    assert read_script(script, models.copy(), words, values)
    np.testing.assert_array_equal(values, script)
    return words


def exact(script: Script, models: Models) -> tuple[list[int], int]:
    """The words of decisions, with an unbounded integer for ``low``, and how often it carried."""
    models = models.copy()
    low, span, words, carries = 0, 2**64 - 1, 0, 0
    for line in range(len(script)):
        bound = (span >> LIKELY_BITS) * int(models[script[line, 2]] >> SEEN_BITS)
        if script[line, 1]:
            span = bound
        else:
            carries += (low % 2**64) + bound >= 2**64
            low, span = low + bound, span - bound
        learn_from(models, script[line : line + 1])
        if span < 2**32:
            low, span, words = low << 32, span << 32, words + 1
    return [low >> 32 * (words + 1 - place) & 0xFFFFFFFF for place in range(words + 2)], carries


def models_of(probabilities: list[float]) -> Models:
    likely = [min(max(round(p * 2**LIKELY_BITS), 64), 2**LIKELY_BITS - 64) for p in probabilities]
    return np.array([each << SEEN_BITS for each in likely], np.uint32)


@pytest.mark.parametrize("probability", [0.0, 0.003, 0.5, 0.9, 1.0])
def test_words_equal_those_of_exact_arithmetic(probability: float) -> None:
    random = np.random.default_rng(7)
    script = symbols(random.random(3000) < probability)
    words, _ = exact(script, fresh_models(1))
    assert written(script, fresh_models(1)).tolist() == words


def test_exact_arithmetic_has_carried_in_such_a_script() -> None:
    random = np.random.default_rng(7)
    script = symbols(random.random(3000) < 0.5)
    _, carries = exact(script, fresh_models(1))
    assert carries > 0
    assert_round_trip(script, fresh_models(1))


def test_a_carry_runs_through_words_that_are_full() -> None:
    words = np.array([1, 0xFFFFFFFF, 0xFFFFFFFF, 7], np.uint32)
    carry_into(words, 3)
    assert words.tolist() == [2, 0, 0, 7]


@pytest.mark.parametrize("expected", [0.0, 1.0])
@pytest.mark.parametrize("actual", [False, True])
def test_certain_models_survive_surprises(expected: float, actual: bool) -> None:
    models = models_of([expected] * 500)
    script = symbols(np.full(500, actual))
    script[:, 2] = np.arange(500)
    words = assert_round_trip(script, models)
    bits = 500 * 16 if bool(expected) != actual else 1
    assert len(words) == pytest.approx(bits / 32, abs=3)


@given(st.data())
def test_any_mixture_of_modelled_and_plain_bits_comes_back(data: st.DataObject) -> None:
    probabilities = data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
    index = st.integers(0, len(probabilities) - 1)
    decision = st.tuples(st.just(0), st.integers(0, 1), index)
    plain = st.integers(1, 32).flatmap(lambda width: st.tuples(st.just(width), st.integers(0, 2**width - 1), index))
    lines = data.draw(st.lists(st.one_of(decision, plain), max_size=200))
    assert_round_trip(np.array(lines, np.int64).reshape(len(lines), 3), models_of(probabilities))


@pytest.mark.parametrize("probability", [0.001, 0.02, 0.3, 0.5])
def test_modelled_bits_cost_their_entropy(probability: float) -> None:
    """Forgetting costs r / (2 ln 2) bits a decision at the rate r, here 0.0028."""
    ones = np.random.default_rng(3).random(200_000) < probability
    share = float(ones.mean())
    bits = -len(ones) * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert 32 * len(assert_round_trip(symbols(ones), fresh_models(1))) < bits + 0.003 * len(ones) + 100


def test_a_model_learns_fast_and_then_follows_a_change() -> None:
    models = fresh_models(1)
    learn_from(models, symbols(np.ones(8, np.bool_)))
    assert models[0] >> SEEN_BITS > 0.9 * 2**LIKELY_BITS
    learn_from(models, symbols(np.ones(5000, np.bool_)))
    learn_from(models, symbols(np.zeros(2000, np.bool_)))
    assert models[0] >> SEEN_BITS < 0.01 * 2**LIKELY_BITS


def test_an_inherited_model_keeps_its_probability_and_learns_faster() -> None:
    models = fresh_models(2)
    learn_from(models, symbols(np.ones(1000, np.bool_), index=1))
    heir = models.copy()
    inherit_models(heir)
    np.testing.assert_array_equal(heir >> SEEN_BITS, models >> SEEN_BITS)
    for some in (models, heir):
        learn_from(some, symbols(np.zeros(10, np.bool_), index=1))
    assert heir[1] < models[1]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 300))
def test_reading_anything_ends_and_knows_when_it_was_not_written_so(noise: list[int], count: int) -> None:
    words = np.array(noise, np.uint32)
    script = symbols(np.zeros(count, np.bool_))
    script[::3, 0] = 11
    values = script.copy()
    if read_script(script, fresh_models(1), words, values):
        np.testing.assert_array_equal(written(values, fresh_models(1))[2:], words[2:])


@pytest.mark.parametrize("drop", [slice(1, None), slice(None, -1)])
def test_missing_words_are_noticed(drop: slice) -> None:
    script = symbols(np.random.default_rng(1).random(500) < 0.5)
    words = written(script, fresh_models(1))[drop]
    assert not read_script(script, fresh_models(1), np.ascontiguousarray(words), script.copy())
