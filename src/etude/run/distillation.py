"""Distillation examples of a batch: hinted turns in the form used for training.

    groups ──Rollout.hints──▶ the hint in the turn's context ──▶ DistillationBatch ──▶ one optimiser step

Wiring only: :mod:`etude.tokens.reminders` has the position of a hint, :mod:`etude.trainer.distillation` the loss. The
only text needed is the hint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from etude.config.recipe import RunConfig
from etude.models.checkpoint import load_spec
from etude.models.spec import ModelSpec
from etude.run.folder import RunFolder
from etude.run.hints import reminders_of
from etude.tokens.jinja import load_format
from etude.tokens.reminders import Reminders
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.credit import own_turns
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.distillation import DistillationBatch, DistillationExample
from etude.types import NO_ROUTE, Group, Rollout, Trajectory, Turn, TurnKind


class DistillationBatcher:
    """Makes the distillation examples of every batch of a run."""

    def __init__(self, config: RunConfig, spec: ModelSpec, reminders: Reminders) -> None:
        self._cost = Cost.of_model(spec)
        self._max_tokens = config.trainer.microbatch_tokens * config.parallel.cp
        self._with_summaries = config.credit.summaries == "train"
        self._reminders = reminders

    @classmethod
    def open(cls, config: RunConfig, folder: RunFolder) -> "DistillationBatcher | None":
        """The batcher of a run; ``None`` if it has no hints. Raises as :func:`reminders_of` does."""
        if not config.hints.weight:
            return None
        chat = load_format(folder.model, config.gateway.chat_template_kwargs)
        return cls(config, load_spec(folder.model, config.model.impl), reminders_of(chat))

    def distillation(self, groups: Sequence[Group], *, shares: int) -> DistillationBatch:
        """The examples of a batch, whether its groups have a signal or not, dealt out evenly.

        Quarantined rollouts are excluded, and a turn shared by rollouts is used once. Payloads of turns must have been
        fetched.
        """
        examples = tuple(example for group in groups for example in self._examples(group))
        if not examples:
            return DistillationBatch()
        lengths = [len(example.teacher.token_ids) for example in examples]
        dealt = pack(lengths, max_tokens=self._max_tokens, ranks=shares, cost=self._cost)
        return DistillationBatch(examples=examples, shares=tuple(map(tuple, dealt)))

    def _examples(self, group: Group) -> Iterator[DistillationExample]:
        trusted = [rollout for rollout in group.rollouts if not rollout.is_quarantined]
        for rollout, own_T in zip(trusted, own_turns(trusted), strict=True):
            for hint in rollout.hints:
                is_trained = self._with_summaries or rollout.turns[hint.turn].kind is TurnKind.ACT
                if own_T[hint.turn] and is_trained:
                    yield distillation_example(rollout, hint.turn, hint.text, self._reminders)


def distillation_example(rollout: Rollout, turn: int, hint: str, reminders: Reminders) -> DistillationExample:
    """One sampled turn, and the same with a hint in its context.

    Only the routes of tokens before the hint are kept: the engine did not read the others after it.
    """
    sampled = rollout.turns[turn]
    prompt_ids, routes = reminders.insert(sampled.prompt_ids, hint), None
    if sampled.routes is not None:
        place, read = reminders.place(sampled.prompt_ids), len(prompt_ids) + len(sampled.completion_ids) - 1
        routes = np.full((read, *sampled.routes.shape[1:]), NO_ROUTE, np.uint16)
        routes[:place] = sampled.routes[:place]
    hinted = replace(sampled, prompt_ids=prompt_ids, routes=routes)
    return DistillationExample(student=_alone(rollout, sampled), teacher=_alone(rollout, hinted))


def _alone(rollout: Rollout, turn: Turn) -> Trajectory:
    """The token view of a single turn."""
    by_itself = replace(rollout, turns=(turn,), turn_rewards=(), hints=(), branch=None)
    (trajectory,) = build_trajectories(by_itself, 0.0)
    return trajectory
