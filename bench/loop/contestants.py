"""The contestants of `bench loop`, their recipes, and the results of a run; nothing here runs anything."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import UserError
from etude.run.folder import RunFolder
from etude.types import Json

ASYNCHRONOUS, SYNCHRONOUS, TRL = "asynchronous", "synchronous", "trl"
STALENESS = 1
"""Weight versions that a token of the asynchronous contestant may be old, as in the quickstart. With 2, and this
learning rate, one of four runs collapsed (``docs/training.md``).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One way to run the loop."""

    name: str
    max_staleness: int
    threads: int
    """CPU threads of the engine and of the trainer; of TRL, in which both are one."""


CONTESTANTS = (
    Contestant(name=ASYNCHRONOUS, max_staleness=STALENESS, threads=1),
    Contestant(name=SYNCHRONOUS, max_staleness=0, threads=1),
    Contestant(name=f"{SYNCHRONOUS}-all-cores", max_staleness=0, threads=2),
    Contestant(name=TRL, max_staleness=0, threads=2),
)
"""Everyone, ours first."""
QUICK: Mapping[str, Json] = {
    "midtrain": {"tokens": 40_000},
    "rollouts": {"groups_per_step": 4, "group_size": 4, "concurrency": 16},
}
"""Recipe changes for a quick run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Options of the measurement."""

    contestants: tuple[str, ...] = tuple(contestant.name for contestant in CONTESTANTS)
    steps: int = 60
    """Optimiser steps of each."""
    marks: int = 6
    """Versions of each whose held-out pass rate is measured, at even distances; 0 measures speed alone."""
    tasks: int = 256
    """Held-out tasks."""
    recipe: Mapping[str, Json] = field(default_factory=dict)
    """Changes from the default recipe, for all contestants."""

    def __post_init__(self) -> None:
        names = tuple(contestant.name for contestant in CONTESTANTS)
        if unknown := sorted(set(self.contestants) - set(names)):
            raise UserError(f"bench loop: no contestant {unknown[0]!r}; there are {', '.join(names)}")
        if min(self.steps, self.tasks) < 1 or not 0 <= self.marks <= self.steps:
            raise UserError(f"bench loop: {self.marks} marks in {self.steps} steps on {self.tasks} tasks: too few")

    @property
    def chosen(self) -> tuple[Contestant, ...]:
        """Contestants that take part."""
        return tuple(contestant for contestant in CONTESTANTS if contestant.name in self.contestants)

    @property
    def marked(self) -> tuple[int, ...]:
        """The weight versions that are measured, the last one among them."""
        return tuple(round(self.steps * mark / self.marks) for mark in range(1, self.marks + 1))


def loop_options(
    contestants: tuple[str, ...] | None = None,
    *,
    steps: int | None = None,
    marks: int | None = None,
    quick: bool = False,
) -> LoopOptions:
    """Options of a call; ``None`` stands for the default. Raises :class:`~etude.errors.UserError` for invalid options.

    A quick call checks that everything runs, not its speed.
    """
    usual = LoopOptions(steps=2, marks=1, tasks=8, recipe=QUICK) if quick else LoopOptions()
    steps = usual.steps if steps is None else steps
    return replace(
        usual,
        contestants=contestants or usual.contestants,
        steps=steps,
        marks=min(usual.marks, steps) if marks is None else marks,
    )


def recipe(contestant: Contestant, options: LoopOptions) -> RunConfig:
    """The quickstart's sizes for everybody. The mismatch probe is off: what it computes, others do not."""
    tree: dict[str, dict[str, object]] = {
        "rollouts": {"max_staleness": contestant.max_staleness, "concurrency": 128},
        "engine": {"max_running": 128, "options": {"threads": contestant.threads}},
        "trainer": {"steps": options.steps, "threads": contestant.threads, "mismatch_share": 0.0},
        "eval": {"enabled": False, "tasks": options.tasks},
    }
    for section, values in options.recipe.items():
        assert isinstance(values, dict)
        tree[section] = tree.get(section, {}) | values
    return parse_config({"name": "bench-loop", **tree}, source="bench loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A weight version whose held-out pass rate is measured."""

    version: int
    """In the run's weight store."""
    step: int
    """After which it was published."""
    seconds: float
    """After the start at which it could be sampled from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestantRun:
    """Results of a contestant's run."""

    contestant: Contestant
    folder: RunFolder | None = None
    """Its weight versions."""
    steps: int = 0
    rollouts: int = 0
    seconds: float = 0.0
    """Seconds of all steps; mid-training, start and evaluation are excluded."""
    signal_tokens: int = 0
    """Tokens that were trained on and belong to groups whose rewards differ: others have no gradient."""
    busy_trainer: float | None = None
    busy_engine: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase → share of the time. Where phases overlap, which is the point of asynchrony, they add up to more than 1."""
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """Process → CPU seconds per step."""
    staleness_max: float | None = None
    marks: tuple[Mark, ...] = ()
    """Ascending."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    missing: str | None = None
    """Why it could not run."""

    @property
    def rollouts_per_s(self) -> float | None:
        """Trained rollouts per second."""
        return self.rollouts / self.seconds if self.seconds else None

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        row: dict[str, Json] = {
            "contestant": self.contestant.name,
            "threads": self.contestant.threads,
            "missing": self.missing,
        }
        if self.missing is not None:
            return row
        return row | {
            "case": f"{self.steps} steps of {self.rollouts // max(1, self.steps)} rollouts",
            "rollouts_per_s": _rounded(self.rollouts_per_s),
            "trained_tokens_per_s": _rounded(self.signal_tokens / self.seconds if self.seconds else None),
            "busy_trainer": _rounded(self.busy_trainer),
            "busy_engine": _rounded(self.busy_engine),
            "phases": {phase: round(share, 3) for phase, share in self.phases.items()},
            "cpu_s_per_step": {process: round(seconds, 3) for process, seconds in self.cpu_s.items()},
            "staleness_max": self.staleness_max,
            "seconds": round(self.seconds, 1),
            "settings": dict(self.settings),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
