"""The laboratory of `bench science`: a whole run in one process, in which staleness and mismatch are set exactly.

    weights of s steps ago ──▶ native engine ──▶ completions ──graded──▶ groups ──▶ batch ──▶ PolicyTrainer ──┐
             ▲                                                                                                │
             └───────────── the last s + 1 published states, the oldest serves ◀──────────────────────────────┘

Engine, sampler, grader, penalties, batches, losses, optimiser and published states are the product's own, and a trial
is one of its recipes. What is left out is what makes a run take minutes and its order a matter of chance: processes,
HTTP, sandboxes, ledger, weight log. So every trained token is exactly ``rollouts.max_staleness`` versions old (fewer
only while there are not as many), and trials of one seed have the same start, the same prompts in the same order, and
the same random numbers for each of their rollouts.

``router_noise`` perturbs what the engine serves: its routers are off by the same normal noise at every version, so
large a share of their own spread, as those of an engine are that computes otherwise.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from etude.aio import background_task
from etude.config.recipe import RunConfig
from etude.config.rollouts import SingleTurnOptions
from etude.engines.native.engine import NativeEngine, Weights
from etude.models.checkpoint import load_checkpoint, load_spec, load_state
from etude.models.spec import ModelSpec
from etude.protocols import HarnessResult, SamplingParams
from etude.rewards.graders.answers import SUBMITTED, AnswerGrader
from etude.rollouts.fake import FakeSandbox
from etude.run.batches import batch_of
from etude.run.numerics import decoded_state, load_published, published_state, serving_model, training_model
from etude.run.penalties import Penalties
from etude.run.resolve import resolve
from etude.run.task_families import open_family
from etude.run.trainer import scored, totals_of
from etude.run.trainer_group import rate_schedule
from etude.tokens.chat import ChatTemplate
from etude.tokens.messages import ChatMessage
from etude.trainer.batching.build import build_trajectories
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.mismatch import MismatchProbe
from etude.trainer.optimisation import Optimisation, build_optimiser
from etude.trainer.policy import PolicyTrainer
from etude.trainer.reference import Reference
from etude.types import Finish, Group, Rollout, RolloutStatus, Split, Task, Turn

ROUTER: Final = ".mlp.gate.weight"
"""End of the names of routers in a published state."""
NOISE_SEED = 0
"""Seed of that noise, the same at every version and in every trial: an engine differs in one fixed way."""
SEED_BYTES = 7
"""Bytes of a digest that seed a call, whose seed has 63 bits."""
HELDOUT = 0
"""Stands for the step of held-out rollouts in their places."""
GREEDY_SHARE = 4
"""One in N held-out tasks is also tried greedily, since that says less about the optimised quantity."""
Place: TypeAlias = tuple[int, int, int]
"""Step, group and slot of a rollout."""
Question: TypeAlias = tuple[Task, Place]
Published: TypeAlias = tuple[int, Mapping[str, Tensor]]
"""A weight version and its published state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A weight version on held-out tasks."""

    step: int
    sampled: float
    """Pass rate at temperature 1."""
    greedy: float
    tokens: float
    """Mean length of a sampled answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCurve:
    """The course of one trial."""

    heldout: tuple[Measurement, ...]
    rewards: tuple[float, ...]
    """Mean reward of each step's rollouts."""
    entropy: float
    """Nats per token, in the last step that had any to train on."""
    masked: float
    """Share of loss tokens without a gradient, the mean over steps."""
    k3: float
    """Mismatch of trainer and engine on the same weights, in the last step; 0 where both compute the same."""
    seconds: float


def learn(config: RunConfig, start: Path, *, router_noise: float = 0.0) -> TrialCurve:
    """Train the model in ``start`` by the recipe; evaluate every ``eval.every_steps`` steps, at the start and at the
    end.
    """
    return asyncio.run(Laboratory(resolve(config), start, router_noise).learn())


@final
class Laboratory:
    """A run of a resolved recipe."""

    def __init__(self, config: RunConfig, start: Path, router_noise: float) -> None:
        torch.set_num_threads(config.trainer.threads)
        self._config = config
        self._family = open_family(config)
        spec, state = load_checkpoint(start)
        self._cost = Cost.of_model(spec)
        model, scorer = (training_model(spec, config.numerics, "cpu") for _ in range(2))
        load_state(model, state)
        trainer = config.trainer
        optimiser = build_optimiser(model, config.optimiser, learning_rate=trainer.learning_rate, betas=trainer.betas)
        optimisation = Optimisation(model, optimiser, rate_schedule(trainer), clip_norm=trainer.clip_norm)
        self._trainer = PolicyTrainer(optimisation, config.loss, config.numerics)
        self._versions = config.rollouts.max_staleness + 1
        self._published: deque[Published] = deque(maxlen=self._versions)
        self._probe = MismatchProbe.alone(scorer, config.numerics, versions=self._versions)
        self._publish(0)
        self._reference = self._open_reference(spec)
        self._penalties = Penalties(config, self._reference if config.loss.reference_beta else None)
        self.sampler = Sampler(config, start, router_noise)
        """The engine's side."""

    async def learn(self) -> TrialCurve:
        """Take all steps."""
        started_s = time.monotonic()
        heldout, rewards, masked = [], [], []
        entropy, k3, steps = 0.0, 0.0, self._config.trainer.steps
        async with background_task(self.sampler.engine.run()):
            heldout.append(await self._measure(0))
            for step in range(1, steps + 1):
                groups = await self.groups(step)
                k3 = self._mismatch(groups) if step == steps else k3
                metrics = self.train(step, groups)
                rewards.append(float(np.mean([rollout.reward for group in groups for rollout in group.rollouts])))
                masked.append(metrics.get("masked_share", 0.0))
                entropy = metrics.get("entropy", entropy)
                if step == steps or step % (self._config.eval.every_steps or steps) == 0:
                    heldout.append(await self._measure(step))
        return TrialCurve(
            heldout=tuple(heldout),
            rewards=tuple(rewards),
            entropy=entropy,
            masked=float(np.mean(masked)),
            k3=k3,
            seconds=time.monotonic() - started_s,
        )

    def _publish(self, version: int) -> None:
        """Remember the weights as they are."""
        numerics = self._config.numerics
        state = {name: tensor.clone() for name, tensor in published_state(self._trainer.model, numerics).items()}
        self._published.append((version, state))
        self._probe.remember(version, decoded_state(state, numerics))

    def _open_reference(self, spec: ModelSpec) -> Reference | None:
        """The start, where the recipe measures how far the policy is from it."""
        if not self._config.loss.needs_reference:
            return None
        (_, state), numerics = self._published[0], self._config.numerics
        return Reference.alone(training_model(spec, numerics, "cpu"), decoded_state(state, numerics), numerics)

    async def groups(self, step: int) -> list[Group]:
        """The groups of a step, sampled by the oldest version that is remembered."""
        published = self._published[0]
        await self.sampler.serve(published)
        count, size = self._config.rollouts.groups_per_step, self._config.rollouts.group_size
        first = (step - 1) * count
        tasks = [self._task(first + place) for place in range(count)]
        questions = [(task, (step, place, slot)) for place, task in enumerate(tasks) for slot in range(size)]
        rollouts = await self.sampler.rollouts(questions)
        return [
            Group(
                index=first + place,
                task=task,
                admitted_version=published[0],
                rollouts=tuple(rollouts[place * size : (place + 1) * size]),
            )
            for place, task in enumerate(tasks)
        ]

    def _task(self, index: int) -> Task:
        """Training task number ``index``; repeats in epochs if their number is finite."""
        size = self._family.size(Split.TRAIN)
        return self._family.task(Split.TRAIN, index if size is None else index % size)

    def _mismatch(self, groups: Sequence[Group]) -> float:
        """k3 of trainer and engine with the weights that sampled."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trajectories = [trajectory for rollout in rollouts for trajectory in build_trajectories(rollout, 0.0)]
        return self._probe.measure(trajectories, max_tokens=self._config.trainer.microbatch_tokens).total.k3

    def train(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Take an optimiser step, and remember the weights that it ends with."""
        batch = batch_of(step, groups, self._penalties.of(groups), self._config)
        trajectories = scored(batch, self._config, self._probe, self._reference)
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        (passes,) = pack(lengths, max_tokens=self._config.trainer.microbatch_tokens, ranks=1, cost=self._cost)
        microbatches = [[trajectories[index] for index in one] for one in passes]
        metrics = self._trainer.step(step, microbatches, totals_of(batch))
        self._publish(step)
        return metrics

    async def _measure(self, step: int) -> Measurement:
        """The newest version on held-out tasks, with the same random numbers at every step."""
        await self.sampler.serve(self._published[-1])
        tasks = [self._family.task(Split.HELDOUT, index) for index in range(self._config.eval.tasks)]
        questions = [(task, (HELDOUT, place, 0)) for place, task in enumerate(tasks)]
        sampled = await self.sampler.rollouts(questions)
        greedy = await self.sampler.rollouts(questions[::GREEDY_SHARE], temperature=0.0)
        return Measurement(
            step=step,
            sampled=_pass_rate(sampled),
            greedy=_pass_rate(greedy),
            tokens=float(np.mean([len(rollout.turns[0].completion_ids) for rollout in sampled])),
        )


@final
class Sampler:
    """An engine, and the grader of its answers."""

    def __init__(self, config: RunConfig, start: Path, router_noise: float) -> None:
        assert isinstance(config.harness.options, SingleTurnOptions), "the laboratory asks once"
        self._config = config
        self._max_tokens = config.harness.options.max_tokens_per_turn
        self._router_noise = router_noise
        self._chat = ChatTemplate.load(start)
        self._model = serving_model(load_spec(start), config.numerics, "cpu")
        self._routes = config.numerics.replay != "off"
        weights = Weights(self._model, 0, "")
        self.engine = NativeEngine(weights, config.engine, seed=config.seed, record_routes=self._routes)
        self._grader, self._sandbox = AnswerGrader(), FakeSandbox({}, lambda closed: None)

    async def serve(self, published: Published) -> None:
        """Sample with a version from now on; nothing is being sampled."""
        version, state = published
        load_published(self._model, perturbed(state, self._router_noise), self._config.numerics)
        await self.engine.swap(Weights(self._model, version, ""))

    async def rollouts(self, questions: Sequence[Question], temperature: float = 1.0) -> list[Rollout]:
        """A graded answer to each task."""
        return await asyncio.gather(*(self._rollout(task, place, temperature) for task, place in questions))

    async def _rollout(self, task: Task, place: Place, temperature: float) -> Rollout:
        """One answer; its place seeds it."""
        name = "-".join(map(str, place))
        digest = hashlib.sha256(f"{self._config.seed}|{name}".encode()).digest()
        params = SamplingParams(
            max_tokens=self._max_tokens,
            temperature=temperature,
            stop_ids=self._chat.stop_ids,
            seed=int.from_bytes(digest[:SEED_BYTES], "big"),
            want_routes=self._routes,
        )
        prompt_ids = self._chat.open([ChatMessage(role="user", content=task.prompt)])
        sampled = await self.engine.generate(prompt_ids, params, session=name)
        reason = SUBMITTED if sampled.finish is Finish.STOP else str(sampled.finish)
        answer = self._chat.decode(sampled.token_ids.tolist())
        grade = await self._grader.grade(task, self._sandbox, HarnessResult(reason=reason, counts={}, answer=answer))
        turn = Turn(
            prompt_ids=np.array(prompt_ids, np.int32),
            completion_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            finish=sampled.finish,
            temperature=temperature,
            routes=sampled.routes,
        )
        return Rollout(
            rollout_id=name,
            group_index=place[1],
            slot=place[2],
            attempt=0,
            status=RolloutStatus.GRADED,
            reward=grade.value,
            reason=reason,
            turns=(turn,),
        )


def perturbed(state: Mapping[str, Tensor], noise: float) -> Mapping[str, Tensor]:
    """A published state whose routers are off by normal noise, ``noise`` times as wide as they are themselves."""
    if not noise:
        return state
    drawn = torch.Generator().manual_seed(NOISE_SEED)
    return {
        name: tensor + (noise * tensor.std() * torch.randn(tensor.shape, generator=drawn)).to(tensor.dtype)
        if name.endswith(ROUTER)
        else tensor
        for name, tensor in state.items()
    }


def _pass_rate(rollouts: Sequence[Rollout]) -> float:
    return float(np.mean([rollout.reward for rollout in rollouts]))
