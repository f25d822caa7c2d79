"""Survey of a package's tests before any change: stable passes, and the functions that each reaches.

Pure: observations in, a :class:`Survey` out. It excludes flaky tests: a test counts only if it passed in every run, in
every order and with every hash seed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from etude.taskgen.failures import NoTestsError, TestsFailError
from etude.taskgen.testruns import RunObservation

MIN_PASSING = 5
"""Minimum tests that pass every time; with fewer, no tasks are made."""
MIN_PASSING_SHARE = 0.5
MAX_TEST_S = 10.0
"""Maximum duration of a test; a slower one is left out."""
MAX_ID = 200
"""Maximum characters of a node id; some contain whole documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A package's tests and the functions that they reach."""

    stable: Mapping[str, float]
    """Node id → seconds, for tests that passed every time."""
    flaky: tuple[str, ...]
    """Tests that passed in some runs only."""
    failing: tuple[str, ...]
    """Tests that never passed."""
    skipped: int
    unfit: tuple[str, ...]
    """Tests that pass but take too long, or whose ids cannot be used on a command line."""
    broken: tuple[str, ...]
    """Test files that could not be collected."""
    reached: Mapping[str, tuple[str, ...]]
    """``path:line`` of a function → node ids; a file means all its tests, an empty string means all tests."""
    calls: Mapping[str, tuple[str, ...]]
    """``path:line`` of a function → argument lists as JSON."""

    def affected(self, functions: Iterable[str]) -> frozenset[str]:
        """The stable tests that reach any of the functions."""
        owners = {owner for function in functions for owner in self.reached.get(function, ())}
        if "" in owners:
            return frozenset(self.stable)
        return frozenset(test for test in self.stable if test in owners or test.partition("::")[0] in owners)

    def seconds(self, tests: Iterable[str]) -> float:
        """The total duration of the tests."""
        return sum(self.stable[test] for test in tests)

    def encode(self) -> bytes:
        """The survey as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Survey":
        """The survey that :meth:`encode` wrote. Raises ``ValueError`` for anything else."""
        try:
            fields = json.loads(data)
            return cls(
                stable=fields["stable"],
                flaky=tuple(fields["flaky"]),
                failing=tuple(fields["failing"]),
                skipped=fields["skipped"],
                unfit=tuple(fields["unfit"]),
                broken=tuple(fields["broken"]),
                reached={name: tuple(owners) for name, owners in fields["reached"].items()},
                calls={name: tuple(calls) for name, calls in fields["calls"].items()},
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is not a survey: {error!r}") from error


def survey_of(runs: Sequence[RunObservation], watched: RunObservation) -> Survey:
    """Combine plain runs of the unchanged package and one observed run into a survey.

    Raises :class:`~etude.taskgen.failures.NoTestsError` if no run found a test, and
    :class:`~etude.taskgen.failures.TestsFailError` if too few pass every time or a run did not finish.
    """
    hung = [run for run in runs if run.ended]
    if hung:
        raise TestsFailError(
            f"a run of the tests ended with {hung[0].ended} after {hung[0].seconds:.0f} s: raise --timeout, or leave "
            "the tests that hang out of pytest's testpaths",
            log=hung[0].output,
        )
    tests = sorted({test for run in runs for test in run.tests})
    broken = tuple(sorted({file for run in runs for file, _ in run.errors}))
    log = "\n".join((*(why for _, why in runs[0].errors), runs[0].output))[-4000:]
    if not tests:
        raise NoTestsError(f"pytest found no test; {len(broken)} files could not be collected: {broken[:3]}", log=log)
    ran = [test for test in tests if any(test in run.tests and run.tests[test].status != "skipped" for run in runs)]
    passing = [test for test in ran if all(run.passed(test) for run in runs)]
    flaky = tuple(test for test in ran if test not in set(passing) and any(run.passed(test) for run in runs))
    if len(passing) < max(MIN_PASSING, MIN_PASSING_SHARE * len(ran)):
        raise TestsFailError(
            f"{len(passing)} of {len(ran)} tests pass every time ({len(flaky)} sometimes), at least {MIN_PASSING} and "
            "half of them must: mend the package or its requirements first",
            log=log,
        )
    seconds = {test: max(run.tests[test].seconds for run in runs) for test in passing}
    fit = {test: took for test, took in seconds.items() if took <= MAX_TEST_S and is_fit(test)}
    return Survey(
        stable=fit,
        flaky=flaky,
        failing=tuple(sorted(set(ran) - set(passing) - set(flaky))),
        skipped=len(tests) - len(ran),
        unfit=tuple(sorted(set(seconds) - set(fit))),
        broken=broken,
        reached={name: tuple(sorted(owners)) for name, owners in watched.reached.items()},
        calls=watched.calls,
    )


def is_fit(test: str) -> bool:
    """Return true if a node id can be used unchanged on a command line and in a report."""
    return len(test) <= MAX_ID and test.isascii() and test.isprintable() and "\\" not in test
