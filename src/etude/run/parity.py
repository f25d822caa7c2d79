"""The parity check: do engine and trainer compute the same numbers from the same weights?

Two comparisons of the real code of both sides, with the arithmetic configured for the run:

Sampled: the native engine samples completions as it would in a run (batched, prompts in chunks, second turns on reused
prefixes), and the trainer scores the same tokens. The result is one number, k3, compared with the bounds of
``[numerics]``.

Layer by layer: the same sequences go through the trainer's forward pass and through the engine's paged cache on each of
its three attention paths; the outputs of attention and feed-forward of each layer are compared position by position.
The first row that differs locates the fault.

`etude doctor` (:mod:`etude.cli.actions.compare_numerics`) is another caller.

Shape legend: B sequences, T positions, N tokens of one pass, H hidden, S sparse layers, k experts per token.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from etude.aio import background_task
from etude.config.inference import ENGINES, EngineConfig, NativeOptions, NumericsConfig
from etude.config.recipe import RunConfig
from etude.config.training import ModelShape
from etude.dashboard import formatting
from etude.engines.kinds import Opener
from etude.engines.native.cache import PagedCache
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.pages import PAGE
from etude.engines.native.scheduler import EngineRequest, ScheduledTokens
from etude.errors import ConfigError, MismatchError
from etude.models.checkpoint import load_checkpoint, load_spec, load_state, spec_from_shape
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.spec import ModelSpec
from etude.protocols import Engine, SamplingParams, turn_of
from etude.run.events import open_events
from etude.run.folder import RunFolder
from etude.run.numerics import (
    FrozenBase,
    decoded_state,
    engine_context,
    frozen_base,
    largest_state,
    load_published,
    published_state,
    serving_model,
    training_model,
    unfilled_model,
)
from etude.run.process_name import ProcessName
from etude.run.resolve import is_invariant, resolve_device, resolve_replay
from etude.run.weight_follower import WeightFollower
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.tokens.jinja import load_format
from etude.trainer.batching.build import build_trajectories
from etude.trainer.mismatch import Mismatch, MismatchLevel, MismatchProbe, mismatch_level
from etude.trainer.parallel import materialise
from etude.types import NO_ROUTE, Ids, Rollout, RolloutStatus, Trajectory, Turn
from etude.weights.pull import pull
from etude.weights.tensors import to_tensors

PROMPTS = (19, 33, 48, 70, 101, 12)
"""Lengths of the first prompts in tokens: less than a page, whole pages, and more than one step reads."""
SECOND_TURN = 9
"""Tokens between two completions of a conversation."""
SAMPLED = 20
"""Tokens of each completion: enough for a verdict over two turns of all prompts."""
STEP_TOKENS = 48
"""Prefill tokens of the engine per pass: few enough that long prompts are read in chunks while
other sequences decode.
"""
CHUNKS = (5, 16, 23)
"""Tokens per step of the layered comparison's chunked reading."""
LONGEST = max(PROMPTS) + 2 * SAMPLED + SECOND_TURN
"""Tokens of the longest sequence: the number of positions that a model must have."""
SEED = 20_11
"""Seed of prompts and sampling; its value is arbitrary."""

Plan: TypeAlias = Sequence[ScheduledTokens]
"""The tokens that one forward pass of the engine reads."""
Reader: TypeAlias = Callable[[Sequence[EngineRequest]], Iterator[Plan]]
"""Plans the passes in which the engine reads some sequences."""
States: TypeAlias = list[Tensor]
"""[T,H] of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """Difference of one part of a layer between one attention path of the engine and the trainer."""

    name: str
    """Such as ``layer 2 attention``."""
    way: str
    """``decode``, ``chunks`` or ``prefix``."""
    max_abs: float
    equal: float
    """Share of numbers that are bitwise equal."""
    flips: int | None = None
    """(Token, expert) pairs that the two sides chose differently; ``None`` without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The result of a parity check and its evidence."""

    invariant: bool
    """True if bitwise equality is promised."""
    mismatch_level: MismatchLevel
    sampled: Mismatch
    layers: tuple[LayerDifference, ...]
    """In the order of computation, grouped by part."""

    @property
    def first(self) -> LayerDifference | None:
        """The first part that differs at all, in the order of computation."""
        return next((layer for layer in self.layers if layer.equal < 1), None)

    @property
    def exact(self) -> bool:
        """True if nothing differs."""
        return self.first is None and self.sampled.equal == self.sampled.tokens

    @property
    def passed(self) -> bool:
        """True if both sides are equal, where that is promised, else if the mismatch is below the bound that stops
        runs.
        """
        return self.exact if self.invariant else self.mismatch_level is not MismatchLevel.STOP


def check_parity(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    numerics: NumericsConfig,
    device: str,
    base: FrozenBase | None = None,
) -> Parity:
    """Compare both sides on a published ``state``, which with a ``base`` is an adapter's. Raises ``ValueError`` for a
    model with too few positions.
    """
    if spec.max_positions < LONGEST:
        raise ValueError(f"max_positions={spec.max_positions}: the parity gate needs {LONGEST}")
    replayed = numerics.model_copy(update={"replay": resolve_replay(numerics, device)})
    trainer = streamed_model(spec, numerics, device) if base is None else base.model(device, torch.float32)
    trainer, server = trainer.eval(), serving_model(spec, numerics, device, base)
    load_published(trainer, state, numerics)
    load_published(server, state, numerics)
    trajectories = sample(server, record_routes=replayed.replay != "off")
    probe = MismatchProbe.alone(trainer, replayed, versions=1)
    probe.remember(0, decoded_state(state, numerics))
    sampled = probe.measure(trajectories, max_tokens=len(trajectories) * LONGEST).total
    return Parity(
        invariant=is_invariant(numerics, device),
        mismatch_level=mismatch_level(sampled, numerics, MismatchLevel.CLEAR),
        sampled=sampled,
        layers=compare_layers(trainer, server, [trajectory.token_ids for trajectory in trajectories]),
    )


def streamed_model(spec: ModelSpec, numerics: NumericsConfig, device: str) -> Decoder:
    """The trainer's model, without weights, with each block on the host except while it computes: next to an engine's
    model no GPU has room for a whole float32 model.
    """
    model = unfilled_model(spec, numerics, device)
    assert isinstance(model, Decoder), "a model of transformers is compared with its engine: check_server"
    for block in model.blocks:
        materialise(block, "cpu")
        block.register_forward_pre_hook(partial(_move, device))
        block.register_forward_hook(partial(_move, "cpu"))
    materialise(model, device)
    return model


def _move(device: str, block: nn.Module, *_: object) -> None:
    block.to(device)


def sample(server: Decoder, *, record_routes: bool) -> list[Trajectory]:
    """Sample conversations of two turns with the native engine."""
    config = EngineConfig(
        max_running=len(PROMPTS),
        max_length=max(64, LONGEST),
        options=NativeOptions(step_tokens=STEP_TOKENS, cache_tokens=len(PROMPTS) * LONGEST),
    )
    engine = NativeEngine(Weights(server, 0, "parity"), config, seed=SEED, record_routes=record_routes)
    params = SamplingParams(max_tokens=SAMPLED, want_routes=record_routes)

    async def converse() -> list[Trajectory]:
        async with background_task(engine.run()):
            return await _converse(engine, server.spec.vocab_size, params)

    return asyncio.run(converse())


async def check_server(folder: RunFolder, config: RunConfig, events: EventLog) -> Parity:
    """Start the engine of a run, have it sample, and score its tokens with the trainer's model.

    There is no comparison by layer: a server only exposes its samples.
    """
    spec, opener = load_spec(folder.model, config.model.impl), cast("Opener", ENGINES.find(config.engine.kind))
    if config.engine.max_length < LONGEST:
        raise ConfigError(f"engine.max_length = {config.engine.max_length}: the parity gate needs {LONGEST}")
    follower = await asyncio.to_thread(WeightFollower, open_log(folder), largest_state(spec), lambda: None)
    logs = folder.logs / "parity"
    logs.mkdir(exist_ok=True)
    context = engine_context(config, spec, model_folder=folder.model, logs=logs, events=events)
    with closing(follower):
        weights = await asyncio.to_thread(follower.start)
        async with opener(context, weights) as served:
            trajectories = await _converse(served.engine, spec.vocab_size, SamplingParams(max_tokens=SAMPLED))
        probe = MismatchProbe.alone(
            training_model(spec, config.numerics, config.trainer.device), config.numerics, versions=1
        )
        probe.remember(weights.version, decoded_state(to_tensors(weights.state), config.numerics))
    # The server labels its tokens with the version that was remembered.
    sampled = probe.measure(trajectories, max_tokens=len(trajectories) * LONGEST).total
    return Parity(
        invariant=False,
        mismatch_level=mismatch_level(sampled, config.numerics, MismatchLevel.CLEAR),
        sampled=sampled,
        layers=(),
    )


def compare_layers(trainer: Decoder, server: Decoder, sequences: Sequence[Ids]) -> tuple[LayerDifference, ...]:
    """Compare each layer's outputs for ``sequences`` on both sides, on every path of the engine."""
    ours = _read_packed(trainer, sequences)
    pages = [-(-len(sequence) // PAGE) for sequence in sequences]
    firsts = np.cumsum([0, *pages]).tolist()
    theirs = {}
    for way, read in WAYS.items():
        cache = PagedCache(server, 2 * sum(pages), record_routes=True)
        requests = [_request(index, one, firsts[index]) for index, one in enumerate(sequences)]
        theirs[way] = _read_paged(server, cache, requests, read)
    return tuple(
        _difference(part, way, ours, reading) for part in _parts(server.spec) for way, reading in theirs.items()
    )


async def _converse(engine: Engine, vocab_size: int, params: SamplingParams) -> list[Trajectory]:
    """Sample two turns for each prompt, all conversations at once."""
    random = np.random.default_rng(SEED)
    prompts = [random.integers(0, vocab_size, length + SECOND_TURN).astype(np.int32) for length in PROMPTS]
    talks = [_talk(engine, index, prompt, params) for index, prompt in enumerate(prompts)]
    turns = await asyncio.gather(*talks)
    return [trajectory for index, pair in enumerate(turns) for trajectory in _trajectories(index, pair)]


async def _talk(engine: Engine, index: int, ids: Ids, params: SamplingParams) -> tuple[Turn, Turn]:
    """Sample a first turn after the start of ``ids``, and a second turn after its last ``SECOND_TURN`` tokens."""
    prompt, later = ids[:-SECOND_TURN], ids[-SECOND_TURN:]
    first = await _turn(engine, index, prompt, params)
    return first, await _turn(engine, index, np.concatenate([prompt, first.completion_ids, later]), params)


async def _turn(engine: Engine, index: int, prompt: Ids, params: SamplingParams) -> Turn:
    completion = await engine.generate(prompt.tolist(), params, session=f"parity-{index}")
    return turn_of(prompt, params, completion)


def _trajectories(index: int, turns: tuple[Turn, Turn]) -> tuple[Trajectory, ...]:
    rollout = Rollout(
        rollout_id=f"parity-{index}",
        group_index=0,
        slot=index,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=0.0,
        turns=turns,
    )
    return build_trajectories(rollout, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForwardPass:
    """Numbers that one side computed for the sequences."""

    states: dict[str, States] = field(default_factory=dict)
    """Part of a layer → [T,H] of each sequence, in the order of computation."""
    routes: list[Tensor] = field(default_factory=list)
    """[T,S,k] of each sequence."""


def _read_packed(model: Decoder, sequences: Sequence[Ids]) -> _ForwardPass:
    """Read like the trainer: one pass over packed sequences."""
    lengths = [len(sequence) for sequence in sequences]
    token_ids_N = torch.from_numpy(np.concatenate(sequences)).to(model.embedding.device).long()
    routing = Routing(record=True)
    with torch.inference_mode(), _observed(model) as seen:
        model.forward_packed(token_ids_N, lengths, routing)
    reading = _ForwardPass()
    reading.states.update({name: list(out_NH.split(lengths)) for name, out_NH in seen.items()})
    reading.routes.extend(routing.recorded().split(lengths))
    return reading


def _read_paged(model: Decoder, cache: PagedCache, requests: Sequence[EngineRequest], read: Reader) -> _ForwardPass:
    """Read like the engine: one pass for each plan of ``read``."""
    reading = _ForwardPass()
    for plan in read(requests):
        with torch.inference_mode(), _observed(model) as seen:
            routes_NSk = cache.forward(model, plan).routes_NLk
        if not reading.states:
            reading.states.update({name: [_blank(one, out) for one in requests] for name, out in seen.items()})
        if routes_NSk is not None and not reading.routes:
            reading.routes.extend(_blank(one, routes_NSk) for one in requests)
        start = 0
        for work in plan:
            index, rows = int(work.request.session), slice(start, start + work.count)
            places = slice(work.start, work.start + work.count)
            for name, out_NH in seen.items():
                reading.states[name][index][places] = out_NH[rows]
            if routes_NSk is not None:
                reading.routes[index][places] = routes_NSk[rows]
            start += work.count
    return reading


def _decode(requests: Sequence[EngineRequest]) -> Iterator[Plan]:
    """Read the first half at once, then token by token, all sequences in a batch."""
    yield [ScheduledTokens(request, 0, len(request.token_ids) // 2) for request in requests]
    for step in range(max(len(request.token_ids) for request in requests)):
        places = [(request, len(request.token_ids) // 2 + step) for request in requests]
        plan = [ScheduledTokens(request, place, 1) for request, place in places if place < len(request.token_ids)]
        if plan:
            yield plan


def _chunks(requests: Sequence[EngineRequest]) -> Iterator[Plan]:
    """Read chunks of several sizes in each pass, which share no boundary with pages."""
    read = dict.fromkeys(requests, 0)
    step = 0
    while any(done < len(request.token_ids) for request, done in read.items()):
        plan = []
        for index, (request, done) in enumerate(read.items()):
            count = min(CHUNKS[(step + index) % len(CHUNKS)], len(request.token_ids) - done)
            if count:
                plan.append(ScheduledTokens(request, done, count))
        for work in plan:
            read[work.request] += work.count
        yield sorted(plan, key=lambda work: work.count > 1)
        step += 1


def _prefix(requests: Sequence[EngineRequest]) -> Iterator[Plan]:
    """Read all at once, then read the second half again by new requests that reuse the pages of the first half."""
    yield [ScheduledTokens(request, 0, len(request.token_ids)) for request in requests]
    fresh = 1 + max(page for request in requests for page in request.pages)
    plan = []
    for request in requests:
        shared = len(request.pages) // 2
        pages = [*request.pages[:shared], *(fresh + page for page in request.pages[shared:])]
        twin = EngineRequest(
            session=request.session,
            params=request.params,
            token_ids=request.token_ids,
            prompt_length=request.prompt_length,
            pages=pages,
        )
        plan.append(ScheduledTokens(twin, shared * PAGE, len(twin.token_ids) - shared * PAGE))
    yield plan


WAYS: Mapping[str, Reader] = MappingProxyType({"decode": _decode, "chunks": _chunks, "prefix": _prefix})
"""Attention paths on which an engine reads a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a layer that both sides compute."""

    name: str
    routes: int | None = None
    """Index among the sparse layers."""


def _parts(spec: ModelSpec) -> list[_Part]:
    """The parts of a model in the order of computation."""
    parts = []
    for layer in range(spec.layers):
        routes = spec.sparse_layers.index(layer) if layer in spec.sparse_layers else None
        parts += [_Part(name=f"layer {layer} attention"), _Part(name=f"layer {layer} feed-forward", routes=routes)]
    return [*parts, _Part(name="final norm")]


@contextmanager
def _observed(model: Decoder) -> Iterator[dict[str, Tensor]]:
    """Output of each part in a pass, [N,H]."""
    seen: dict[str, Tensor] = {}
    modules = [module for block in model.blocks for module in (block.attention, block.feed)]
    with ExitStack() as stack:
        for part, module in zip(_parts(model.spec), [*modules, model], strict=True):
            assert isinstance(module, nn.Module)
            note = partial(_note, seen, part.name)
            stack.callback(module.register_forward_hook(note).remove)
        yield seen


def _note(seen: dict[str, Tensor], name: str, _module: nn.Module, _inputs: object, out: Tensor) -> None:
    seen[name] = out


def _request(index: int, sequence: Ids, first_page: int) -> EngineRequest:
    """A request that only reads ``sequence``, with its own pages."""
    pages = -(-len(sequence) // PAGE)
    return EngineRequest(
        session=str(index),
        params=SamplingParams(max_tokens=1),
        token_ids=sequence.tolist(),
        prompt_length=len(sequence),
        pages=list(range(first_page, first_page + pages)),
    )


def _blank(request: EngineRequest, rows: Tensor) -> Tensor:
    return rows.new_zeros((len(request.token_ids), *rows.shape[1:]))


def _difference(part: _Part, way: str, ours: _ForwardPass, theirs: _ForwardPass) -> LayerDifference:
    a, b = (torch.cat(reading.states[part.name]).float() for reading in (ours, theirs))
    flips = None
    if part.routes is not None:
        chosen, other = (torch.cat(reading.routes)[:, part.routes].long() & NO_ROUTE for reading in (ours, theirs))
        flips = int((chosen.unsqueeze(-1) != other.unsqueeze(-2)).all(-1).sum())
    return LayerDifference(
        name=part.name,
        way=way,
        max_abs=float((a - b).abs().max()),
        equal=float((a == b).double().mean()),
        flips=flips,
    )


SEED_STD = 0.1
"""Standard deviation of random weights: large enough that the choice of experts depends on the input."""
AGREEMENT = {MismatchLevel.CLEAR: "agree", MismatchLevel.WARN: "agree badly", MismatchLevel.STOP: "disagree"}
"""The verdict of each level."""
GOOD, WARN, DIM = "green", "yellow", "bright_black"
"""Colours of agreement, of a difference, and of further information."""


WEIGHTS_POLL_S = 0.2
"""Interval at which a gate that was started early polls for the weights."""


def gate(folder: RunFolder) -> None:
    """Stop a run whose engine and trainer disagree. Raises :class:`~etude.errors.MismatchError`.

    While a phase before the loop is still in progress, random weights of the recipe's shape are compared first. This
    detects a machine that computes wrongly before mid-training is paid for, and compiles kernels before the loop needs
    them. Then the weights that the phase publishes are compared.
    """
    config, console = folder.config(), Console(width=100)
    torch.set_num_threads(config.trainer.threads)
    if open_log(folder).latest() is None:
        console.print("random weights:")
        _demand(parity_of_model(None, config), console)
        while open_log(folder).latest() is None:
            time.sleep(WEIGHTS_POLL_S)
        console.print("\npublished weights:")
    _demand(parity_of_run(folder, config), console)


def _demand(parity: Parity, console: Console) -> None:
    """Print a comparison. Raises :class:`~etude.errors.MismatchError` unless it passed."""
    show_parity(parity, console)
    if not parity.passed:
        raise MismatchError(verdict(parity))


def parity_of_run(folder: RunFolder, config: RunConfig) -> Parity:
    """Check parity on a run's newest published weights, with the numerics of ``config``."""
    if config.model.impl == "hf":
        with open_events(folder, ProcessName(command="parity")) as events:
            return asyncio.run(check_server(folder, config, events))
    device = resolve_device(config.engine.device)
    spec, published = load_spec(folder.model, config.model.impl), to_tensors(pull(open_log(folder)).state)
    trained_as = folder.config().numerics
    base = frozen_base(folder.model, config)
    if base is None and config.numerics != trained_as:
        model = training_model(spec, trained_as, "cpu")
        load_published(model, published, trained_as)
        published = published_state(model, config.numerics)
    return check_parity(spec, published, config.numerics, device, base)


def parity_of_model(checkpoint: Path | None, config: RunConfig) -> Parity:
    """Check parity on a Hugging Face checkpoint, or on a random model of the recipe's shape.

    Raises :class:`~etude.errors.DamagedError` for a checkpoint that no run could start from, such as one without a
    tokenizer or a chat template.
    """
    device = resolve_device(config.engine.device)
    shape = config.model.shape
    if checkpoint is None and isinstance(shape, ModelShape):
        spec, state = spec_from_shape(shape, shape.vocab_size), None
    else:
        checkpoint = checkpoint or Path(config.model.checkpoint)
        load_format(checkpoint)
        spec, state = load_checkpoint(checkpoint)
    return check_parity(spec, _published(spec, state, config.numerics), config.numerics, device)


def show_parity(parity: Parity, console: Console) -> None:
    """Print the comparison, layer by layer, and the verdict: largest difference and share of equal numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style=DIM)
    table.add_column("", no_wrap=True)
    for way in WAYS:
        table.add_column(way)
    table.add_column("flips", justify="right")
    rows: dict[str, list[LayerDifference]] = {}
    for layer in parity.layers:
        rows.setdefault(layer.name, []).append(layer)
    for name, layers in rows.items():
        flips = [layer.flips for layer in layers if layer.flips is not None]
        style = WARN if parity.first in layers else ""
        table.add_row(Text(name, style), *(_cell(layer) for layer in layers), str(sum(flips)) if flips else "")
    if parity.layers:
        console.print(table)
    console.print(
        Text(f"\n{verdict(parity)}", GOOD if parity.passed and parity.mismatch_level is MismatchLevel.CLEAR else WARN)
    )


def verdict(parity: Parity) -> str:
    """The result of a parity check in a sentence; it names the first part that differs."""
    mismatch = parity.sampled
    k3, largest = formatting.small(mismatch.k3), formatting.small(mismatch.max)
    compared = f"{mismatch.tokens} sampled tokens: k3 {k3}, max {largest}"
    if parity.exact:
        return f"engine and trainer agree to the last bit, in every layer; {compared}"
    if not parity.layers:
        words = AGREEMENT[parity.mismatch_level]
        share = formatting.percent(mismatch.equal / max(1, mismatch.tokens))
        return (
            f"engine and trainer {words}; {compared}, k1 {mismatch.k1:.1e}, "
            f"p99 {formatting.small(mismatch.p99)}, {share} of them equal to the last bit"
        )
    first = "only logprobs differ" if parity.first is None else f"{parity.first.name} ({parity.first.way}) is the first"
    if parity.invariant:
        return f"engine and trainer differ although the arithmetic is invariant: {first}; {compared}"
    words = AGREEMENT[parity.mismatch_level]
    return f"engine and trainer {words}; {compared}; {first} to differ in any bit"


def _published(spec: ModelSpec, state: Mapping[str, Tensor] | None, numerics: NumericsConfig) -> dict[str, Tensor]:
    model = training_model(spec, numerics, "cpu")
    if state is None:
        assert isinstance(model, Decoder), "only étude's own models are made up"
        model.initialise(seed=0, std=SEED_STD)
    else:
        load_state(model, state)
    return published_state(model, numerics)


def _cell(layer: LayerDifference) -> Text:
    if layer.equal == 1:
        return Text("equal", GOOD)
    percent = formatting.percent(int(layer.equal * 1000) / 1000)
    return Text.assemble(formatting.small(layer.max_abs), (f"  {percent}", DIM))
