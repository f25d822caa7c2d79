"""``bench sandbox``: leftovers are found, goals follow the figures, and missing contestants are named."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.sandbox.bench import BWRAP, CRUN, SandboxOptions, bench_sandbox, judged, rows_of, sandbox_options, table
from bench.sandbox.contestants import CONTESTANTS, NS, QEMU, ProviderContestant
from bench.sandbox.leaks import Remainder, Remains
from bench.sandbox.measures import (
    WARM_UP,
    Figures,
    Rate,
    measure_crowd,
    measure_cycles,
    measure_live,
    measure_machines,
    measure_pool,
    race_rates,
    race_starts,
)
from bench.sandbox.programs import Launch, Launcher
from etude.errors import InfrastructureError, UserError
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.sandbox_spec import Capability, SandboxSpec

ALL = SandboxOptions()
THREE = ((NS, 0.01), ("bwrap+overlay", 0.04), ("crun+exec", 0.03))
SLOW, FAST = Launch(ran_s=0.1, whole_s=0.3), Launch(ran_s=0.4, whole_s=0.5)


class Leaky:
    """A provider that leaves a file for each sandbox and one of its own."""

    def __init__(self, folder: Path) -> None:
        self._inner = FakeSandboxes()
        self._folder = folder
        (folder / "own").touch()
        self.made = 0

    async def capabilities(self) -> frozenset[Capability]:
        return await self._inner.capabilities()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        self.made += 1
        (self._folder / str(self.made)).touch()
        return await self._inner.create(files, spec)

    async def close(self) -> None:
        await self._inner.close()


def rates(**per_s: tuple[float, float]) -> dict[tuple[str, int], list[Rate]]:
    """Starts a second of each, one and two at a time."""
    return {(name, n + 1): [Rate(rate, 0.1)] for name, both in per_s.items() for n, rate in enumerate(both)}


def figures(**fields: object) -> Figures:
    starts = {(name, "true"): [Launch(whole_s, whole_s)] for name, whole_s in THREE}
    made = Figures(
        starts=starts,
        rates=rates(ns=(50.0, 40.0), podman=(2.0, 4.0)),
        alive=1000,
        leaked=0,
        boots_s=[8.0, 9.0],
        forks_s=[0.2, 0.3],
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_goals_follow_the_figures() -> None:
    goals = judged(figures())
    assert {name: (goal["value"], goal["met"]) for name, goal in goals.items() if isinstance(goal, dict)} == {
        "ns start + exec vs crun": (3.0, True),
        "start_vs_bwrap_overlay": (0.25, True),
        "starts_vs_podman": (10.0, True),
        "alive": (1000.0, True),
        "leaked": (0.0, True),
        "vm_fork_vs_cold_boot": (35.0, True),
    }
    assert goals["vm_fork_vs_cold_boot"]["fork_ms"] == 250.0  # type: ignore[index, call-overload]  # a JSON object


@pytest.mark.parametrize(
    ("worse", "goal"),
    [
        (
            {"starts": {(NS, "true"): [SLOW], ("bwrap+overlay", "true"): [FAST], ("crun+exec", "true"): [FAST]}},
            "start_vs_bwrap_overlay",
        ),
        (
            {"starts": {(name, "true"): [Launch(s, s)] for name, s in ((NS, 2.0), (BWRAP, 9.0), (CRUN, 3.9))}},
            "ns start + exec vs crun",
        ),
        ({"rates": rates(ns=(50.0, 4.9), podman=(1.0, 1.0))}, "starts_vs_podman"),
        ({"alive": 999}, "alive"),
        ({"leaked": 1}, "leaked"),
        ({"forks_s": [0.5, 0.6]}, "vm_fork_vs_cold_boot"),
        ({"boots_s": [], "forks_s": [], "missing": {QEMU: "no image"}}, "vm_fork_vs_cold_boot"),
        ({"alive": None, "failed": {(NS, "crowd"): "no memory"}}, "alive"),
        ({"leaked": None, "failed": {(NS, "cycles"): "it died"}}, "leaked"),
    ],
)
def test_a_goal_that_is_not_reached_is_not_met(worse: dict[str, object], goal: str) -> None:
    goals = judged(figures(**{"forks_s": [0.2, 0.3], **worse}))
    unmet = [name for name, one in goals.items() if isinstance(one, dict) and not one["met"]]
    assert unmet == [goal]


def test_who_is_missing_is_a_row_and_a_note_never_a_figure() -> None:
    figures_seen = figures(missing={"podman": "podman is not installed"}, rates=rates(ns=(9.0, 9.0)))
    rows = list(rows_of(figures_seen, ALL))
    assert {"contestant": "podman", "case": "starts and rates", "missing": "podman is not installed"} in rows
    goal = judged(figures_seen)["starts_vs_podman"]
    assert isinstance(goal, dict)
    assert (goal["value"], goal["reason"]) == (None, "podman is not installed")
    drawn = table(
        {"bench": "sandbox", "date": "today", "commit": "abc", "results": rows, "goals": {"starts_vs_podman": goal}}
    )
    assert "podman, starts and rates: podman is not installed" in drawn


def test_options_name_what_is_wrong() -> None:
    assert QEMU not in sandbox_options(quick=True).contestants
    assert sandbox_options((NS,), quick=True, cycles=7).cycles == 7
    assert sandbox_options().contestants == CONTESTANTS
    with pytest.raises(UserError, match="no contestant 'docker'"):
        sandbox_options(("docker",))
    with pytest.raises(UserError, match="cycles is 0"):
        sandbox_options(cycles=0)


def test_what_is_left_is_counted_and_nothing_else(tmp_path: Path) -> None:
    with Remainder(tmp_path) as remainder:
        before = remainder.count()
        (tmp_path / "left").mkdir()
        (tmp_path / "left" / "file").touch()
        orphan = "import subprocess; subprocess.Popen(['sleep', '60'])"
        subprocess.run([sys.executable, "-c", orphan], check=True)
        with subprocess.Popen(["sleep", "60"]) as child:
            assert remainder.count().beyond(before) == Remains(processes=2, mounts=0, cgroups=0, files=2)
            child.kill()
        left = remainder.count().beyond(before)
        assert left.processes == 1
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    adopted = [int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")]
    assert len(adopted) == 1
    os.kill(adopted[0], 9)
    os.waitpid(adopted[0], 0)


def test_cycles_find_what_grows_and_what_stays(tmp_path: Path) -> None:
    figures_seen = Figures()
    asyncio.run(measure_cycles(figures_seen, "leaky", Leaky, tmp_path, 5, settle_s=0.0))
    row = figures_seen.others[0]
    assert isinstance(row["grown"], dict) and isinstance(row["left"], dict)
    assert (row["grown"]["files"], row["left"]["files"]) == (5, 5 + WARM_UP + 1)
    assert figures_seen.leaked == 5 + 5 + WARM_UP + 1


def test_a_pool_is_measured_over_a_provider_of_its_own(tmp_path: Path) -> None:
    figures_seen = Figures()
    asyncio.run(measure_pool(figures_seen, NS, Leaky, tmp_path, 2))
    assert [row["case"] for row in figures_seen.others] == ["true, from a warm pool"]


def test_ours_are_measured_through_the_protocol() -> None:
    async def measure() -> Figures:
        figures_seen, provider = Figures(), FakeSandboxes()
        contestants = {NS: ProviderContestant(NS, provider)}
        await race_starts(figures_seen, contestants, 2)
        await race_rates(figures_seen, contestants, 1, 0.01)
        await measure_live(figures_seen, NS, provider, 2)
        await measure_crowd(figures_seen, NS, provider, 4)
        await measure_machines(figures_seen, QEMU, lambda _: provider, Path(), 1)
        assert not len(provider)
        return figures_seen

    figures_seen = asyncio.run(measure())
    assert {case: len(launches) for case, launches in figures_seen.starts.items()} == {
        (NS, "true"): 2,
        (NS, "python3 -c 1"): 2,
    }
    assert figures_seen.alive == 4
    assert len(figures_seen.boots_s) == len(figures_seen.forks_s) == 1
    assert not figures_seen.missing
    assert [row["case"] for row in figures_seen.others] == [
        "exec in a live one",
        "4 alive",
        "cold boot to first command",
        "fork to first command",
    ]


def test_a_contestant_that_fails_is_out_with_its_reason() -> None:
    async def measure() -> Figures:
        figures_seen, broken, sound = Figures(), FakeSandboxes(), FakeSandboxes()
        broken.broken = "no disk"
        contestants = {"broken": ProviderContestant("broken", broken), "sound": ProviderContestant("sound", sound)}
        await race_starts(figures_seen, contestants, 1)
        with pytest.raises(ExceptionGroup):
            await measure_crowd(figures_seen, "broken", broken, 3)
        return figures_seen

    figures_seen = asyncio.run(measure())
    assert figures_seen.missing == {"broken": "no disk"}
    assert set(figures_seen.starts) == {("sound", "true"), ("sound", "python3 -c 1")}


@pytest.mark.heavy("bubblewrap, and root", missing=shutil.which("bwrap") is None or os.geteuid() != 0)
def test_a_program_is_started_and_leaves_nothing(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launcher:
        (launch,) = launcher.launch("bwrap+overlay", ["/usr/bin/true"])
        assert 0 < launch.ran_s < launch.whole_s
        assert len(launcher.launch("bwrap+overlay", ["/usr/bin/true"], seconds=0.01, at_once=2)) >= 2
        with pytest.raises(InfrastructureError, match=r"bwrap\+overlay was not measured: exit code 1"):
            launcher.launch("bwrap+overlay", ["/usr/bin/false"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bwrap+overlay", "lower"]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


@pytest.mark.heavy("bubblewrap, and root", missing=shutil.which("bwrap") is None or os.geteuid() != 0)
def test_a_bench_of_one_has_its_figures_and_goals_that_say_what_is_missing() -> None:
    result = bench_sandbox(sandbox_options(("bwrap+overlay",), quick=True))
    rows, goals = result["results"], result["goals"]
    assert isinstance(rows, list) and isinstance(goals, dict)
    cases = [row["case"] for row in rows if isinstance(row, dict)]
    assert cases == ["true", "python3 -c 1", "starts, one at a time", "starts, 2 at a time"]
    assert not any(goal["met"] for goal in goals.values() if isinstance(goal, dict))
    assert "bwrap+overlay" in table(result)
