"""The bench of the weight store, at sizes where only its structure and the bits can be judged, never the speed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from bench.sync.rehearsal import PublishedPair, Rehearsal, published_pairs
from bench.weights.bench import Plan, bench_weights, publish_into_memory, table
from bench.weights.contestants import CONTESTANTS, DeltaContestant, FireworksContestant, Packets
from bench.weights.floors import floors_of
from etude.errors import DamagedError, UserError
from etude.models.spec import TINY
from etude.types import Json, TensorSpec
from etude.weights.state import State, snapshot, state_bytes

REHEARSAL = Rehearsal(
    model=replace(TINY, vocab_size=300),
    corpus_bytes=20_000,
    texts=2,
    tokens=16,
    pretrain_steps=2,
    rates=(3e-4, 3e-3),
    steps=2,
    samples=4,
)
GOALS = {
    "bytes_vs_arc_v3",
    "bytes_vs_arc_v2",
    "encode_vs_memcpy",
    "encode_vs_arc_v3",
    "publish_vs_memcpy",
    "bytes_vs_entropy",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def pairs(cache: Path) -> list[PublishedPair]:
    return published_pairs(REHEARSAL, cache, lambda line: None)


@dataclass(frozen=True)
class Liar:
    """A codec that claims that nothing ever changes."""

    name: str = "liar"
    missing: None = None

    def encode(self, old: State, new: State) -> Packets:
        return []

    def decode(self, packets: Packets, current: State) -> State:
        return current


def _pair(old: list[int], new: list[int]) -> PublishedPair:
    spec = TensorSpec(name="w", dtype="BF16", shape=(len(old),))
    return PublishedPair(rate=1.0, specs=(spec,), old=np.array(old, np.uint16), new=np.array(new, np.uint16))


def _run(cache: Path, contestants: tuple[DeltaContestant, ...]) -> tuple[dict[str, Json], list[dict[str, Json]]]:
    result = bench_weights(
        size_gb=1e-4, plan=Plan(contestants=contestants, repeats=1, least_s=0.0), rehearsal=REHEARSAL, cache=cache
    )
    rows = result["results"]
    assert isinstance(rows, list)
    return result, [row for row in rows if isinstance(row, dict)]


# ── the pairs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_pairs_change_some_weights_more_of_them_at_larger_rates(pairs: list[PublishedPair]) -> None:
    small, large = pairs
    assert (small.rate, large.rate) == REHEARSAL.rates
    assert 0 < small.changed_share < large.changed_share < 1


def test_states_of_a_pair_cover_it(pairs: list[PublishedPair]) -> None:
    old, new = pairs[0].states()
    assert old.keys() == new.keys() == {spec.name for spec in pairs[0].specs}
    assert np.array_equal(np.concatenate([old[spec.name].numbers for spec in pairs[0].specs]), pairs[0].old)
    assert np.array_equal(np.concatenate([new[spec.name].numbers for spec in pairs[0].specs]), pairs[0].new)


def test_pairs_come_from_the_cache_the_second_time(pairs: list[PublishedPair], cache: Path) -> None:
    lines: list[str] = []
    again = published_pairs(REHEARSAL, cache, lines.append)
    assert "earlier call" in lines[0]
    assert all(np.array_equal(one.new, other.new) for one, other in zip(pairs, again, strict=True))
    assert [folder.name for folder in cache.iterdir()] == [REHEARSAL.key]


def test_other_settings_have_another_cache() -> None:
    assert replace(REHEARSAL, seed=1).key != REHEARSAL.key


def test_a_rehearsal_that_makes_no_pair_is_refused() -> None:
    with pytest.raises(UserError, match="makes no pair"):
        Rehearsal(steps=0)


# ── the contestants ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda contestant: contestant.name)
def test_contestants_restore_every_bit(contestant: DeltaContestant, pairs: list[PublishedPair]) -> None:
    if contestant.missing is not None:
        pytest.skip(contestant.missing)
    for pair in pairs:
        old, new = pair.states()
        decoded = contestant.decode(contestant.encode(old, new), snapshot(old))
        assert all(np.array_equal(decoded[name].data, new[name].data) for name in new)


def test_a_publisher_in_memory_stores_changes(pairs: list[PublishedPair]) -> None:
    old, new = pairs[0].states()
    with publish_into_memory(old) as publish:
        sizes = [publish(new), publish(old)]
    assert all(0 < size < state_bytes(new) for size in sizes)


# ── the floors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_regular_changes_need_no_gaps() -> None:
    old = [0x3F80] * 400
    new = [0x3F81 if place % 4 == 3 else bits for place, bits in enumerate(old)]
    floors = floors_of(_pair(old, new))
    assert floors.changed == 100
    assert floors.gaps_bytes == 0
    assert floors.context_bytes == pytest.approx(400 * 0.8112781244591328 / 8)  # entropy of a coin of ¼


def test_exponents_that_tell_all_leave_nothing_to_say() -> None:
    random = np.random.default_rng(0)
    small = random.random(1000) < 0.3
    old = np.where(small, 0x3000, 0x3F80)
    floors = floors_of(_pair(list(old), list(old + small)))
    assert floors.context_bytes == 0
    assert floors.gaps_bytes > 0.5 * small.sum() / 8


# ── the bench ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_bench_has_a_row_for_everyone_and_every_goal(cache: Path) -> None:
    result, rows = _run(cache, CONTESTANTS)
    assert {"bench", "machine", "commit", "date", "seconds", "results", "goals"} == result.keys()
    everyone = {contestant.name for contestant in CONTESTANTS} | {"memcpy", "etude-publish"}
    floors = {"floor: gaps and steps", "floor: with exponents"}
    cases = list(dict.fromkeys(str(row["case"]) for row in rows))
    assert len(cases) == len(REHEARSAL.rates) + 1
    tiled = everyone - {"arc_v2", "arc_v3", "arc_v3-patient"}
    for case, expected in zip(cases, (everyone | floors, tiled, everyone | floors), strict=True):
        assert {row["contestant"] for row in rows if row["case"] == case} == expected
    assert len({tuple(row) for row in rows}) == 1
    goals = result["goals"]
    assert isinstance(goals, dict) and goals.keys() == GOALS
    drawing = table(result)
    assert all(name in drawing for name in everyone | GOALS)


def test_goals_follow_from_the_rows(cache: Path) -> None:
    result, rows = _run(cache, CONTESTANTS)
    real = [row for row in rows if row["state_bytes"] == rows[0]["state_bytes"]]
    own_floors = (("etude-gaps", "of_gaps_floor"), ("etude-classes", "of_context_floor"))
    worst = max(float(str(row[floor])) for name, floor in own_floors for row in real if row["contestant"] == name)
    sizes = {row["contestant"]: float(str(row["bytes"])) for row in reversed(real) if row["bytes"]}  # of the first rate
    ours = min(sizes["etude-gaps"], sizes["etude-classes"])
    goals = result["goals"]
    assert isinstance(goals, dict)
    entropy = goals["bytes_vs_entropy"]
    assert isinstance(entropy, dict)
    assert entropy["value"] == pytest.approx(worst, abs=2e-3)
    assert entropy["met"] is (worst <= 1.1)
    assert worst > 1.1, "headers weigh heavily on so few changes"
    arc_v2 = goals["bytes_vs_arc_v2"]
    assert isinstance(arc_v2, dict)
    if "arc_v2" in sizes and arc_v2["value"] is not None:
        assert arc_v2["value"] == pytest.approx(ours / sizes["arc_v2"], abs=1e-3)


def test_a_missing_package_is_said_and_its_goals_are_not_met(cache: Path) -> None:
    ours = tuple(one for one in CONTESTANTS if not isinstance(one, FireworksContestant))
    theirs = tuple(one for one in CONTESTANTS if isinstance(one, FireworksContestant))
    absent = tuple(replace(one, package="not_installed_anywhere") for one in theirs)
    result, rows = _run(cache, ours + absent)
    reasons = {str(row["contestant"]): row["missing"] for row in rows if row["missing"]}
    assert reasons.keys() == {one.name for one in theirs}
    goals = result["goals"]
    assert isinstance(goals, dict)
    for name in ("bytes_vs_arc_v3", "bytes_vs_arc_v2", "encode_vs_arc_v3"):
        goal = goals[name]
        assert isinstance(goal, dict)
        assert goal["value"] is None and goal["met"] is False and "-e '.[bench]'" in str(goal["reason"])
    assert "not_installed_anywhere" in table(result)


def test_a_contestant_that_loses_bits_is_found_out(cache: Path) -> None:
    with pytest.raises(DamagedError, match="liar did not restore"):
        _run(cache, (Liar(),))


def test_what_is_published_is_what_the_row_says(cache: Path) -> None:
    @contextmanager
    def publishing(first: State) -> Iterator[Callable[[State], int]]:
        yield lambda state: 123

    plan = Plan(repeats=1, least_s=0.0, start_publishing=publishing)
    rows = bench_weights(size_gb=1e-4, plan=plan, rehearsal=REHEARSAL, cache=cache)["results"]
    assert isinstance(rows, list)
    assert {row["bytes"] for row in rows if isinstance(row, dict) and row["contestant"] == "etude-publish"} == {123}


def test_short_runs_are_repeated_until_they_can_be_believed() -> None:
    plan = Plan(repeats=3, least_s=1.0)
    assert plan.wants_more([2.0, 2.0])
    assert not plan.wants_more([2.0, 2.0, 2.0])
    assert plan.wants_more([0.1] * 9)
    assert not plan.wants_more([0.01] * 25)


@pytest.mark.parametrize(("size_gb", "repeats"), [(0.0, 1), (-1.0, 1), (1.0, 0), (1.0, 26)])
def test_sizes_that_measure_nothing_are_refused(size_gb: float, repeats: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be positive"):
        bench_weights(size_gb=size_gb, plan=Plan(repeats=repeats), rehearsal=REHEARSAL, cache=tmp_path)
