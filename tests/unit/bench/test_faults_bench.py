"""`bench faults`: verdicts are kept and counted, goals follow findings, and damage can be undone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.faults.audit import Finding, Wrong
from bench.faults.bench import (
    FaultOptions,
    fault_options,
    options_of,
    progress_line,
    recipe,
    rows_of,
    steps_of,
    summary,
    table,
)
from bench.faults.chaos_run import FaultRecord, RunLog
from bench.faults.injector import JUMP_S, Damage, jump_s
from bench.faults.schedule import Fault, Kind, plan
from bench.faults.verdicts import Got, Verdict, VerdictStore
from etude.errors import DamagedError, UserError
from etude.run.folder import RunFolder
from etude.types import Json

CAMPAIGN: dict[str, Json] = {"faults": 3, "seed": 7, "kinds": ["kill-engine", "cut-region"]}
FAULT = Fault(number=0, kind=Kind.DISK_FULL, at=3, delay_s=0.0, hold_s=0.5, pick=0.1)
SOUND = Verdict(
    run=0,
    planned=3,
    finished=True,
    resumes=1,
    seconds=12.0,
    faults=(
        Got(kind=Kind.KILL_ENGINE, how="restarted", seconds=3.0),
        Got(kind=Kind.KILL_ENGINE, how="went on", seconds=1.0),
        Got(kind=Kind.CLOCK_JUMP, how="", seconds=None),
    ),
    findings=(),
    endings=("checkpoint /a/b/step-1 does not match its SHA-256",),
)


def test_rows_count_what_came_of_each_kind() -> None:
    engine, clock = rows_of([SOUND, replace(SOUND, run=1, faults=SOUND.faults[:1])])
    assert engine["case"] == "kill-engine"
    assert [engine[name] for name in ("injected", "runs", "recovered", "restarted", "went_on")] == [3, 2, 3, 2, 1]
    assert (engine["median_s"], engine["longest_s"]) == (3.0, 3.0)
    assert [clock[name] for name in ("injected", "runs", "recovered", "median_s")] == [1, 1, 0, None]


@pytest.mark.parametrize("wrong", Wrong)
def test_a_finding_misses_its_goal_and_no_other(wrong: Wrong) -> None:
    unsound = replace(SOUND, findings=(Finding(wrong, "planted"),))
    goals = summary([SOUND, unsound], FaultOptions(faults=3))["goals"]
    assert isinstance(goals, dict)
    assert set(goals) == {"lost", "double_trained", "infra_scored_zero", "unbounded_waits"}
    missed = [name for name, goal in goals.items() if isinstance(goal, dict) and not goal["met"]]
    assert missed == [wrong.value]


def test_a_campaign_can_be_read_by_people_and_machines() -> None:
    figures = summary([SOUND], FaultOptions(faults=3, seed=7))
    result = {"bench": "faults", "date": "today", "commit": "abc", **json.loads(json.dumps(figures))}
    shown = table(result)
    assert "kill-engine" in shown
    assert "seed 7" in shown
    assert "checkpoint …step-… does not match its SHA-…" in shown
    assert "3 faults" in progress_line([SOUND], 40)


def test_verdicts_are_found_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", recipe(0, 3))
    log = tmp_path / "supervisor.log"
    log.write_text("etude: said something\n")
    wrong = replace(SOUND, run=1, findings=(Finding(Wrong.LOST, "a rollout"),))
    store = VerdictStore(tmp_path / "out", CAMPAIGN)
    for verdict in (SOUND, wrong):
        assert store.find(verdict.run) is None
        store.put(verdict, folder, [log])
    store.note(2, FaultRecord(fault=FAULT, struck_s=1.0, starts=0, resumes=0, healed_s=1.5, recovered_s=2.5, how="x"))
    with pytest.raises(UserError, match="another process goes on with this campaign"):
        VerdictStore(tmp_path / "out", CAMPAIGN)
    store.close()
    with VerdictStore(tmp_path / "out", CAMPAIGN) as again:
        assert again.noted == 1
        assert [again.find(run) for run in range(3)] == [SOUND, wrong, None]
    assert json.loads((tmp_path / "out" / "faults.jsonl").read_text()) == {
        "run": 2, "fault": 0, "kind": "disk-full", "how": "x", "seconds": 1.0,
    }  # fmt: skip
    resumed = options_of(tmp_path / "out")
    assert (resumed.faults, resumed.seed, resumed.kinds) == (3, 7, (Kind.KILL_ENGINE, Kind.CUT_REGION))
    assert resumed.described == CAMPAIGN
    assert not (tmp_path / "out" / "run-0000").exists()
    assert (tmp_path / "out" / "run-0001" / "logs" / "supervisor.log").exists()


def test_another_campaign_and_a_damaged_verdict_are_refused(tmp_path: Path) -> None:
    with VerdictStore(tmp_path, CAMPAIGN) as store:
        with pytest.raises(UserError, match="another campaign"):
            VerdictStore(tmp_path, {**CAMPAIGN, "seed": 8})
        (tmp_path / "run-0000.json").write_bytes(b'{"run": 0}')
        with pytest.raises(DamagedError, match=r"run-0000\.json"):
            store.find(0)


def test_a_verdict_tells_how_long_it_took_from_the_end_of_a_fault() -> None:
    fault = FAULT
    got_over = FaultRecord(
        fault=fault, struck_s=1.0, starts=4, resumes=0, healed_s=1.5, recovered_s=2.5, how="restarted"
    )
    not_yet = FaultRecord(fault=fault, struck_s=5.0, starts=4, resumes=0)
    verdict = Verdict.of(2, 2, RunLog(records=[got_over, not_yet], resumes=3, seconds=9.0))
    assert verdict.faults == (
        Got(kind="disk-full", how="restarted", seconds=1.0),
        Got(kind="disk-full", how="", seconds=None),
    )
    assert (verdict.run, verdict.resumes, verdict.finished) == (2, 3, False)


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"dAmaged", b"sound"),
        (b"dAmaged and then", b"sound and then"),
        (b"repaired", b"repaired"),
        (b"sound", b"sound"),
    ],
)
def test_damage_is_undone_unless_it_was_already(tmp_path: Path, content: bytes, left: bytes) -> None:
    path = tmp_path / "packs" / "0123456789abcdef"
    path.parent.mkdir()
    path.write_bytes(content)
    damage = Damage(path, b"sound", b"dAmaged")
    damage.undo()
    assert path.read_bytes() == left
    assert damage.is_named("pack 0123456789ab is broken")
    assert not damage.is_named("pack ffff is broken")
    path.unlink()
    damage.undo()
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (b"one\ntw", b"one\ntwo\n"),
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"one\ntwo\nthree\n", b"one\ntwo\nthree\n"),
        (b"one\nthree\n", b"one\nthree\n"),
    ],
)
def test_a_cut_is_undone_unless_the_file_has_grown_since(tmp_path: Path, content: bytes, left: bytes) -> None:
    """Regression: a run at a URL had fetched the lines that were cut off, and the undo doubled them."""
    path = tmp_path / "serve.jsonl"
    path.write_bytes(content)
    Damage(path, b"one\ntwo\n", b"one\ntw").undo()
    assert path.read_bytes() == left


def test_clocks_jump_seconds_and_days_both_ways() -> None:
    jumps = [jump_s(step / 1000) for step in range(1000)]
    assert min(jumps) < -86_400
    assert max(jumps) > 86_400
    assert min(map(abs, jumps)) < 2 * JUMP_S[0]


@pytest.mark.parametrize("faults", [1, 10, 50, 1000])
def test_every_campaign_fits_its_runs(faults: int) -> None:
    options = FaultOptions(faults=faults)
    schedules = plan(0, options.extent)
    assert sum(len(schedule.faults) for schedule in schedules) == faults
    assert recipe(1, steps_of(options.extent.size.faults)).trainer.steps >= 3


@pytest.mark.parametrize(("faults", "seed"), [(0, 0), (1, -1)])
def test_impossible_options_are_refused(faults: int, seed: int) -> None:
    with pytest.raises(UserError, match="bench faults"):
        fault_options(faults, seed=seed)
    with pytest.raises(UserError, match="--kinds kill-bill: expected some of kill-supervisor"):
        fault_options(1, kinds=["kill-bill"])


def test_a_quick_campaign_has_every_kind_and_a_place_of_its_own() -> None:
    assert fault_options(quick=True).faults == 50
    assert fault_options().faults == 1000
    assert fault_options(seed=1).out != fault_options(seed=2).out
