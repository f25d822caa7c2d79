"""`bench simulation`: seeds hold, one seed is one run, and every planted bug is found."""

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.faults.audit import GroupFact, LedgerSnapshot
from bench.programs import ROOT
from bench.simulation.bench import PLANT_SEEDS, SimulationOptions, Tally, bench_simulation, described, run, table
from bench.simulation.connections import Breakage, FaultyDatabase, Killed, LedgerServer, Life
from bench.simulation.invariants import LeaseFact, Rule, RunView, Violation, between
from bench.simulation.planted import PLANTED, planted
from bench.simulation.run import Outcome, empty_ledger, play
from bench.simulation.scenario import Kind, Scenario, draw
from etude.errors import UserError
from etude.ledger.database import LedgerUnavailable
from etude.ledger.ledger import Ledger
from etude.ledger.open import open_database
from etude.ledger.transactions import Transactions
from etude.rollouts.fake import LoopClock

SEEDS = range(10)


@pytest.fixture(scope="module", name="ledger")
def _ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_ledger(tmp_path_factory.mktemp("empty"))


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Switch off the logging of injected faults."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_seeds_hold_and_something_happens_in_them(tmp_path: Path, ledger: Path) -> None:
    outcomes = [play(draw(seed), tmp_path, ledger) for seed in SEEDS]
    assert [outcome.violations for outcome in outcomes] == [()] * len(SEEDS)
    injected = {words.partition(" ")[0] for outcome in outcomes for _, words in outcome.injected}
    assert injected == set(Kind)
    assert sum(outcome.restarts for outcome in outcomes) > len(SEEDS)
    assert len({outcome.digest for outcome in outcomes}) == len(SEEDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, tmp_path: Path, ledger: Path) -> None:
    for seed in SEEDS:
        with planted(name):
            if play(draw(seed), tmp_path, ledger).violations:
                break
    else:
        pytest.fail(f"not found by seeds {SEEDS}")
    assert not play(draw(seed), tmp_path, ledger).violations, "it was the bug"


def test_one_seed_is_one_run_whatever_the_process(tmp_path: Path, ledger: Path) -> None:
    """Words of a run end with the digest of its events; sets of strings have another order in the other process."""
    here = described(play(draw(7), tmp_path, ledger))
    command = [sys.executable, "-m", "bench", "simulation", "--seed", "7", "--json"]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert here in ended.stderr
    assert json.loads(ended.stdout)["violations"] == 0


def test_the_object_counts_what_came_and_what_was_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    violation = Violation(Rule.STALE, "planted")
    outcome = Outcome(
        seed=5, violations=(violation,), injected=((1.0, "kill-trainer train"),), restarts=2, seconds=9.0, digest="d"
    )
    monkeypatch.setattr("bench.simulation.bench.play", lambda scenario, *_: replace(outcome, seed=scenario.seed))
    result = bench_simulation(SimulationOptions(seeds=3, first=4))
    assert (result["seeds"], result["violations"], result["failing"], result["restarts"]) == (3, 3, [4, 5, 6], 6)
    assert result["planted"] == dict.fromkeys(PLANTED, 0) and result["planted_found"] == len(PLANTED)
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert [goal["met"] for goal in goals.values() if isinstance(goal, dict)] == [False, True]
    assert "seed 5: stale: planted" in table(result)
    assert "seed 4: stale: planted" in capsys.readouterr().err


def test_a_bug_that_no_seed_finds_misses_its_goal(monkeypatch: pytest.MonkeyPatch) -> None:
    played = list[int]()
    sound = Outcome(seed=0, violations=(), injected=(), restarts=0, seconds=1.0, digest="d")

    def play_soundly(scenario: Scenario, *_: object) -> Outcome:
        played.append(scenario.seed)
        return sound

    monkeypatch.setattr("bench.simulation.bench.play", play_soundly)
    result = bench_simulation(SimulationOptions(seeds=1))
    assert result["planted"] == dict.fromkeys(PLANTED) and result["planted_found"] == 0
    assert len(played) == 1 + PLANT_SEEDS * len(PLANTED)
    goals = result["goals"]
    assert isinstance(goals, dict)
    assert [goal["met"] for goal in goals.values() if isinstance(goal, dict)] == [True, False]


def test_an_interrupted_bench_has_what_it_played(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Outcome(seed=0, violations=(), injected=(), restarts=0, seconds=1.0, digest="d")

    def interrupted(scenario: object, *_: object) -> Outcome:
        if getattr(scenario, "seed", 0) == 2:
            raise KeyboardInterrupt
        return sound

    monkeypatch.setattr("bench.simulation.bench.play", interrupted)
    result = bench_simulation(SimulationOptions(seeds=5, plants=False))
    assert result["interrupted"] and result["seeds"] == 2
    assert "INTERRUPTED" in table(result)


def test_no_seeds_are_refused() -> None:
    with pytest.raises(UserError, match="--seeds 0"):
        run(argparse.Namespace(seeds=0, first=0, seed=None, quick=False))


def test_progress_is_written_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    tally.add(Outcome(seed=0, violations=(), injected=(), restarts=0, seconds=1.0, digest="d"))
    tally.write_progress(10, 5.0)
    tally.write_progress(10, 12.0)
    assert capsys.readouterr().err == "1 of 10 seeds, 5 a minute, 0 failing\n"


# ── connections ─────────────────────────────────────────────────────────────────────────────────────────────────────


def connect(folder: Path, life: Life, server: LedgerServer) -> Ledger:
    database = FaultyDatabase(open_database(folder / "ledger.db", retry_timeout_s=1.0), server, life)
    return Ledger(Transactions(database, retry_timeout_s=0.0), term_s=1.0, clock=LoopClock())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_process_dies_before_or_after_a_commit(is_kept: bool, tmp_path: Path) -> None:
    life, server = Life(), LedgerServer()
    with connect(tmp_path, life, server) as ledger:
        life.breakage = Breakage(1, is_kept=is_kept, is_fatal=True)
        ledger.facts.set("a", "1")
        with pytest.raises(Killed):
            ledger.facts.set("b", "1")
        with pytest.raises(Killed):
            ledger.facts.get("a")
    with connect(tmp_path, Life(), server) as ledger:
        assert (ledger.facts.get("a"), ledger.facts.get("b")) == ("1", "1" if is_kept else None)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_lost_reply_is_an_error_unless_the_commit_was_kept(is_kept: bool, tmp_path: Path) -> None:
    life = Life()
    with connect(tmp_path, life, LedgerServer()) as ledger:
        life.breakage = Breakage(0, is_kept=is_kept, is_fatal=False)
        if is_kept:
            ledger.facts.set("a", "1")
        else:
            with pytest.raises(LedgerUnavailable):
                ledger.facts.set("a", "1")
        assert ledger.facts.get("a") == ("1" if is_kept else None)


def test_a_ledger_that_is_down_answers_nothing(tmp_path: Path) -> None:
    server = LedgerServer()
    with connect(tmp_path, Life(), server) as ledger:
        server.is_down = True
        with pytest.raises(LedgerUnavailable):
            ledger.progress()
        server.is_down = False
        assert ledger.progress().admitted == 0


# ── rules ───────────────────────────────────────────────────────────────────────────────────────────────────────────

CONFIG = draw(0).config
LEASE = LeaseFact(holder="machine", token=2, beats=5)


def view(*, groups: int = 0, published: int = 0, done: tuple[int, ...] = (), lease: LeaseFact = LEASE) -> RunView:
    facts = {
        index: GroupFact(index=index, task_id=str(index), epoch=1, size=2, state="open", step=None, reason="")
        for index in range(groups)
    }
    return RunView(
        at_s=0.0,
        snapshot=LedgerSnapshot(groups=facts, steps_done=frozenset(done)),
        leases={"trainer": lease},
        published=published,
    )


def rules(before: RunView, after: RunView) -> list[str]:
    return [violation.rule for violation in between(before, after, CONFIG)]


def test_the_window_is_what_the_newest_version_allows() -> None:
    most = CONFIG.rollouts.groups_per_step * (CONFIG.rollouts.max_staleness + 1)
    assert rules(view(), view(groups=most)) == []
    assert rules(view(), view(groups=most + 1)) == [Rule.WINDOW]
    assert rules(view(), view(groups=most + 1, published=1)) == []


def test_no_step_is_committed_before_its_version() -> None:
    assert rules(view(), view(done=(1,), published=1)) == []
    assert rules(view(), view(done=(1,))) == [Rule.VERSIONS]


@pytest.mark.parametrize(
    ("after", "is_fine"),
    [
        (replace(LEASE, beats=6), True),
        (LeaseFact(holder="", token=2, beats=0), True),
        (LeaseFact(holder="other", token=3, beats=0), True),
        (replace(LEASE, beats=0), False),
        (replace(LEASE, holder="other"), False),
        (replace(LEASE, token=1), False),
    ],
)
def test_a_lease_changes_hands_under_another_token(after: LeaseFact, is_fine: bool) -> None:
    assert rules(view(), view(lease=after)) == ([] if is_fine else [Rule.LEASE])
