"""Checks of a recipe on this machine, before the run is created.

    recipe ──▶ judge ──▶ devices, ports ──▶ model ──▶ disk, memory ──▶ tasks, texts ──▶ session on a fake engine

The cheapest checks come first. The sections of the recipe define the requirements; this module checks them.
``--dry-run`` skips them, as its result depends only on the recipe and the tasks (:mod:`etude.run.task_plan`).
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from etude.aio import background_task, without_event_loop
from etude.clock import SystemClock
from etude.config.imitation import FILE_SOURCES
from etude.config.inference import SglangOptions, VllmOptions
from etude.config.judge import ModelJudgeOptions
from etude.config.recipe import RunConfig, has_drafts
from etude.config.rollouts import CommandOptions, VerifiersHarnessOptions
from etude.config.training import ModelShape
from etude.dashboard import formatting
from etude.engines.fake import FakeEngine
from etude.engines.sglang import server as sglang
from etude.engines.vllm import process as vllm
from etude.errors import ConfigError, DamagedError, JudgeUnavailable, UserError
from etude.models.checkpoint import StoredCheckpoint, load_spec, spec_from_shape
from etude.models.hf import make_causal_model
from etude.models.spec import ModelSpec
from etude.protocols import Completion, TaskFamily
from etude.rewards.graders.named import find_grader
from etude.run.disk_space import check_disk_space
from etude.run.draft_head import has_draft_head
from etude.run.endpoints import listeners, probe_ports
from etude.run.folder import RunFolder
from etude.run.gpus import count_gpus, divide_gpus, phase_gpus
from etude.run.judging import check_judge, check_key
from etude.run.memory_plan import check_memory
from etude.run.numerics import count_parameters
from etude.run.playing import Stage, play
from etude.run.resolve import check_devices, resolve, resolve_device
from etude.run.rollouts import harness_mounts
from etude.run.sinks import check_log
from etude.run.suite_trials import check_suites, trial_config
from etude.run.task_families import open_demonstrations
from etude.run.task_plan import open_tasks, plan_tasks
from etude.storage import free_bytes
from etude.tasks.corpora.texts import check_text
from etude.tasks.verifiers.process import OPEN_TIMEOUT_S
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import call_support, load_format
from etude.tokens.messages import NO_KWARGS, ChatFormat, TemplateKwargs
from etude.tokens.render_differences import rendered_differently
from etude.types import NamedChecks, Rollout, RolloutStatus, Split, Task, TokenIds

SESSION_CALLS = 5
"""Number of model calls after which a session passes: with random words an agent may continue forever."""
SESSION_S = 60.0
"""Longest time until a session's first model call, in addition to the start of an environment."""
PLENTY = 1_000_000
"""Context for a session whose tokenizer is not trained yet: its placeholder needs many times the tokens."""
POLL_S = 0.05
"""Interval at which a session is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFinding:
    """The result of one check."""

    name: str
    words: str
    works: bool = True
    """False for a warning."""


def check_ready(config: RunConfig, out: Path) -> Iterator[MachineFinding]:
    """Check all requirements of a new run at ``out``; yield the result of each check.

    Raises :class:`~etude.errors.UserError` for the first failure: the message names value, key and fix.
    """
    RunFolder.check_new(out)
    check_judge(config)
    check_suites(config)
    check_log(config)
    yield from check_judges(config)
    yield from check_machine(config)
    yield from check_model(config)
    yield from check_room(config, out)
    if isinstance(config.harness.options, CommandOptions):
        harness_mounts(config.harness.options.mounts)
    family = open_tasks(config)
    plan = plan_tasks(config, family)
    plan.check()
    task, *_ = first_tasks(config, family)
    check_texts(config)
    yield MachineFinding(name="tasks", words="; ".join(plan.describe()))
    yield check_session(config, task)


def check_judges(config: RunConfig) -> Iterator[MachineFinding]:
    """Check that the endpoints of the run's judge, and of its release suites' judges, accept their keys.

    Raises :class:`~etude.errors.ConfigError` for a missing or wrong key. An endpoint that does not answer is only
    reported: judging will wait for it.
    """
    urls: set[str] = set()
    for each in (config, *(trial_config(config, suite) for suite in config.release.suites)):
        options = each.judge.options
        if isinstance(options, ModelJudgeOptions) and options.url not in urls:
            urls.add(options.url)
            yield _ask_judge(each, options.url)


def _ask_judge(config: RunConfig, url: str) -> MachineFinding:
    try:
        without_event_loop(lambda: asyncio.run(check_key(config)))
    except JudgeUnavailable as error:
        return MachineFinding(name="judge", words=f"{error}; rollouts will wait for it to be judged", works=False)
    return MachineFinding(name="judge", words=f"the endpoint {url} answers")


def check_machine(config: RunConfig) -> Iterator[MachineFinding]:
    """Check the devices and the ports of a recipe. Raises :class:`~etude.errors.UserError`."""
    check_devices(config)
    count = count_gpus(config)
    phase_gpus(config, divide_gpus(config, count), count)
    check_interpreter(config)
    trainer, engine = resolve_device(config.trainer.device), resolve_device(config.engine.device)
    yield MachineFinding(name="devices", words=f"trainer on {trainer}, engine on {engine}")
    yield from (MachineFinding(name="devices", words=line, works=False) for line in about_numerics(config))
    probe_ports(config)
    ports = ", ".join(f"{name} {port or 'any'}" for name, port in listeners(config).items())
    yield MachineFinding(name="ports", words=ports)


def check_interpreter(config: RunConfig) -> None:
    """Check the Python interpreter of an engine with its own environment. Raises :class:`~etude.errors.UserError`."""
    match config.engine.options:
        case VllmOptions(python=python):
            vllm.find_python(python)
        case SglangOptions(python=python):
            sglang.find_python(python)


def check_model(config: RunConfig) -> Iterator[MachineFinding]:
    """Check a checkpoint's chat template and the headers of its weights, or count the parameters of random weights.

    Raises :class:`~etude.errors.ConfigError`.
    """
    if not config.model.checkpoint:
        if config.gateway.chat_template_kwargs:
            raise ConfigError(
                "gateway.chat_template_kwargs would have no effect without model.checkpoint: étude's own chat template "
                "reads none; set model.checkpoint, or leave them out"
            )
        count = formatting.brief(count_parameters(spec_of_recipe(config)))
        yield MachineFinding(name="model", words=f"random weights, {count} parameters")
        return
    place = Path(config.model.checkpoint)
    if not (place / "config.json").is_file():
        raise ConfigError(
            f"model.checkpoint = {config.model.checkpoint!r}: no Hugging Face checkpoint there: "
            f"{place.absolute() / 'config.json'} does not exist; correct the path"
        )
    try:
        for line in (*about_template(place, config.gateway.chat_template_kwargs), *about_calls(config)):
            yield MachineFinding(name="chat", words=line, works=False)
        for line in about_rate(config):
            yield MachineFinding(name="rate", words=line, works=False)
        stored = StoredCheckpoint(place, config.model.impl)
        with torch.device("meta"):
            stored.check(make_causal_model(stored.spec))
        if stored.spec.draft and not has_drafts(config):
            raise ConfigError(
                f"{place / 'config.json'} has draft_head = true, but the recipe does not use a draft head: set it to "
                f"false there, which leaves its weights out, or set loss.draft_learning_rate"
            )
        if has_drafts(config) and not config.loss.draft_learning_rate and not has_draft_head(place):
            raise ConfigError(
                f"engine.options.draft_tokens: {place} has no draft head (model.layers.{stored.spec.layers}.eh_proj): "
                f"set loss.draft_learning_rate to train one, or remove engine.options.draft_tokens"
            )
    except ConfigError:
        raise
    except (UserError, DamagedError) as error:
        raise ConfigError(f"model.checkpoint = {config.model.checkpoint!r}: {error}") from error
    count = formatting.brief(count_parameters(stored.spec))
    yield MachineFinding(
        name="model", words=f"{place}, {count} parameters: weights and chat template are complete and match"
    )


def check_room(config: RunConfig, out: Path) -> Iterator[MachineFinding]:
    """Compare the disk space and memory of a run with the free amounts. Raises :class:`~etude.errors.UserError`."""
    spec = spec_of_recipe(config)
    advice = check_disk_space(config, out)
    yield MachineFinding(
        name="disk", words=advice[0] if advice else f"{formatting.size(free_bytes(out))} free", works=not advice
    )
    advice = check_memory(resolve(config), spec)
    yield from (MachineFinding(name="memory", words=line, works=False) for line in advice)


def check_texts(config: RunConfig) -> None:
    """Check the files that mid-training and SFT read. Raises :class:`~etude.errors.ConfigError`."""
    named = {"sft.file": config.sft.file} if config.sft.file else {}
    if config.midtrain.tokens:
        sources = [name for name in config.midtrain.shares if name.startswith(FILE_SOURCES)]
        named |= {f"midtrain.mixture, {name!r}": name.partition(":")[2] for name in sources}
        if any(not name.startswith((*FILE_SOURCES, "stdlib")) for name in config.midtrain.shares):
            open_demonstrations(config)
    for key, path in named.items():
        if not Path(path).exists():
            raise ConfigError(f"{key}: there is no {path!r} in {Path.cwd()}: correct the path, or remove the key")
        if "'text:" in key:
            check_text(Path(path))


def first_tasks(config: RunConfig, family: TaskFamily) -> list[Task]:
    """One task of each split that a recipe needs, training first.

    Raises :class:`~etude.errors.ConfigError` for a task whose grader cannot be found.
    """
    sides = [Split.TRAIN, Split.HELDOUT] if config.eval.enabled else [Split.TRAIN]
    tasks = [family.task(split, 0) for split in sides]
    for task in tasks:
        if isinstance(task.checks, NamedChecks):
            find_grader(task, config.tasks.graders)
    return tasks


def check_session(config: RunConfig, task: Task) -> MachineFinding:
    """Play one session of the harness, in a sandbox, on an engine that samples random words.

    Raises :class:`~etude.errors.ConfigError` if the harness cannot be started, the session fails, or it does not call
    the model in time.
    """
    chat, max_length = _chat_of(config, task)
    engine = FakeEngine(SystemClock(), vocab_size=chat.vocab_size, max_length=max_length, seed=config.seed)
    calls, started_s = list[Completion](), time.monotonic()
    is_process = isinstance(config.harness.options, VerifiersHarnessOptions)
    session_s = SESSION_S + (OPEN_TIMEOUT_S if is_process else 0.0)

    def note(_prompt_ids: TokenIds, completion: Completion) -> None:
        calls.append(completion)

    with tempfile.TemporaryDirectory(prefix="etude-check-") as scratch:
        stage = Stage(config=config, chat=chat, engine=engine, folder=Path(scratch), max_length=max_length)
        ended = without_event_loop(
            lambda: asyncio.run(_watch(play(stage, task, temperature=1.0, tell=note), lambda: len(calls), session_s))
        )
    if ended is not None and ended.status is not RolloutStatus.GRADED:
        raise ConfigError(f"{_harness_key(config)}: a session with task {task.task_id} failed: {ended.reason}")
    if not calls:
        raise ConfigError(
            f"{_harness_key(config)}: a session with task {task.task_id} has not called the model within {session_s:g} "
            f"s: its agent must use the endpoint in OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
        )
    end = "stopped" if ended is None else f"ended ({ended.reason}) and graded"
    words = f"{config.harness.kind} harness on a fake engine: {end} after {len(calls)} calls"
    return MachineFinding(name="session", words=f"{words}, {time.monotonic() - started_s:.1f} s")


async def _watch(playing: Coroutine[None, None, Rollout], calls: Callable[[], int], session_s: float) -> Rollout | None:
    """The rollout, or ``None`` if it has not ended within its calls or its time."""
    deadline_s = time.monotonic() + session_s
    async with background_task(playing) as played:
        while not played.done():
            if calls() >= SESSION_CALLS or time.monotonic() > deadline_s:
                return None
            await asyncio.wait({played}, timeout=POLL_S)
        return played.result()


def _harness_key(config: RunConfig) -> str:
    """The recipe key to change if the harness does not work."""
    options = config.harness.options
    if isinstance(options, CommandOptions):
        return f"harness.options.command = {list(options.command)!r:.80}"
    return f"harness.kind = {config.harness.kind!r}"


def _chat_of(config: RunConfig, task: Task) -> tuple[ChatFormat, int]:
    """The chat format of a recipe's model, and the context length of a session."""
    if config.model.checkpoint:
        chat = load_format(Path(config.model.checkpoint), config.gateway.chat_template_kwargs)
        return chat, config.engine.max_length
    shape = config.model.shape
    assert isinstance(shape, ModelShape), "random weights have a shape"
    return ChatTemplate.train([task.prompt], shape.vocab_size), PLENTY


def spec_of_recipe(config: RunConfig) -> ModelSpec:
    """The shape of a recipe's model. Raises as :func:`~etude.models.checkpoint.load_spec`."""
    shape = config.model.shape
    if isinstance(shape, ModelShape):
        spec = spec_from_shape(shape, shape.vocab_size)
    else:
        spec = load_spec(Path(config.model.checkpoint), config.model.impl)
    return replace(spec, draft=spec.draft or has_drafts(config))


def about_calls(config: RunConfig) -> list[str]:
    """Check that tool calls rendered by the checkpoint's chat template can be parsed again, if an external agent may
    use them: a line if some cannot. Raises :class:`~etude.errors.ConfigError` if none can.
    """
    if not isinstance(config.harness.options, CommandOptions):
        return []
    calls = call_support(Path(config.model.checkpoint))
    problem = f"model.checkpoint = {config.model.checkpoint!r}: {calls.problem}"
    if calls.is_lost:
        raise ConfigError(
            f"{problem}, and the agent of harness.options.command would be graded without its tool calls. Give the "
            "checkpoint a chat_template.jinja that writes calls in a form of docs/models.md, or one without tool calls "
            "if the agent needs none"
        )
    return [problem] if calls.problem else []


def about_template(checkpoint: Path, kwargs: TemplateKwargs = NO_KWARGS) -> list[str]:
    """Compare the gateway's prompts, which are trained on, with those of a server that renders each call anew; a line
    if they differ.

    Raises as :func:`~etude.tokens.jinja.load_format`.
    """
    differences = rendered_differently(load_format(checkpoint, kwargs))
    if not differences:
        return []
    return [
        f"the model is trained on the prompts that the gateway renders; a server that renders each call anew gives it "
        f"other prompts: {', '.join(differences)} (docs/models.md, Serving what was trained)"
    ]


def about_rate(config: RunConfig) -> list[str]:
    """A warning line if a checkpoint is to be trained at the default learning rate."""
    if not config.model.checkpoint or config.trainer.is_set("learning_rate"):
        return []
    return [
        f"trainer.learning_rate = {config.trainer.learning_rate:g} is the default, for the small model that étude "
        f"makes; it would ruin most checkpoints. Set 1e-6 for billions of parameters, 1e-5 below, ten times as much "
        f"for an adapter"
    ]


def about_numerics(config: RunConfig) -> list[str]:
    """A warning line if the weights are float32 on a GPU."""
    devices = {resolve_device(config.engine.device), resolve_device(config.trainer.device)}
    if "cuda" not in devices or resolve(config).numerics.dtype != "float32":
        return []
    return [
        "numerics.dtype = 'float32' on a GPU: no flash attention, no graphs, experts one by one, twice the memory; set "
        "'bfloat16', for which GPUs are made"
    ]
