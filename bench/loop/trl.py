"""étude's side of TRL's run in `bench loop`: environments and grades for it, and the times of its steps.

    trl_worker.py ──reset, act──▶ a sandbox each, the tools of the built-in harness
                  ──grade──▶ the hidden tests
                  ──step, saved──▶ times, weight versions

So TRL's rollouts run in the same sandboxes as étude's and are graded by the same code. TRL calls tools one after the
other, so sandboxes are mostly idle here; a whole batch is graded concurrently.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, final

from bench.loop.contestants import Contestant, ContestantRun, LoopOptions, Mark, recipe
from bench.trl_environment import open_rival, trl_python
from etude.config.recipe import RunConfig
from etude.config.rollouts import CodingOptions
from etude.errors import InfrastructureError, UserError
from etude.harnesses import tools
from etude.harnesses.coding import observe
from etude.models.checkpoint import load_checkpoint
from etude.protocols import HarnessResult, Sandbox
from etude.rewards.graders.answers import SUBMITTED
from etude.rewards.graders.functions import HiddenTests
from etude.rollouts.task_order import TaskOrder
from etude.run.export import export_run
from etude.run.folder import RunFolder, start_from
from etude.run.process_name import TRAINER
from etude.run.publishing import WeightPublishing
from etude.run.task_families import open_family
from etude.run.weight_log import open_log
from etude.sandboxes.local.provider import LocalSandboxes
from etude.telemetry.log import EventLog
from etude.trainer.optimisation import RateSchedule
from etude.types import Json, Task

SILENCE_S = 900.0
"""Longest time between two messages of TRL, its longest step included."""
DRAWS = 20
"""Draws for each expected task: far more than a family needs that sometimes repeats a task."""


@dataclass(slots=True)
class _Step:
    """TRL's report of one step."""

    clock_s: float
    seconds: float
    generate_s: float
    sandbox_s: float
    signal_tokens: int


@dataclass(slots=True)
class _Environment:
    """The environment of a rollout."""

    task: Task
    sandbox: Sandbox


@final
@dataclass(slots=True)
class Environments:
    """The environments of TRL's rollouts; answers its requests."""

    tasks: Sequence[Task]
    sandboxes: LocalSandboxes
    grader: HiddenTests = field(default_factory=HiddenTests)
    open: dict[int, _Environment] = field(default_factory=dict)
    """TRL's number → environment: one for each rollout of a batch, reused in the next."""

    async def answer(self, question: Mapping[str, Json]) -> dict[str, Json]:
        """The answer to ``reset``, ``act`` or ``grade``."""
        match question["verb"]:
            case "reset":
                await self._reset(cast("int", question["environment"]), cast("int", question["task"]))
                return {}
            case "act":
                environment = self.open[cast("int", question["environment"])]
                call = tools.parse_call(str(question["call"]))
                return {"observation": await observe(call, environment.task.checks, environment.sandbox)}
            case "grade":
                replies = cast("list[tuple[int, str, bool]]", question["replies"])
                return {"rewards": list(await asyncio.gather(*(self._grade(*reply) for reply in replies)))}
            case verb:
                raise InfrastructureError(f"TRL's program sent an unknown request {verb!r}")

    async def _reset(self, number: int, task: int) -> None:
        if number in self.open:
            await self.open[number].sandbox.close()
        chosen = self.tasks[task]
        self.open[number] = _Environment(task=chosen, sandbox=await self.sandboxes.create(chosen.files))

    async def _grade(self, number: int, reply: str, ended: bool) -> float:
        """The reward of a rollout, which counts as submitted if its last reply submits."""
        submits = ended and isinstance(tools.parse_call(reply), tools.Submit)
        result = HarnessResult(reason=SUBMITTED if submits else "turns", counts={})
        environment = self.open[number]
        return (await self.grader.grade(environment.task, environment.sandbox, result)).value


def run_trl(contestant: Contestant, options: LoopOptions, start: RunFolder, out: Path) -> ContestantRun:
    """Train ``start``'s version 0 with TRL; the marked versions are in the run folder of the result.

    If TRL is missing or fails, the result has the reason.
    """
    out.mkdir()
    try:
        return asyncio.run(_run(contestant, options, start, out))
    except InfrastructureError as error:
        return ContestantRun(contestant=contestant, missing=str(error))


async def _run(contestant: Contestant, options: LoopOptions, start: RunFolder, out: Path) -> ContestantRun:
    python, config = trl_python(), recipe(contestant, options)
    tasks = training_tasks(config)
    setup = _setup(contestant, options, start, out, tasks)
    steps: list[_Step] = []
    settings: dict[str, Json] = {}
    log = out / "trl.log"
    async with (
        open_rival("loop.trl_worker", setup, python=python, threads=contestant.threads, log=log) as rival,
        _sandboxes(config) as sandboxes,
    ):
        environments = Environments(tasks=tasks, sandboxes=sandboxes)
        while (message := await rival.receive(SILENCE_S)) is not None:
            match message["verb"]:
                case "ready":
                    settings = cast("dict[str, Json]", message["settings"])
                case "step":
                    steps.append(_step(message))
                    sys.stderr.write(f"trl: step {len(steps)} took {steps[-1].seconds:.1f} s\n")
                case _:
                    await rival.answer(await environments.answer(message))
    if len(steps) < options.steps:
        raise InfrastructureError(f"TRL ended after {len(steps)} of {options.steps} steps")
    folder = _published(options, config, start, out)
    return _outcome(contestant, config, steps, settings, folder, _marks(options, steps))


def training_tasks(config: RunConfig) -> list[Task]:
    """The distinct tasks of all steps, in the order in which étude admits them.

    Raises :class:`~etude.errors.UserError` if the family has too few.
    """
    order, drawn = TaskOrder(open_family(config), seed=config.seed), dict[str, Task]()
    expected = config.trainer.steps * config.rollouts.groups_per_step
    for index in range(DRAWS * expected):
        task = order.draw(index).task
        drawn.setdefault(task.task_id, task)
        if len(drawn) == expected:
            return list(drawn.values())
    raise UserError(f"bench loop: {DRAWS * expected} draws gave {len(drawn)} tasks of {expected}: lower --steps")


@contextlib.asynccontextmanager
async def _sandboxes(config: RunConfig) -> AsyncIterator[LocalSandboxes]:
    """The sandboxes of a recipe with ``sandboxes.kind = "local"``."""
    sandboxes = LocalSandboxes()
    try:
        yield sandboxes
    finally:
        await sandboxes.close()


def _setup(
    contestant: Contestant, options: LoopOptions, start: RunFolder, out: Path, tasks: Sequence[Task]
) -> dict[str, Json]:
    """The settings of TRL's program, which knows nothing of étude."""
    config = recipe(contestant, options)
    model, prompts = out / "start", out / "prompts.json"
    export_run(start, model, 0)
    prompts.write_text(json.dumps([task.prompt for task in tasks]), encoding="utf-8")
    trainer, harness = config.trainer, config.harness.options
    assert isinstance(harness, CodingOptions)
    schedule = RateSchedule(steps=trainer.steps, warmup_steps=trainer.warmup_steps, decay_share=trainer.decay_share)
    return {
        "model": str(model),
        "prompts": str(prompts),
        "out": str(out),
        "checkpoints": list(options.marked),
        "seed": config.seed,
        "threads": contestant.threads,
        "steps": trainer.steps,
        "rollouts": config.rollouts.rollouts_per_step,
        "group_size": config.rollouts.group_size,
        "max_turns": harness.max_turns,
        "max_tokens_per_turn": harness.max_tokens_per_turn,
        "max_length": config.engine.max_length,
        "learning_rate": trainer.learning_rate,
        "rate_shares": [schedule.share(step) for step in range(1, trainer.steps + 1)],
        "betas": list(trainer.betas),
        "clip_norm": trainer.clip_norm,
        "submit": tools.SUBMIT,
    }


def _step(message: Mapping[str, Json]) -> _Step:
    values = {name: value for name, value in message.items() if isinstance(value, int | float)}
    return _Step(
        clock_s=values["clock_s"],
        seconds=values["seconds"],
        generate_s=values["generate_s"],
        sandbox_s=values["sandbox_s"],
        signal_tokens=int(values["signal_tokens"]),
    )


def _published(options: LoopOptions, config: RunConfig, start: RunFolder, out: Path) -> RunFolder:
    """A run folder whose versions after 0 are the saved checkpoints, in order."""
    folder = RunFolder.create(out / "run", config)
    start_from(start, folder)
    log = open_log(folder)
    with EventLog(folder.events, str(TRAINER)) as events, WeightPublishing(log, config.name, events) as publishing:
        for version, step in enumerate(options.marked, 1):
            _, state = load_checkpoint(out / f"step-{step}")
            publishing.start(state, version)
            publishing.land()
    return folder


def _marks(options: LoopOptions, steps: Sequence[_Step]) -> tuple[Mark, ...]:
    return tuple(
        Mark(version=version, step=step, seconds=steps[step - 1].clock_s)
        for version, step in enumerate(options.marked, 1)
    )


def _outcome(
    contestant: Contestant,
    config: RunConfig,
    steps: Sequence[_Step],
    settings: Mapping[str, Json],
    folder: RunFolder,
    marks: tuple[Mark, ...],
) -> ContestantRun:
    seconds = steps[-1].clock_s
    shares = {
        "generate": sum(step.generate_s for step in steps) / seconds,
        "sandbox": sum(step.sandbox_s for step in steps) / seconds,
    }
    training = sum(step.seconds for step in steps) / seconds - sum(shares.values())
    return ContestantRun(
        contestant=contestant,
        folder=folder,
        steps=len(steps),
        rollouts=len(steps) * config.rollouts.rollouts_per_step,
        seconds=seconds,
        signal_tokens=sum(step.signal_tokens for step in steps),
        busy_trainer=training,
        busy_engine=shares["generate"],
        phases=shares | {"train": training},
        marks=marks,
        settings=settings,
    )
