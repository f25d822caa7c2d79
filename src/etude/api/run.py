"""A run on disk, read from Python, even while it is in progress.

    run = etude.open("runs/quickstart-s0")
    run.steps().to_pandas().plot("step", "reward")

Owns the queries and returns records (:mod:`etude.api.records`). It does not change the folder; only
:func:`~etude.api.evaluation.evaluate` stores its results there.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import orjson

from etude.api.recipe import Recipe
from etude.api.records import Records, RolloutRecord, StepRecord, TurnRecord, WeightRecord
from etude.clock import date_utc
from etude.dashboard.report import build_report
from etude.dashboard.run_metrics import RunMetrics
from etude.errors import RunFolderError
from etude.ledger.archive import Archive, Order, RolloutMatch, RolloutOutcome, Search, Traits, parse_comparison
from etude.ledger.changes import TRAIN
from etude.run.detokenize import turn_reader
from etude.run.folder import RunFolder
from etude.run.machine_info import describe_machine, source_commit
from etude.run.process_name import TRAINER
from etude.run.stores import open_archive
from etude.run.weight_log import open_log
from etude.run.working_folder import open_run_folder
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventReader
from etude.tokens.jinja import load_format
from etude.types import Json, Rollout, WeightVersion

ALL = 2**31 - 1
"""A limit above the number of steps and rollouts of any run."""
NO_TRAITS = Traits(
    turns=0, summaries=0, hints=0, prompt_tokens=0, sampled_tokens=0, first_version=None, last_version=None, seconds=0.0
)
"""Placeholder for the traits of rollouts recorded by an older étude, whose traits require reading them."""

Outcome: TypeAlias = Literal["graded", "failed", "dropped", "quarantined"]


class Run:
    """A run folder. Each call reads its current state."""

    def __init__(self, path: Path | str) -> None:
        """``path`` is a run folder, or the URL of a run. Raises :class:`~etude.errors.RunFolderError` if there is
        none.
        """
        self._folder = open_run_folder(path, writes=False)

    def __repr__(self) -> str:
        return f"etude.open({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return Recipe.load(self._folder.config_file)

    def steps(self) -> Records[StepRecord]:
        """The committed optimiser steps, in order."""
        with self._archive() as archive:
            committed = archive.steps_done()
        return Records(StepRecord, committed_steps(self._folder, committed))

    def rollouts(
        self,
        *,
        purpose: str = TRAIN,
        reward: str = "",
        group: int | None = None,
        version: int | None = None,
        outcome: Outcome | None = None,
        limit: int | None = None,
    ) -> Records[RolloutRecord]:
        """The rollouts that meet all conditions, newest first.

        ``purpose`` is ``train`` or the label of an evaluation (:meth:`purposes`), ``reward`` a comparison such as
        ``">=0.5"``; ``version`` finds rollouts with tokens of that weight version, or of versions around it. Raises
        :class:`~etude.errors.ConfigError` for an invalid comparison.
        """
        search = Search(
            purpose=purpose,
            reward=parse_comparison(reward) if reward else None,
            group=group,
            version=version,
            outcome=None if outcome is None else RolloutOutcome(outcome),
            order=Order.NEWEST,
            limit=ALL if limit is None else limit,
        )
        with self._archive() as archive:
            return Records(RolloutRecord, (_record_of(match) for match in archive.find(search)))

    def turns(self, rollouts: Sequence[RolloutRecord] | RolloutRecord) -> Records[TurnRecord]:
        """Every turn of some rollouts, in their order. Each rollout is read as a whole, so pass only those that you
        need.

        Raises :class:`~etude.errors.UserError` for a rollout of another run.
        """
        read_turns = turn_reader(load_format(self._folder.model, self._folder.config().gateway.chat_template_kwargs))
        chosen = [rollouts] if isinstance(rollouts, RolloutRecord) else rollouts
        with self._archive() as archive:
            read = [archive.rollout(rollout.rollout_id)[1] for rollout in chosen]
        turns = (
            _turn_of(rollout, number, spoken.heard, spoken.text)
            for rollout in read
            for number, spoken in enumerate(read_turns(rollout.turns))
        )
        return Records(TurnRecord, turns)

    def purposes(self) -> dict[str, int]:
        """``train`` and the evaluations during the run, each with its number of graded rollouts."""
        with self._archive() as archive:
            return {each.purpose: each.outcomes[RolloutOutcome.GRADED] for each in archive.census()}

    def weights(self) -> Records[WeightRecord]:
        """The published weight versions, in order."""
        log = open_log(self._folder)
        records = (log.read(version) for version in log.versions())
        return Records(WeightRecord, (_weights_of(record) for record in records if record is not None))

    def report(self) -> Mapping[str, Json]:
        """The figures of the latest ``report.json``; if there is none yet, those of the run so far."""
        if self._folder.report_json.exists():
            written: dict[str, Json] = orjson.loads(self._folder.report_json.read_bytes())
            return written
        metrics = RunMetrics()
        for logged in EventReader(self._folder.events).new():
            metrics.add(logged)
        config, machine = self._folder.config(), describe_machine()
        return build_report(metrics, config, machine=machine, date=date_utc(), commit=source_commit())

    def _archive(self) -> Archive:
        return open_archive(self._folder)


def open_run(path: Path | str | Run) -> Run:
    """Open a run folder to read it. Raises :class:`~etude.errors.RunFolderError`."""
    return path if isinstance(path, Run) else Run(path)


def export(run: Run | Path | str, out: Path | str, *, version: int | None = None) -> int:
    """Write a weight version (default: the newest) as a Hugging Face checkpoint into ``out``; returns the version.

    Raises :class:`~etude.errors.RunFolderError` if ``out`` cannot be written or is not empty.
    """
    from etude.run.export import export_run  # imports torch

    return export_run(RunFolder.open(open_run(run).path, writes=False), Path(out), version)


def committed_steps(folder: RunFolder, committed: int, *, after: int = 0) -> Iterator[StepRecord]:
    """The steps of a run up to ``committed``, from their newest events, because a step may have been computed twice.
    For a run at a URL, steps are left out if their events were lost with a machine in the seconds before they are
    copied.
    """
    if committed <= after:
        return
    steps = {
        event.step: (logged.at_s, event)
        for logged in EventReader(folder.events, str(TRAINER)).new()
        if isinstance(event := logged.event, StepDone)
    }
    for step in range(after + 1, committed + 1):
        if step not in steps:
            if folder.url:
                continue
            raise RunFolderError(f"{folder.events} has no event of step {step}, which is committed: a file was removed")
        at_s, event = steps[step]
        yield StepRecord(
            step=step,
            at_s=at_s,
            reward=event.metrics.get("reward_mean"),
            metrics=event.metrics,
            reward_parts=event.reward_parts,
            ended=event.ended,
        )


def _record_of(match: RolloutMatch) -> RolloutRecord:
    traits = match.traits or NO_TRAITS
    return RolloutRecord(
        rollout_id=match.rollout_id,
        purpose=match.purpose,
        group=match.group,
        slot=match.slot,
        attempt=match.attempt,
        status=match.status.value,
        reward=match.reward,
        reason=match.reason,
        step=match.step,
        disposition=None if match.disposition is None else match.disposition.value,
        cause=match.cause,
        turns=traits.turns,
        summaries=traits.summaries,
        hints=traits.hints,
        prompt_tokens=traits.prompt_tokens,
        sampled_tokens=traits.sampled_tokens,
        first_version=traits.first_version,
        last_version=traits.last_version,
        seconds=traits.seconds,
    )


def _weights_of(record: WeightVersion) -> WeightRecord:
    return WeightRecord(
        version=record.version,
        step=record.step,
        kind=record.kind,
        base=record.base,
        size_bytes=record.size_bytes,
        digest=record.digest,
        created=record.created,
    )


def _turn_of(rollout: Rollout, number: int, new_text: str, completion: str) -> TurnRecord:
    turn = rollout.turns[number]
    return TurnRecord(
        rollout_id=rollout.rollout_id,
        group=rollout.group_index,
        slot=rollout.slot,
        turn=number,
        kind=turn.kind.value,
        reward=rollout.reward,
        new_text=new_text,
        completion=completion,
        finish=turn.finish.value,
        temperature=turn.temperature,
        prompt_ids=tuple(turn.prompt_ids.tolist()),
        completion_ids=tuple(turn.completion_ids.tolist()),
        logprobs=tuple(turn.logprobs.tolist()),
        versions=tuple(turn.versions.tolist()),
    )
