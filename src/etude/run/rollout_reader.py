"""Reads rollouts for people: `etude show`, the page and exports use it.

    ledger ──▶ a group ──▶ its texts, and the batch that it alone would make ──▶ ReadRollout ──▶ text or JSON

Advantages, masks and weights are not computed a second time here: the group passes through the same functions that make
the trainer's batches, and their results are read for each turn. This module owns that composition;
:mod:`etude.dashboard.rollouts` defines the types, :mod:`etude.ledger.archive` the search. Read-only, and safe while the
run is in progress.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from etude.config.recipe import RunConfig
from etude.config.training import ClippedOptions
from etude.dashboard.rollouts import (
    ReadCall,
    ReadComparison,
    ReadPart,
    ReadRollout,
    ReadSummary,
    ReadToken,
    ReadTurn,
)
from etude.errors import DamagedError, UserError
from etude.harnesses.actions import read_calls
from etude.harnesses.contexts import Recall
from etude.harnesses.summaries import read_summary
from etude.ledger.archive import Archive, RolloutMatch, Search
from etude.ledger.changes import LIVE, TRAIN
from etude.ledger.states import GroupState
from etude.rewards.score import penalty, trained_value
from etude.rewards.transcript import SpokenTurn
from etude.run.batches import compared_group
from etude.run.detokenize import decoder, turn_reader
from etude.run.file_changes import FileChanges
from etude.run.folder import RunFolder
from etude.run.judge_votes import votes_about
from etude.run.process_name import TRAINER
from etude.run.stores import open_payloads
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventReader
from etude.tokens.chat import read_tokenizer
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatMessage, Tool
from etude.trainer.batching.advantage import group_weight
from etude.trainer.batching.baselines import LiveComparison
from etude.trainer.batching.batch import build_batch
from etude.trainer.batching.turn_spans import Place, places
from etude.types import AnswerChecks, Floats, Group, Mask, Rollout, Task, Trajectory, Turn, TurnKind

if TYPE_CHECKING:
    from etude.run.rescoring import Rescoring

MOST_ATTEMPTS = 100_000
"""Upper limit for the rollouts of one group: more than any group has."""
PAYLOADS_GONE = (
    "their routes and sampling masks are deleted, as always after a step is committed; their mismatch is computed with "
    "the trainer's own routes, over the whole vocabulary"
)


ANY_TOOL = Tool(name="any")
"""Placeholder for the tools that a harness offered, which are not recorded: with it, a chat format parses calls."""


class RunWords:
    """A run's chat format and recipe, which turn token ids into text. One instance serves readers in any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self.config = folder.config()
        self.chat = load_format(folder.model, self.config.gateway.chat_template_kwargs)
        self.tokenizer = read_tokenizer(folder.model)
        self.decode = decoder(self.chat)
        self.read_turns = turn_reader(self.chat)

    def reply(self, turn: Turn) -> ChatMessage:
        """The reply of a turn, with reasoning and calls separated as far as the chat format marks them."""
        reader = self.chat.reader([ANY_TOOL], prompt_ids=turn.prompt_ids)
        reader.feed(turn.completion_ids.tolist())
        reader.finish()
        return reader.message()


class RolloutReader:
    """Reads the rollouts of one run.

    ``tokens`` includes every sampled token, ``mismatches`` also their mismatch, which takes a forward pass of the model
    for each weight version.
    """

    def __init__(
        self,
        folder: RunFolder,
        archive: Archive,
        *,
        tokens: bool = False,
        mismatches: bool = False,
        words: RunWords | None = None,
    ) -> None:
        self._folder = folder
        self._archive = archive
        self._words = words or RunWords(folder)
        self._config = self._words.config
        self._with_tokens = tokens
        self._rescoring = _rescoring(folder, self._config) if mismatches else None

    def rollout(self, rollout_id: str) -> ReadRollout:
        """A rollout by its id or a prefix of it. Raises :class:`~etude.errors.UserError`."""
        match, rollout = self._archive.rollout(rollout_id)
        return self._read(match, rollout, self._credit(match.purpose, match.group))

    def group(self, purpose: str, index: int, slot: int | None = None) -> Iterator[ReadRollout]:
        """Every attempt of a group, or of one slot, in order. Raises :class:`~etude.errors.UserError`."""
        credit = self._credit(purpose, index)
        graded = {rollout.rollout_id: rollout for rollout in credit.group.rollouts}
        search = Search(purpose=purpose, group=index, slot=slot, limit=MOST_ATTEMPTS)
        attempts = self._archive.find(search)[::-1]
        if not attempts:
            where = f"group {index} of purpose {purpose!r}" + ("" if slot is None else f", slot {slot}")
            raise UserError(f"no rollout of {where} has ended: `etude show RUN --limit 20` lists the newest that have")
        for match in attempts:
            rollout = graded.get(match.rollout_id) or self._archive.rollout(match.rollout_id)[1]
            yield self._read(match, rollout, credit)

    def _credit(self, purpose: str, index: int) -> "_CreditView":
        try:
            state = self._archive.state_of(purpose, index)  # read before the rollouts: it may end in between
            group = self._archive.group(purpose, index)
        except ValueError as error:
            states = ", ".join(census.purpose for census in self._archive.census())
            raise UserError(f"{error}; its purposes are {states or 'none yet'}, choose with --purpose") from error
        return _credit_of(group, purpose, state, self._step_tokens(purpose, index), self._config)

    def _step_tokens(self, purpose: str, index: int) -> int | None:
        """The loss tokens of the optimiser step that used a group; ``None`` until that is done."""
        step = self._archive.step_of(purpose, index)
        events = (logged.event for logged in EventReader(self._folder.events, str(TRAINER)).new() if step is not None)
        done = {event.step: int(event.metrics["loss_tokens"]) for event in events if isinstance(event, StepDone)}
        return None if step is None else done.get(step)

    def _read(self, match: RolloutMatch, rollout: Rollout, credit: "_CreditView") -> ReadRollout:
        rollout, lost = self._fetched(rollout) if self._with_tokens else (_without_payloads(rollout), [])
        differences, untold = self._rescoring.differences(rollout) if self._rescoring else (None, [])
        task, branch = credit.group.task, rollout.branch
        changes = FileChanges(task.files)
        spoken = self._words.read_turns(rollout.turns)
        turns = tuple(self._turns(rollout, spoken, credit, changes, differences))
        return ReadRollout(
            rollout_id=rollout.rollout_id,
            purpose=match.purpose,
            group=match.group,
            slot=match.slot,
            attempt=match.attempt,
            step=match.step,
            group_state=credit.state,
            task_id=task.task_id,
            epoch=credit.group.epoch,
            template=task.template,
            prompt=task.prompt,
            files=changes.files(),
            status=rollout.status,
            reason=rollout.reason,
            reward=rollout.reward,
            parts=_parts(rollout.reward_parts, self._config),
            counts=rollout.counts,
            seconds=rollout.seconds,
            verdict=rollout.verdict,
            votes=votes_about(self._folder, self._config, task, spoken),
            branch_of=None if branch is None else branch.rollout_id,
            branch_turns=0 if branch is None else branch.turns,
            comparison=credit.comparisons.get(rollout.rollout_id),
            turns=turns,
            notes=(*(credit.notes if rollout.turns else ()), *self._distilled(rollout, credit), *lost, *untold),
            observed=self._archive.observed([task.task_id]).get(task.task_id) if match.purpose == LIVE else None,
        )

    def _turns(
        self,
        rollout: Rollout,
        spoken: Sequence[SpokenTurn],
        credit: "_CreditView",
        changes: FileChanges,
        differences: Sequence[Floats] | None,
    ) -> Iterator[ReadTurn]:
        turns = rollout.turns
        trajectories = credit.trajectories.get(rollout.rollout_id, ())
        placed = places(turns, trajectories)
        hints = {hint.turn: hint for hint in rollout.hints}
        for number, (turn, words) in enumerate(zip(turns, spoken, strict=True)):
            weights = _credited(turn, placed[number], trajectories) if credit.is_known else None
            reply = self._words.reply(turn)
            yield ReadTurn(
                number=number,
                kind=turn.kind,
                continues=words.continues,
                heard=words.heard,
                said=words.text,
                thinking=reply.thinking,
                content=reply.content,
                calls=tuple(_calls(turn, reply, words, changes)),
                finish=turn.finish,
                temperature=turn.temperature,
                prompt_tokens=len(turn.prompt_ids),
                new_tokens=len(turn.prompt_ids) - _known_tokens(turns, words),
                sampled_tokens=len(turn.completion_ids),
                versions=dict(sorted(Counter(turn.versions.tolist()).items())),
                reward=rollout.turn_rewards[number] if rollout.turn_rewards else None,
                hint=hints.get(number),
                advantage=None if weights is None else weights.first,
                loss_tokens=None if weights is None else int(weights.loss_mask_C.sum()),
                summary=_summary(number, turns, spoken, credit.group.task),
                tokens=tuple(self._tokens(turn, weights, None if differences is None else differences[number]))
                if self._with_tokens
                else None,
            )

    def _distilled(self, rollout: Rollout, credit: "_CreditView") -> Iterator[str]:
        """Notes on the distillation from hints, with or without a reward signal."""
        if rollout.hints and rollout.rollout_id in credit.comparisons:
            yield f"the loss of hinted turns, by hints.weight = {self._config.hints.weight:g}, comes on top"

    def _fetched(self, rollout: Rollout) -> tuple[Rollout, list[str]]:
        """The rollout with its routes and sampling masks, as far as they still exist."""
        if all(turn.payload is None for turn in rollout.turns):
            return rollout, []
        try:
            return replace(rollout, turns=open_payloads(self._folder).fetch(rollout.turns)), []
        except DamagedError:
            gone = sum(turn.payload is not None for turn in rollout.turns)
            turns = tuple(replace(turn, payload=None) for turn in rollout.turns)
            return replace(rollout, turns=turns), [f"{gone} turns: {PAYLOADS_GONE}"]

    def _tokens(self, turn: Turn, weights: "_TurnWeights | None", differences_C: Floats | None) -> Iterator[ReadToken]:
        """Every sampled token of a turn."""
        sizes_C = None if turn.sampling_mask is None else turn.sampling_mask.sizes.tolist()
        first = len(turn.prompt_ids) - 1  # the row from which the first token was sampled
        for index, token_id in enumerate(turn.completion_ids.tolist()):
            row = None if turn.routes is None or first + index < 0 else turn.routes[first + index]
            difference = np.nan if differences_C is None else float(differences_C[index])
            text = self._words.decode(turn.completion_ids[index : index + 1])
            yield ReadToken(
                token_id=token_id,
                text=text or self._words.tokenizer.id_to_token(token_id) or "",
                logprob=float(turn.logprobs[index]),
                version=int(turn.versions[index]),
                mismatch=None if np.isnan(difference) else difference,
                kept=(sizes_C[index] or None) if sizes_C else None,
                routes=None if row is None else tuple(tuple(layer) for layer in row.tolist()),
                advantage=None if weights is None else float(weights.advantages_C[index]),
                has_loss=None if weights is None else bool(weights.loss_mask_C[index]),
            )


class _TurnWeights(NamedTuple):
    """Weights of a turn's sampled tokens in the loss."""

    advantages_C: Floats
    loss_mask_C: Mask

    @property
    def first(self) -> float:
        """The advantage of the turn's tokens; 0 for a turn without tokens."""
        return float(self.advantages_C[0]) if len(self.advantages_C) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreditView:
    """The credit that the trainer assigns in a group."""

    group: Group
    state: GroupState
    is_known: bool
    """True if the trainer uses, or will use, the group."""
    comparisons: Mapping[str, ReadComparison]
    """By rollout."""
    trajectories: Mapping[str, Sequence[Trajectory]]
    """By rollout, as in the batch."""
    notes: tuple[str, ...]


def _rescoring(folder: RunFolder, config: RunConfig) -> "Rescoring":
    from etude.run.rescoring import Rescoring

    return Rescoring(folder, config)


def _credit_of(
    group: Group, purpose: str, state: GroupState, step_tokens: int | None, config: RunConfig
) -> _CreditView:
    group = replace(group, rollouts=tuple(_without_payloads(rollout) for rollout in group.rollouts))
    compared = compared_group(group, config)
    trained = [rollout for rollout in compared.rollouts if not rollout.is_quarantined]
    why = _why_untrained(purpose, state, trained)
    if why:
        return _unknown_credit(group, state, f"not trained on: {why}")
    baseline = config.loss.baseline
    penalties = {rollout.rollout_id: penalty(rollout, config.effort) for rollout in trained}
    try:
        batch = build_batch(1, [compared], baseline, penalties, config.credit, LiveComparison(baseline="none"))
    except ValueError as error:  # recorded under another recipe
        return _unknown_credit(group, state, f"advantages are unknown: {error}")
    trajectories: dict[str, list[Trajectory]] = {}
    for trajectory in batch.trajectories:
        trajectories.setdefault(trajectory.rollout_id, []).append(trajectory)
    weight = compared.weight * group_weight(
        baseline, compared=len(trained), graded=len(group.rollouts), lost=group.lost
    )
    comparisons = {
        rollout.rollout_id: ReadComparison(
            penalty=penalties[rollout.rollout_id],
            compared=trained_value(rollout, penalties[rollout.rollout_id]),
            rollouts=len(trained),
            quarantined=len(group.rollouts) - len(trained),
            lost=group.lost,
            weight=weight,
            has_signal=bool(batch.trajectories),
            step_tokens=step_tokens,
        )
        for rollout in trained
    }
    notes = tuple(_provisos(len(trained), state, config, is_live=group.is_live))
    return _CreditView(
        group=group, state=state, is_known=True, comparisons=comparisons, trajectories=trajectories, notes=notes
    )


def _unknown_credit(group: Group, state: GroupState, note: str) -> _CreditView:
    return _CreditView(group=group, state=state, is_known=False, comparisons={}, trajectories={}, notes=(note,))


def _why_untrained(purpose: str, state: GroupState, trained: Sequence[Rollout]) -> str:
    """Explain why a group has no gradient; empty if it has, or will have, one."""
    if purpose not in (TRAIN, LIVE):
        return "of an evaluation"
    if state is GroupState.DROPPED:
        return "its group was dropped"
    return "" if trained else "nothing of its group can be compared"


def _provisos(trained: int, state: GroupState, config: RunConfig, *, is_live: bool) -> Iterator[str]:
    """Notes on facts that advantages and loss tokens do not show."""
    loss = config.loss
    if is_live and config.live.baseline != "none":
        yield f"advantages are without live.baseline = {config.live.baseline!r}, which needs all sessions of the step"
    if state is GroupState.OPEN:
        yield f"its group is open: advantages and loss tokens would be these if it ended now, with {trained} compared"
    if config.effort.weight and loss.baseline == "mean_std":
        yield "the penalty is subtracted from the advantage: loss.baseline = 'mean_std' divides only rewards"
    if loss.reference_beta:
        yield (f"advantages are without loss.reference_beta = {loss.reference_beta:g}: that penalty needs the "
               f"reference's weights")  # fmt: skip
    clip = loss.kind if isinstance(loss.options, ClippedOptions) else "none"
    deciding = {"kind": clip, "correction": loss.correction, "sequence_mask": loss.sequence_mask}
    weighing = ", ".join(f"{key} = {value!r}" for key, value in deciding.items() if value != "none")
    if weighing:
        yield (f"loss tokens are counted without their weights: for these, [loss] {weighing} needs the trainer's "
               f"log-probabilities in its step")  # fmt: skip


def _without_payloads(rollout: Rollout) -> Rollout:
    return replace(rollout, turns=tuple(replace(turn, payload=None) for turn in rollout.turns))


def _credited(turn: Turn, place: Place | None, trajectories: Sequence[Trajectory]) -> _TurnWeights:
    """Advantage and loss mask of a turn's sampled tokens."""
    if place is None:
        sampled = len(turn.completion_ids)
        return _TurnWeights(np.zeros(sampled, np.float32), np.zeros(sampled, np.bool_))
    trajectory, where = trajectories[place[0]], place[1]
    return _TurnWeights(trajectory.advantages[where], trajectory.loss_mask[where])


def _calls(turn: Turn, reply: ChatMessage, words: SpokenTurn, changes: FileChanges) -> Iterator[ReadCall]:
    """The calls of a turn, as marked by its chat format or, without marks, as parsed from its text."""
    if turn.kind is TurnKind.SUMMARY:
        return
    spelt = read_calls(reply.content) if not reply.tool_calls else []
    for tool, arguments in [*((call.name, _arguments(call.arguments)) for call in reply.tool_calls), *spelt]:
        path, diff = changes.call(tool, arguments, words.answered)
        yield ReadCall(tool=tool, arguments=arguments, path=path, diff=diff)


def _arguments(text: str) -> dict[str, str]:
    """Arguments by name, each as text; a single one without a name if they are not an object."""
    try:
        fields = json.loads(text)
        return {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    except (ValueError, AttributeError, RecursionError):
        return {"": text}


def _known_tokens(turns: Sequence[Turn], spoken: SpokenTurn) -> int:
    """Count the tokens of a turn's context that an earlier turn had."""
    if spoken.continues is None:
        return 0
    return turns[spoken.continues].length


def _summary(number: int, turns: Sequence[Turn], spoken: Sequence[SpokenTurn], task: Task) -> ReadSummary | None:
    """Describe the summary of a turn's context, if the turn summarised it."""
    if turns[number].kind is not TurnKind.SUMMARY:
        return None
    summary = read_summary(spoken[number].text)
    begun = next((later for later in range(number + 1, len(turns)) if spoken[later].continues is None), None)
    facts = task.checks.facts if isinstance(task.checks, AnswerChecks) else ()
    heard = [turn.heard for turn in spoken[: number + 1]]
    return ReadSummary(
        scratch=summary.scratch,
        text=summary.text,
        tokens_before=len(turns[number].prompt_ids),
        tokens_after=None if begun is None else len(turns[begun].prompt_ids),
        facts={fact: _has_fact(fact, heard, summary.text) for fact in facts},
    )


def _has_fact(fact: str, heard: Sequence[str], summary: str) -> bool | None:
    """Return whether a summary has a fact, by the harness's own check; ``None`` if the fact had not
    been shown before.
    """
    recall = Recall([fact])
    for text in heard:
        recall.show(text)
    recall.summarise(summary)
    return bool(recall.recalled) if recall.seen else None


def _parts(recorded: Mapping[str, float], config: RunConfig) -> tuple[ReadPart, ...]:
    """The recorded numbers; those that the recipe adds up come first."""
    worth = {part.name: part.contribution(recorded[part.name]) for part in config.reward.parts if part.name in recorded}
    sources = {part.name: part.source for part in config.reward.parts}
    parts = [
        ReadPart(name=name, value=value, worth=worth.get(name), source=sources.get(name, ""))
        for name, value in recorded.items()
    ]
    return tuple(sorted(parts, key=lambda part: part.worth is None))
