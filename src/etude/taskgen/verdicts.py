"""Verdicts on candidates: the evidence, and the first rule that a candidate violates.

    survey ──▶ before running? ──▶ quick run ──▶ worth building? ──▶ proof in the task's own image ──▶ kept

Pure; the validator (:mod:`~etude.taskgen.validator`) runs the tests. A task is kept only with hidden tests that, in
every run, fail in the agent's image and pass with the right answer.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Self

from etude.sandboxes.function_calls import same_value
from etude.taskgen.survey import Survey
from etude.taskgen.testruns import RunObservation
from etude.types import Case, Json

MAX_RUN_S = 30.0
"""Maximum total duration of the tests that reach the change."""
FOCUS_SHARE = 0.25
"""Maximum share of all tests that may fail; with more, the change is not a single feature."""
FOCUS_FEW = 4
"""Number of tests that may fail regardless of the share."""
MAX_ABOUT = 60
"""Maximum failing tests of a task; from more, a sample is drawn."""
OTHERS = 20
"""Maximum tests of a task that passed before and must still pass."""
FAR = 5
"""Maximum of these tests that do not reach the change."""
MAX_HIDDEN_BYTES = 1 << 20
"""Maximum total size of a task's hidden test files."""
PROBE_CASES = 12
QUIET_CASES = 4
"""Maximum cases of a probe that the broken package may also get right."""


class Rejection(StrEnum):
    """Reasons to reject a candidate, each with its meaning."""

    meaning: str
    """Text for people."""

    def __new__(cls, value: str, meaning: str) -> Self:
        """Create a member whose value is the string alone."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    UNREACHED = "unreached", "no test reaches it"
    SLOW = "slow", "the tests that reach it take too long"
    SURVIVED = "survived", "no test fails: the change does nothing, or no test looks"
    HANGS = "hangs", "with it, the tests do not end"
    UNFOCUSED = "unfocused", "too many tests fail"
    TWIN = "twin", "another task is about the same function and fails the same tests"
    LEAKS = "leaks", "the removed source can be found elsewhere in the image"
    UNPROBED = (
        "unprobed",
        "no call from outside tells the broken package from the right one; `--unprobed` lets it be a task",
    )
    UNGUARDED = (
        "unguarded",
        "it has no probe, and none of its tests can have a canary: no grader could tell right work from forged results",
    )
    TOO_LARGE = "too_large", "its hidden test files are too large"
    FLAKY = "flaky", "the broken package passes sometimes"
    INCOMPLETE = "incomplete", "the part of a change never passes its own tests: it needs more of the change"
    UNSOLVED = "unsolved", "the right answer does not pass every time"
    UNTESTED = "untested", "the change has no source, or no test that is there before and after could tell"
    VAGUE = "vague", "nothing says in a line what the change is for"
    TOO_WIDE = "too_wide", "the change has too many lines to be one task"
    FAILED = "failed", "the sandbox failed, or the right answer ran out of time; tried again by the next build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Outcomes of the runs in the task's own image."""

    about: tuple[str, ...]
    """Hidden tests that fail in the agent's image and pass with the right answer, every time."""
    others: tuple[str, ...]
    """Tests that pass in both."""
    rejection: Rejection | None = None


def refuse_unrun(survey: Survey, affected: Collection[str]) -> Rejection | None:
    """The reason to reject a candidate before any run, if there is one."""
    if not affected:
        return Rejection.UNREACHED
    return Rejection.SLOW if survey.seconds(affected) > MAX_RUN_S else None


def judge_quick(
    survey: Survey, affected: Collection[str], seen: RunObservation
) -> tuple[frozenset[str], Rejection | None]:
    """The stable tests that a change breaks, and the reason to reject it, if there is one."""
    if seen.ended == "timeout":
        return frozenset(), Rejection.HANGS
    fails = frozenset(test for test in affected if not seen.passed(test))
    if not fails:
        return fails, Rejection.SURVIVED
    if len(fails) > max(FOCUS_FEW, FOCUS_SHARE * len(survey.stable)):
        return fails, Rejection.UNFOCUSED
    return fails, None


def choose_tests(
    survey: Survey, affected: Collection[str], fails: Collection[str], hidden: Collection[str], seed: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests of a task: failing hidden ones, and passing ones, those that reach the change first."""
    rng = Random(seed)
    about = sorted(hidden)
    if len(about) > MAX_ABOUT:
        about = sorted(rng.sample(about, MAX_ABOUT))
    near = sorted(set(affected) - set(fails))
    far = sorted(set(survey.stable) - set(affected))
    rng.shuffle(near)
    rng.shuffle(far)
    return tuple(about), tuple([*near, *far[:FAR]][:OTHERS])


def prove(
    about: Sequence[str], others: Sequence[str], broken: Sequence[RunObservation], right: Sequence[RunObservation]
) -> Proof:
    """Check the runs in the task's image, with and without the reference solution, against the rules."""
    if any(seen.ended for seen in right):
        is_slow = any(
            seen.ended == "timeout" for seen in right
        )  # the machine, not the task: the survey was fast enough
        return Proof(about=(), others=(), rejection=Rejection.FAILED if is_slow else Rejection.UNSOLVED)
    if any(seen.ended == "timeout" for seen in broken):
        return Proof(about=(), others=(), rejection=Rejection.HANGS)
    solved = [test for test in about if all(seen.passed(test) for seen in right)]
    sure = tuple(test for test in solved if not any(seen.passed(test) for seen in broken))
    steady = tuple(test for test in others if all(seen.passed(test) for seen in (*broken, *right)))
    rejection = None
    if not solved:
        rejection = Rejection.UNSOLVED
    elif not sure:
        rejection = Rejection.FLAKY
    return Proof(about=sure, others=steady, rejection=rejection)


def probe_cases(
    calls: Sequence[Sequence[Json]], right: Sequence[RunObservation], broken: Sequence[RunObservation]
) -> tuple[Case, ...]:
    """Calls whose plain result is the same in every right package; those that a broken package gets wrong are first.

    Empty if no call distinguishes the two.
    """
    telling: list[Case] = []
    quiet: list[Case] = []
    for index, arguments in enumerate(calls):
        results = [_result(seen, index) for seen in right]
        if results[0][0] and all(_same(result, results[0]) for result in results):
            case = Case(arguments=tuple(arguments), expected=results[0][1])
            differs = all(not _same(_result(seen, index), results[0]) for seen in broken)
            (telling if differs else quiet).append(case)
    if not telling:
        return ()
    return (
        (*telling, *quiet[:QUIET_CASES])[:PROBE_CASES] if len(telling) < PROBE_CASES else tuple(telling[:PROBE_CASES])
    )


def _result(seen: RunObservation, index: int) -> tuple[bool, Json]:
    return seen.results[index] if index < len(seen.results) else (False, seen.ended or "no result")


def _same(one: tuple[bool, Json], other: tuple[bool, Json]) -> bool:
    return one[0] == other[0] and same_value(one[1], other[1])
