"""The drawing kernel against a plain reference that sorts, and against the distribution that it claims to draw from."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.models.kernels.draws import BLOCK, NO_TOKEN, Choices, draw, uniforms

TOLERANCE = 1e-9
"""Weights are whole numbers of 2⁻⁴⁰ of the largest one."""
ROUND = st.sampled_from([-np.inf, -3.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.5, 7.0])
"""Logits with many ties."""
LOGITS = st.lists(st.one_of(ROUND, st.floats(-30, 30, width=32)), min_size=1, max_size=3 * BLOCK)


def draw_row(logits: npt.ArrayLike, u: float, *, temperature: float = 1.0, k: int = 0, p: float = 1.0) -> Choices:
    row = np.array([logits], np.float32)
    return draw(row, np.array([temperature]), np.array([k], np.int64), np.array([p]), np.array([u]))


def ranking(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Ids by descending logit, equal ones by ascending id."""
    return np.lexsort((np.arange(len(logits)), -logits))


def probabilities(logits: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float64]:
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    weights = np.exp(scaled)
    return np.asarray(weights / weights.sum())


def nucleus_sizes(p_ranked: npt.NDArray[np.float64], k: int, p: float) -> tuple[int, int]:
    """The fewest and the most tokens that may be kept, given how finely weights are counted."""
    survivors = p_ranked[: k or len(p_ranked)]
    sums = np.cumsum(survivors / survivors.sum())
    fewest, most = (
        int(np.searchsorted(sums, p + slack)) + 1 if p + slack < 1 else len(sums) for slack in (-TOLERANCE, TOLERANCE)
    )
    return min(fewest, len(sums)), min(most, len(sums))


def check_against_sorting(
    logits: npt.NDArray[np.float32], choices: Choices, u: float, t: float, k: int, p: float
) -> None:
    order, probability = ranking(logits), probabilities(logits, t)
    size = len(choices.sampling_mask) or len(logits)
    fewest, most = nucleus_sizes(probability[order], min(k, len(logits)), p)
    assert fewest <= size <= most
    mask = np.sort(order[:size])
    if len(choices.sampling_mask):
        assert np.array_equal(choices.sampling_mask, mask)
    token = int(choices.token_ids[0])
    place = int(np.searchsorted(mask, token))
    assert mask[place] == token
    sums = np.concatenate([[0.0], np.cumsum(probability[mask] / probability[mask].sum())])
    assert sums[place] - TOLERANCE <= u <= sums[place + 1] + TOLERANCE
    assert probability[token] > 0


@settings(deadline=None, max_examples=200)
@given(
    values=LOGITS,
    u=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    k=st.one_of(st.just(0), st.integers(1, 3 * BLOCK)),
    p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
)
def test_it_is_what_sorting_gives(values: list[float], u: float, temperature: float, k: int, p: float) -> None:
    logits = np.array(values, np.float32)
    if np.isneginf(logits).all():
        logits[0] = 0.0
    choices = draw_row(logits, u, temperature=temperature, k=k, p=p)
    check_against_sorting(logits, choices, u, temperature, k, p)


@pytest.mark.parametrize(("k", "p"), [(0, 0.3), (0, 0.9), (0, 0.9999), (20, 1.0), (900, 1.0), (5_000, 0.5), (50, 0.9)])
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_large_vocabularies(k: int, p: float, spread: float) -> None:
    generator = np.random.default_rng(k)
    logits = (generator.normal(size=20_011) * spread).astype(np.float32)
    for u in generator.random(5):
        choices = draw_row(logits, float(u), temperature=0.8, k=k, p=p)
        check_against_sorting(logits, choices, float(u), 0.8, k, p)


def test_nothing_is_cut_by_p_of_one_and_k_of_zero_or_the_whole_vocabulary() -> None:
    for k in (0, 5, 6):
        choices = draw_row([0.0, 1.0, -np.inf, 3.0, 2.0], 0.5, k=k)
        assert choices.offsets.tolist() == [0, 0]
        assert len(choices.sampling_mask) == 0


def test_a_single_survivor_is_certain() -> None:
    logits = [0.0, 4.0, 4.0, 1.0]
    for u in (0.0, 0.5, 1 - 2**-53):
        for k, p in ((1, 1.0), (0, 1e-300), (1, 0.5)):
            choices = draw_row(logits, u, k=k, p=p)
            assert choices.token_ids.tolist() == [1]
            assert choices.sampling_mask.tolist() == [1]


def test_of_equal_logits_lower_ids_are_kept() -> None:
    assert draw_row([1.0] * 10, 0.9, k=3).sampling_mask.tolist() == [0, 1, 2]
    assert draw_row([1.0] * 10, 0.9, p=0.35).sampling_mask.tolist() == [0, 1, 2, 3]
    assert draw_row([0.0, 2.0, 0.0, 2.0, 2.0], 0.9, k=2).sampling_mask.tolist() == [1, 3]


def test_top_p_counts_probabilities_renormalised_after_top_k() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert draw_row(logits, 0.0, p=0.55).sampling_mask.tolist() == [0, 1]
    assert draw_row(logits, 0.0, k=2, p=0.55).sampling_mask.tolist() == [0]  # 0.4 of 0.7


def test_top_p_looks_at_the_probabilities_at_the_temperature() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert draw_row(logits, 0.0, temperature=0.2, p=0.75).sampling_mask.tolist() == [0]
    assert draw_row(logits, 0.0, temperature=100.0, p=0.75).sampling_mask.tolist() == [0, 1, 2]


def test_greedy_takes_the_first_of_the_largest_and_keeps_no_set() -> None:
    for values, best in (([1.0, 3.0, 3.0], 1), ([-0.0, 0.0], 0), ([-np.inf, -5.0], 1)):
        choices = draw_row(values, 0.99, temperature=0.0, k=2, p=0.5)
        assert choices.token_ids.tolist() == [best]
        assert len(choices.sampling_mask) == 0


def test_a_temperature_close_to_zero_is_greedy_and_not_a_fault() -> None:
    assert draw_row([1.0, 3.0, 2.9999], 0.999, temperature=5e-324).token_ids.tolist() == [1]


def test_an_impossible_token_is_never_drawn() -> None:
    for u in (0.0, 1 - 2**-53):
        assert draw_row([-np.inf, 0.0, -np.inf], u).token_ids.tolist() == [1]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_logits_that_are_no_numbers_draw_nothing_and_leave_other_rows_alone(bad: float) -> None:
    rows = np.array([[0.0, bad, 1.0], [0.0, 9.0, 1.0], [-np.inf] * 3], np.float32)
    for temperature in (0.0, 1.0):
        choices = draw(rows, np.full(3, temperature), np.zeros(3, np.int64), np.ones(3), np.full(3, 0.5))
        assert choices.token_ids.tolist() == [NO_TOKEN, 1, NO_TOKEN]


@pytest.mark.parametrize("temperature", [-1.0, np.inf, np.nan])
def test_a_temperature_that_is_none_draws_nothing(temperature: float) -> None:
    assert draw_row([0.0, -np.inf, 1.0], 0.5, temperature=temperature, p=0.5).token_ids.tolist() == [NO_TOKEN]


def test_a_row_does_not_know_its_batch() -> None:
    generator = np.random.default_rng(0)
    rows = 12
    logits = generator.normal(size=(rows, 3_000)).astype(np.float32) * 3
    temperatures = generator.choice([0.0, 0.5, 1.0], rows)
    ks = generator.choice([0, 1, 40, 500], rows)
    ps = generator.choice([0.5, 0.95, 1.0], rows)
    numbers = generator.random(rows)

    def draw_rows(chosen: npt.NDArray[np.int64]) -> Choices:
        return draw(logits[chosen], temperatures[chosen], ks[chosen], ps[chosen], numbers[chosen])

    alone = [draw_rows(np.array([row])) for row in range(rows)]
    order = generator.permutation(rows)
    batched = draw_rows(order)
    for place, row in enumerate(order):
        assert batched.token_ids[place] == alone[row].token_ids[0]
        mask = batched.sampling_mask[batched.offsets[place] : batched.offsets[place + 1]]
        assert np.array_equal(mask, alone[row].sampling_mask)


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (0, 0.8), (6, 1.0)])
def test_frequencies_are_the_probabilities(k: int, p: float) -> None:
    draws = 40_000
    logits = np.linspace(-1.5, 1.5, 12, dtype=np.float32)[np.random.default_rng(1).permutation(12)]
    seeds, positions = np.full(draws, 7, np.uint64), np.arange(draws, dtype=np.uint64)
    ks, ps = np.full(draws, k, np.int64), np.full(draws, p)
    choices = draw(np.tile(logits, (draws, 1)), np.full(draws, 0.7), ks, ps, uniforms(seeds, positions))
    mask = choices.sampling_mask[: choices.offsets[1]] if len(choices.sampling_mask) else np.arange(12)
    expected = probabilities(logits, 0.7)[mask]
    expected *= draws / expected.sum()
    counts = np.bincount(choices.token_ids, minlength=12)
    assert counts.sum() == counts[mask].sum()
    chi_squared = float(((counts[mask] - expected) ** 2 / expected).sum())
    freedom = len(mask) - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


def mixed(z: int) -> int:
    """splitmix64's finaliser in plain Python."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_random_numbers_are_splitmix64_from_a_mixed_seed(seed: int, position: int) -> None:
    step = 0x9E3779B97F4A7C15
    bits = mixed((mixed((seed + step) % 2**64) + step * (position + 1)) % 2**64)
    number = uniforms(np.array([seed], np.uint64), np.array([position], np.uint64))
    assert number.tolist() == [(bits >> 11) / 2**53]


def test_neighbouring_seeds_share_no_numbers_and_fill_the_interval() -> None:
    seeds, positions = np.meshgrid(np.arange(100, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    numbers = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(numbers)) == 10_000
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 4 * 38**0.5
