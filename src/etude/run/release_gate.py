"""The measurements of the release gate: evaluations in a separate process, and intervals from their results.

    python -m etude.run.release_gate RUN VERSION [SUITE] ──▶ evaluations/vNNNNNN-….db ──▶ paired intervals ──▶ GateFacts

An evaluation serves its version from its own engine and gateway (:mod:`etude.run.evaluate`), so users never wait for
it. Tries are stored: the released version is tried once, and an interrupted gate continues. Every attempt retries
missing tries; those that stay missing are counted and excluded from the intervals.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from etude.config.release import ReleaseConfig, SuiteConfig
from etude.dashboard.evaluation import Try
from etude.dashboard.statistics import Estimate, difference_of, mean_of
from etude.errors import EtudeError, UserError
from etude.ledger.ledger import Ledger
from etude.models.checkpoint import load_spec
from etude.releases.gate import Against, GateFacts, Interval, MissingTries
from etude.releases.states import Release
from etude.run.evaluate import (
    EvalRequest,
    evaluate,
    evaluation_ledger,
    last_failure,
    ledger_of_tries,
    read_evaluation,
)
from etude.run.folder import RunFolder
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent

ATTEMPTS = 3
"""Maximum attempts for an evaluation that does not finish."""
PARITY = "parity"
"""The ledger fact of an evaluation: ``1`` if engine and trainer computed the same numbers, ``0`` if not, empty if they
could not be compared.
"""
MODULE = "etude.run.release_gate"
NO_SUITE = ""
ERROR_PREFIX = "etude: "
"""Prefix of the line with which an evaluation's process reports its failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One evaluation that a gate needs."""

    release: Release
    suite: SuiteConfig | None

    @property
    def name(self) -> str:
        """Name of the evaluation in the evidence."""
        return f"suite {self.suite.name}" if self.suite else "held-out tasks"

    def request(self, config: ReleaseConfig) -> EvalRequest:
        """The request for this evaluation."""
        return request_of(config, self.release.version, self.suite)

    def place(self, folder: RunFolder, config: ReleaseConfig) -> Path:
        """Its ledger, which depends on the weights, the suite and the reward's definition."""
        return evaluation_ledger(folder, self.request(config), self.release.version, self.release.digest)


@final
@dataclass(slots=True)
class GateMeasurements:
    """The evaluations of a run's gates: one at a time, each in a process that is killed if it takes too long."""

    folder: RunFolder
    config: ReleaseConfig
    _done: set[Path] = field(default_factory=set)
    """Ledgers of finished evaluations without missing tries."""

    async def measure(self, candidate: Release, live: Release | None) -> GateFacts:
        """Make the missing evaluations and compare. Raises :class:`~etude.errors.UserError` if something cannot be
        measured.
        """
        releases = (candidate,) if live is None else (candidate, live)
        measured = {
            (release, suite): await self._measured(Measurement(release=release, suite=suite))
            for release in releases
            for suite in (None, *self.config.suites)
        }
        return await asyncio.to_thread(self._facts, measured, candidate, live)

    async def _measured(self, measurement: Measurement) -> "_GateTries":
        """Make an evaluation unless it is done, and retry it if it fails or tries are missing; returns its tries."""
        place, log = measurement.place(self.folder, self.config), self.folder.logs / "release-gate.log"
        if place in self._done:
            return await asyncio.to_thread(self._read, measurement, place)
        tries, failure = _GateTries(), ""
        for _ in range(ATTEMPTS):
            failure = await self._attempt(measurement, log)
            tries = tries if failure else await asyncio.to_thread(self._read, measurement, place)
            if tries.is_whole:
                self._done.add(place)
                return tries
        if not tries.made:
            reason = tries.missing.reason if tries.missing else failure
            raise UserError(
                f"{measurement.name}: version {measurement.release.version} could not be measured in {ATTEMPTS} "
                f"attempts: {reason} (see {log})"
            )
        return tries

    async def _attempt(self, measurement: Measurement, log: Path) -> str:
        """Make an evaluation in a separate process; returns the reason if it did not finish in time."""
        suite = measurement.suite.name if measurement.suite else NO_SUITE
        program = (sys.executable, "-m", MODULE, str(self.folder.path), str(measurement.release.version), suite)
        # The child belongs to this process, not to the supervisor.
        environment = {name: value for name, value in os.environ.items() if name != SUPERVISOR_VARIABLE}
        with log.open("ab") as out:
            began = out.tell()
            child = await asyncio.create_subprocess_exec(*program, stdout=out, stderr=out, env=environment)
        try:
            async with asyncio.timeout(self.config.gate_timeout_s):
                status = await child.wait()
        except TimeoutError:
            return f"it takes more than release.gate_timeout_s = {self.config.gate_timeout_s:g}"
        finally:
            await _end(child)
        return "" if status == 0 else _last_line(log, began)

    def _read(self, measurement: Measurement, place: Path) -> "_GateTries":
        """All sampled tries so far, pass by pass, and the missing ones."""
        release, request = measurement.release, measurement.request(self.config)
        passes = read_evaluation(self.folder, request, release.version, release.digest).tries["sampled"]
        made, planned = [one for each in passes for one in each if one is not None], sum(map(len, passes))
        if len(made) == planned:
            return _GateTries(made=made)
        missing = MissingTries(
            evaluation=measurement.name,
            version=release.version,
            missing=planned - len(made),
            planned=planned,
            reason=last_failure(place, request.labels()["sampled"]),
        )
        return _GateTries(made=made, missing=missing)

    def _facts(
        self,
        measured: Mapping[tuple[Release, SuiteConfig | None], "_GateTries"],
        candidate: Release,
        live: Release | None,
    ) -> GateFacts:
        own = {suite: measured[candidate, suite].made for suite in (None, *self.config.suites)}
        everything = [one for tries in own.values() for one in tries]
        against = None
        if live is not None:
            theirs = {suite: measured[live, suite].made for suite in own}
            against = Against(
                reward=paired(theirs[None], own[None], _reward),
                cost_excess=paired(theirs[None], own[None], _sampled, self.config.max_cost_ratio),
                latency_excess=paired(theirs[None], own[None], _seconds, self.config.max_latency_ratio),
                suites={suite.name: paired(theirs[suite], own[suite], _reward) for suite in own if suite is not None},
            )
        return GateFacts(
            reward=_interval(mean_of([one.reward for one in own[None]], [_template(one) for one in own[None]])),
            tries=len(everything),
            cheats=sum(one.is_cheat for one in everything),
            parity=_parity(self.folder, candidate),
            against=against,
            missing=tuple(tries.missing for tries in measured.values() if tries.missing is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GateTries:
    """The tries of an evaluation."""

    made: Sequence[Try] = ()
    missing: MissingTries | None = None
    """``None`` if none are missing."""

    @property
    def is_whole(self) -> bool:
        """True if there are tries and none are missing."""
        return bool(self.made) and self.missing is None


def request_of(config: ReleaseConfig, version: int, suite: SuiteConfig | None) -> EvalRequest:
    """The evaluation of a version for a gate."""
    tasks = config.tasks if suite is None else suite.count
    return EvalRequest(version=version, tasks=tasks, passes=config.passes, greedy=False, suite=suite)


def _last_line(log: Path, began: int) -> str:
    """The last line that a process wrote to a log after position ``began``; for a failed process, the reason."""
    with log.open("rb") as file:
        file.seek(began)
        lines = file.read().decode(errors="replace").split("\n")
    return next(
        (line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.strip()), "it ended without a message"
    )


def paired(before: Sequence[Try], after: Sequence[Try], value: Callable[[Try], float], times: float = 1.0) -> Interval:
    """The mean over tasks of ``after`` − ``times`` · ``before``, over the tasks that both have tries of.

    Raises :class:`~etude.errors.UserError` if they have no task in common.
    """
    old, new = _by_task(before, value), _by_task(after, value)
    common = [task for task in new if task in old]
    if not common:
        raise UserError("the gate has no task that both versions were tried on: nothing can be compared")
    templates = {one.task_id: _template(one) for one in after}
    differences = difference_of(
        [times * old[task] for task in common], [new[task] for task in common], [templates[task] for task in common]
    )
    return _interval(differences)


def _by_task(tries: Sequence[Try], value: Callable[[Try], float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in tries:
        values.setdefault(one.task_id, []).append(value(one))
    return {task: sum(each) / len(each) for task, each in values.items()}


def _interval(estimate: Estimate) -> Interval:
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)


def _template(one: Try) -> str:
    return one.template or one.task_id


def _reward(one: Try) -> float:
    return one.reward


def _sampled(one: Try) -> float:
    return float(one.sampled_tokens)


def _seconds(one: Try) -> float:
    return one.seconds


def _parity(folder: RunFolder, release: Release) -> bool | None:
    with Ledger.open(ledger_of_tries(folder, release.version, release.digest)) as ledger:
        word = ledger.facts.get(PARITY)
    return None if not word else word == "1"


async def _end(child: asyncio.subprocess.Process) -> None:
    """End a running evaluation; its child processes end with it."""
    if child.returncode is None:
        child.terminate()
        try:
            async with asyncio.timeout(10.0):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


def main(arguments: Sequence[str]) -> int:
    """Make one evaluation; for the run's own tasks, also compare engine and trainer."""
    die_with_parent()  # otherwise it would run alongside the next release process's evaluation
    path, version, suite_name = arguments
    folder = RunFolder.open(Path(path))
    config = folder.config()
    suite = next((one for one in config.release.suites if one.name == suite_name), None)
    try:
        evaluation = evaluate(folder, request_of(config.release, int(version), suite))
        if suite is None:
            with Ledger.open(ledger_of_tries(folder, evaluation.version, evaluation.digest)) as ledger:
                if ledger.facts.get(PARITY) is None:
                    ledger.facts.set(PARITY, _compared(folder, int(version)))
    except EtudeError as error:
        sys.stderr.write(f"{ERROR_PREFIX}{error}\n")
        return 1
    return 0


def _compared(folder: RunFolder, version: int) -> str:
    """``1`` if engine and trainer agree on a version, ``0`` if not, empty if they cannot be compared."""
    from etude.run.numerics import frozen_base
    from etude.run.parity import LONGEST, check_parity
    from etude.run.weight_log import open_log
    from etude.weights.pull import pull
    from etude.weights.tensors import to_tensors

    config = folder.config()
    spec = load_spec(folder.model, config.model.impl)
    if config.engine.kind != "native" or spec.max_positions < LONGEST:
        return ""
    state = to_tensors(pull(open_log(folder), version).state)
    base = frozen_base(folder.model, config)
    return str(int(check_parity(spec, state, config.numerics, config.engine.device, base).passed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
