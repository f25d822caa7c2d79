"""Hints as lessons: what the trainer makes of those that came with a batch.

    groups ──Rollout.hints──▶ the hint in the turn's context ──▶ Course ──▶ one optimiser step

Wiring only: the place of a hint is :mod:`etude.tokens.reminders`', the loss :mod:`etude.trainer.distillation`'s. Needs
no text but the hint's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from etude.config.recipe import RunConfig
from etude.models.checkpoint import load_spec
from etude.models.flops import pair_flops, token_flops
from etude.models.spec import ModelSpec
from etude.run.folder import RunFolder
from etude.run.hints import reminders_of
from etude.tokens.jinja import load_format
from etude.tokens.reminders import Reminders
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.credit import own_turns
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.distillation import Course, Lesson
from etude.types import NO_ROUTE, Group, Rollout, Trajectory, Turn, TurnKind


class CoursePlan:
    """Makes the lessons of every batch of a run."""

    def __init__(self, config: RunConfig, spec: ModelSpec, reminders: Reminders) -> None:
        self._cost = Cost(per_token=token_flops(spec), per_pair=pair_flops(spec))
        self._max_tokens = config.trainer.microbatch_tokens * config.parallel.cp
        self._with_summaries = config.credit.summaries == "train"
        self._reminders = reminders

    @classmethod
    def open(cls, config: RunConfig, folder: RunFolder) -> "CoursePlan | None":
        """That of a run; ``None`` where it has no hints. Raises as :func:`reminders_of` does."""
        if not config.hints.weight:
            return None
        chat = load_format(folder.model, config.gateway.chat_template_kwargs)
        return cls(config, load_spec(folder.model), reminders_of(chat))

    def course(self, groups: Sequence[Group], *, shares: int) -> Course:
        """The lessons of a batch, whether its groups have a signal or not, dealt out evenly.

        What is quarantined teaches nothing, and a turn that rollouts share teaches once. Payloads of turns must have
        been fetched.
        """
        lessons = tuple(lesson for group in groups for lesson in self._lessons(group))
        if not lessons:
            return Course()
        lengths = [len(lesson.teacher.token_ids) for lesson in lessons]
        dealt = pack(lengths, max_tokens=self._max_tokens, ranks=shares, cost=self._cost)
        return Course(lessons=lessons, shares=tuple(map(tuple, dealt)))

    def _lessons(self, group: Group) -> Iterator[Lesson]:
        trusted = [rollout for rollout in group.rollouts if not rollout.is_quarantined]
        for rollout, own_T in zip(trusted, own_turns(trusted), strict=True):
            for hint in rollout.hints:
                is_trained = self._with_summaries or rollout.turns[hint.turn].kind is TurnKind.ACT
                if own_T[hint.turn] and is_trained:
                    yield lesson_of(rollout, hint.turn, hint.text, self._reminders)


def lesson_of(rollout: Rollout, turn: int, hint: str, reminders: Reminders) -> Lesson:
    """One turn as it was sampled, and the same with a hint in its context.

    Of the routes those of the tokens before the hint are kept: nobody has read the others with it before them.
    """
    sampled = rollout.turns[turn]
    prompt_ids, routes = reminders.insert(sampled.prompt_ids, hint), None
    if sampled.routes is not None:
        place, read = reminders.place(sampled.prompt_ids), len(prompt_ids) + len(sampled.completion_ids) - 1
        routes = np.full((read, *sampled.routes.shape[1:]), NO_ROUTE, np.uint16)
        routes[:place] = sampled.routes[:place]
    hinted = replace(sampled, prompt_ids=prompt_ids, routes=routes)
    return Lesson(student=_alone(rollout, sampled), teacher=_alone(rollout, hinted))


def _alone(rollout: Rollout, turn: Turn) -> Trajectory:
    """The token view of a single turn."""
    by_itself = replace(rollout, turns=(turn,), turn_rewards=(), hints=(), branch=None)
    (trajectory,) = build_trajectories(by_itself, 0.0)
    return trajectory
