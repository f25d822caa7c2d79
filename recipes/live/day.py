"""A compressed day of a product that learns from its users: ``python recipes/live/day.py [--seed N] [--variant NAME]``.

    etude live ──▶ mid-training, simulated RL, first release ──▶ live: users come, who are a program of their own
                                                                  ├─ after two releases:  noise is proposed ─▶ the gate
                                                                  ├─ after another:       a habit is proposed ─▶ canary
                                                                  └─ the day is over ──▶ figures in OUT/day.json

Each start goes on where the last one stopped: with the run, with what is left of the day, with what was not planted
yet. Owns the processes and the plan of the day; figures are :mod:`measure`'s, the bad weights :mod:`plant`'s.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from live_run import LiveRun
from measure import ReleaseMove, day_figures, over_seeds, read_truth

from etude.clock import date_utc
from etude.config.loading import load_recipe
from etude.run.machine_info import describe_machine, source_commit

HERE = Path(__file__).parent
KEPT_PART = 'name="kept", signal="kept", weight=1.0, range=[0.0, 1.0]'
"""The part of the recipe's formula."""
VARIANTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "live": (),
        "no-propensity": (f"feedback.reward.parts=[{{{KEPT_PART}, missing=0.5}}]",),
        "window8": ("rollouts.max_staleness=8", "release.every_steps=9"),
        "below-the-bar": ("live.after_steps=1", "release.minimum_bar=0.0"),
    }
)
"""The recipe as it is, and its ablations: what is set otherwise."""
PLANTS = (("noise", 2, "rejected"), ("habit", 2, "rolled_back"))
"""Bad weights, how many versions must have been released before, and the end that they are to come to."""
POLL_S = 1.0
START_S = 1800.0
"""Longest time to the first release, mid-training included."""
STOP_S = 60.0
"""Longest time for processes to end once the day is over."""
LOST = 0.2
"""Share of right edits that a habit is shown and does not learn."""
NEWEST = 500
"""Sessions of which the share of right work is taken."""
OVERTIME_S = 300.0
"""Time beyond the day for which people still come, until planted releases are decided; no figure counts it."""


@dataclass(slots=True, kw_only=True)
class DayState:
    """What a day has done so far; in ``OUT/state.json``."""

    file: Path
    seconds_served: float = 0.0
    """Of the day; counts on where it stopped."""
    planted: dict[str, int] = field(default_factory=dict)
    """Kind of bad weights → the version that they became."""

    @classmethod
    def read(cls, file: Path) -> "DayState":
        """The state of a day that goes on, or of one that begins."""
        stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return cls(file=file, **stored)

    def write(self) -> None:
        """Keep it."""
        text = json.dumps({"seconds_served": self.seconds_served, "planted": self.planted})
        self.file.write_text(text, encoding="utf-8")


def main() -> int:
    """Run one day, or print what several came to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=VARIANTS, default="live", help="the recipe, or an ablation of it")
    parser.add_argument("--recipe", type=Path, default=HERE)
    parser.add_argument("--out", type=Path, help="a folder that keeps the day (default: runs/VARIANT-sSEED)")
    parser.add_argument("--day-s", type=float, default=720.0, help="seconds from going live to the evening's end")
    parser.add_argument("--rate", type=float, default=26.0, help="sessions a second at noon")
    parser.add_argument("--people", type=int, default=600)
    parser.add_argument("--page-port", type=int, default=0, help="serve the page for real users there")
    parser.add_argument("--no-plants", action="store_true", help="propose no bad weights")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--expected", nargs="+", type=Path, metavar="OUT", help="print expected.json of days that ran")
    options = parser.parse_args()
    if options.expected:
        days = [json.loads((out / "day.json").read_text(encoding="utf-8")) for out in options.expected]
        print(json.dumps({"rise": over_seeds(days), "days": days}, indent=1))
        return 0
    out = options.out or Path("runs") / f"{options.variant}-s{options.seed}"
    out.mkdir(parents=True, exist_ok=True)
    figures = run_day(out, options)
    print(json.dumps({name: value for name, value in figures.items() if name not in ("curve", "moves")}, indent=1))
    return 0


def run_day(out: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run what is left of a day; returns its figures, which are also in ``OUT/day.json``."""
    state, run = DayState.read(out / "state.json"), LiveRun(out / "run")
    settings = [*VARIANTS[options.variant], *options.set]
    began_s = time.monotonic()
    with run.started(options.recipe, options.seed, settings):
        run.wait_until_live(START_S)
        to_live_s = time.monotonic() - began_s
        plan = PlantPlan(run, state, out, () if options.no_plants else PLANTS)
        with users(run, out / "truth.jsonl", state, options) as people:
            _pass_the_day(run, people, state, plan, options.day_s)
            run.wait_for(lambda: plan.is_decided, OVERTIME_S)
    moves = [
        ReleaseMove(unix_s=move.at, version=move.version, to=move.to_state, planted=planted_as(state, move.version))
        for move in run.moves()
    ]
    figures: dict[str, object] = {
        "variant": options.variant,
        "seed": options.seed,
        "date": date_utc(),
        "commit": source_commit(),
        "machine": describe_machine(),
        "seconds_to_live": round(to_live_s, 1),
        "seconds_live": round(state.seconds_served, 1),
        **day_figures(read_truth(out / "truth.jsonl"), moves),
        "moves": [
            {"at": move.at, "version": move.version, "to": move.to_state, "why": move.reason} for move in run.moves()
        ],
        "config": load_recipe(out / "run" / "run.toml").model_dump(mode="json"),
    }
    (out / "day.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def planted_as(state: DayState, version: int) -> str:
    """``noise`` or ``habit`` for a version whose weights were planted; else empty."""
    return next((kind for kind, planted in state.planted.items() if planted == version), "")


def _pass_the_day(
    run: LiveRun, people: subprocess.Popen[bytes], state: DayState, plan: "PlantPlan", day_s: float
) -> None:
    """Look after the run and the users until the day is over."""
    looked_s = time.monotonic()
    while state.seconds_served < day_s and people.poll() is None:
        run.check()
        plan.look()
        time.sleep(POLL_S)
        now_s = time.monotonic()
        state.seconds_served += now_s - looked_s
        looked_s = now_s
        state.write()
    if people.poll() not in (None, 0):
        raise SystemExit("day: the program of the users failed: its output is above")


@contextmanager
def users(run: LiveRun, truth: Path, state: DayState, options: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    """The program of the users, while the context is open."""
    command = [
        sys.executable, str(HERE / "users"), "--url", run.url, "--truth", str(truth), "--seed", str(options.seed),
        "--overtime-s", str(OVERTIME_S), "--day-s", str(options.day_s),
        "--begun-s", str(state.seconds_served), "--rate", str(options.rate),
        "--people", str(options.people), "--page-port", str(options.page_port),
    ]  # fmt: skip
    process = subprocess.Popen(command, env={**os.environ, "ETUDE_PRODUCT_KEY": run.key})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


class PlantPlan:
    """Proposes bad weights when their time has come, one after another, and knows what became of them."""

    def __init__(self, run: LiveRun, state: DayState, out: Path, plants: Sequence[tuple[str, int, str]]) -> None:
        self._run = run
        self._state = state
        self._out = out
        self._plants = plants
        self._making: tuple[str, subprocess.Popen[bytes]] | None = None

    @property
    def is_decided(self) -> bool:
        """True once every planted release has come to its end."""
        ends = self._run.states()
        return all(ends.get(version) in ("rejected", "rolled_back", "released", "superseded")
                   for version in self._state.planted.values())  # fmt: skip

    def look(self) -> None:
        """Take the next step, if it is time for one."""
        if self._making is not None:
            self._finish()
        elif (due := self._due()) is not None:
            place = self._out / f"planted-{due}-{time.time_ns()}"
            command = [sys.executable, str(HERE / "plant.py"), str(self._run.path), due, str(place),
                       "--version", str(self._run.released_version()), "--right", str(self._right())]  # fmt: skip
            self._making = (due, subprocess.Popen(command))
            self._place = place

    def _right(self) -> float:
        """Share of right edits to show: a habit is to be as good as what users have, and imitation loses some."""
        newest = read_truth(self._out / "truth.jsonl")[-NEWEST:]
        return min(1.0, sum(row.solved for row in newest) / len(newest) + LOST)

    def _due(self) -> str | None:
        if not self.is_decided:
            return None
        released = self._run.released_count()
        for kind, after, _ in self._plants:
            if kind not in self._state.planted:
                return kind if released >= after else None
        return None

    def _finish(self) -> None:
        assert self._making is not None
        kind, process = self._making
        if process.poll() is None:
            return
        self._making = None
        if process.returncode:
            raise SystemExit(f"day: {kind} could not be made: the output of plant.py is above")
        self._state.planted[kind] = self._run.propose(self._place)
        self._state.write()
        print(f"day: planted {kind} as version {self._state.planted[kind]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
