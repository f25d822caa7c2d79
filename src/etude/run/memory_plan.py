"""Memory of a run, process by process and part by part: for this machine or any other.

    rank of the trainer    parameters, gradients, moments        float32, sharded over all ranks
                           gathered weights                      outside blocks, and two blocks at a time
                           activations                           of a pass; one state per token and block, if recomputed
                           working set                           one recomputed block, or a chunk of logits
    native engine          weights, spare, cache, a step
    vLLM, SGLang           its share of each GPU; weights, and the rest for its cache

The check at a run's start uses the same formulas. Lasting parts are the memory that a process holds between steps; it
cannot start with less than their sum. This module owns the estimate; :mod:`etude.models.sizes` owns the sizes of
models. Sandboxes and programs are not included.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from etude.config.inference import NativeOptions, SglangOptions, VllmOptions
from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.engines.native.pages import PAGE
from etude.errors import ConfigError, InfrastructureError, UserError
from etude.models.adapters import count_factors
from etude.models.decoder import Decoder
from etude.models.sizes import FLOAT, ModelSizes, saved_bytes
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.run.disk_space import MODEL_BYTES, moment_bytes
from etude.run.gpus import count_gpus, divide_gpus, engine_gpus, engine_sizes
from etude.run.numerics import DTYPES, adapter_spec
from etude.run.process_name import TRAINER
from etude.run.resolve import is_invariant, resolve_device
from etude.sandboxes.memory_pressure import MemoryGauge
from etude.trainer.readout import CHUNK_LOGITS

GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, which is accumulated in float32."""
GATHERED_BLOCKS = 2
"""Number of blocks whose weights a rank holds at a time: the current one and the next."""
CONTEXT_BYTES = 1_500_000_000
"""CUDA's context, kernels and workspaces of matrix products, per process."""
COLLECTIVE_BYTES = 1_500_000_000
"""Buffers of NCCL, of three meshes, per rank."""
RESERVE_SHARE = 0.08
"""Share of a step's temporary memory that the allocator cannot reuse."""
GRAPH_BYTES = 500_000_000
"""CUDA graphs of an engine's decode steps, which share a pool."""
VLLM_SHARE, SGLANG_SHARE = 0.9, 0.85
"""Default share of a GPU's memory that these servers take (SGLang chooses about this much by itself)."""
SERVER_STEP_TOKENS = 8192
"""Default tokens per step of these servers."""
LOGIT_BYTES: Mapping[str, int] = {"cuda": 0, "cpu": 22}
"""Bytes per logit of a chunk beyond the logits and their gradients: on a CPU softmax and entropy are separate passes in
float32, on a GPU they are one kernel.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of a process's memory on each of its GPUs."""

    name: str
    size_bytes: int
    words: str
    """The calculation of the size, in words."""
    key: str = ""
    """Recipe key that changes it."""
    lasts: bool = True
    """False for memory that is only held during a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Memory of one kind of process, per GPU."""

    name: str
    count: int
    """Number of processes of this kind."""
    gpus: int
    """GPUs per process."""
    parts: tuple[MemoryPart, ...]
    problem: str = ""
    """The reason why it cannot start, however much memory is free; empty if it can."""

    @property
    def total(self) -> int:
        """Bytes per GPU at the peak."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def least(self) -> int:
        """Bytes per GPU between two steps."""
        return sum(part.size_bytes for part in self.parts if part.lasts)

    def fixes(self) -> str:
        """Recipe keys that reduce the largest parts, the most effective first."""
        large = sorted(self.parts, key=lambda part: -part.size_bytes)
        return ", ".join(dict.fromkeys(part.key for part in large if part.key))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a run's trainer and engines."""

    trainer: ProcessMemory
    """Each rank."""
    engine: ProcessMemory

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec, gpu_bytes: int | None = None) -> "MemoryPlan":
        """The memory of a resolved recipe with a model of shape ``spec``, on GPUs of ``gpu_bytes``.

        vLLM and SGLang take a share of a GPU: without ``gpu_bytes`` they count as 0. Raises
        :class:`~etude.errors.ConfigError` for a mesh that does not divide the model's experts.
        """
        sizes = ModelSizes.of(spec)
        return cls(trainer=trainer_memory(config, spec, sizes), engine=engine_memory(config, spec, sizes, gpu_bytes))


# --- Trainer ----------------------------------------------------------------------------------------------------------


def trainer_memory(config: RunConfig, spec: ModelSpec, sizes: ModelSizes) -> ProcessMemory:
    """Memory of each rank of the trainer. Raises :class:`~etude.errors.ConfigError` for experts that
    cannot be divided.
    """
    parallel, fused = config.parallel, config.trainer.device == "cuda"
    ranks, ep = parallel.shards, parallel.ep
    if spec.experts is not None and ranks > 1:
        _check_experts(spec.experts, spec.hidden_size, ranks, ep)
    own = -(-_trained(config, spec, sizes) // ranks)
    moments = 0 if config.optimiser.state == "offload" else moment_bytes(config.optimiser)
    parts = [
        *_frozen_parts(config, sizes),
        MemoryPart(name="parameters", size_bytes=own * MODEL_BYTES, words=_shard("float32", ranks), key="parallel.dp"),
        MemoryPart(
            name="gradients", size_bytes=own * GRADIENT_BYTES, words=_shard("float32", ranks), key="parallel.dp"
        ),
        MemoryPart(
            name="moments",
            size_bytes=own * moments,
            words=f"{config.optimiser.kind}, {moments} bytes a parameter"
            + (", in the host's memory" if config.optimiser.state == "offload" else ""),
            key="" if config.optimiser.state == "offload" else "optimiser.state",
        ),
        *_step_parts(config, spec, sizes),
    ]
    if fused:
        passing = sum(part.size_bytes for part in parts if not part.lasts)
        buffers = CONTEXT_BYTES + (COLLECTIVE_BYTES if ranks > 1 else 0)
        words = "CUDA's context and workspaces" + (", NCCL's buffers" if ranks > 1 else "")
        parts += [
            MemoryPart(name="buffers", size_bytes=buffers, words=words),
            MemoryPart(
                name="reserve",
                size_bytes=int(RESERVE_SHARE * passing),
                words=f"{RESERVE_SHARE:.0%} of the memory that a step frees",
                lasts=False,
            ),
        ]
    return ProcessMemory(name="trainer", count=ranks, gpus=1, parts=tuple(parts))


def _trained(config: RunConfig, spec: ModelSpec, sizes: ModelSizes) -> int:
    """Number of trained parameters: an adapter's, or all."""
    if not config.lora.trains("rl"):
        return sizes.total
    with torch.device("meta"):
        model = Decoder(spec)
    return count_factors(model, adapter_spec(config))


def _frozen_parts(config: RunConfig, sizes: ModelSizes) -> list[MemoryPart]:
    """The frozen weights below an adapter."""
    if not config.lora.trains("rl"):
        return []
    dtype = config.numerics.stored_dtype
    return [MemoryPart(name="frozen base", size_bytes=sizes.total * DTYPES[dtype].itemsize, words=dtype)]


def _step_parts(config: RunConfig, spec: ModelSpec, sizes: ModelSizes) -> list[MemoryPart]:
    """Memory of a forward and a backward pass in addition to the state."""
    parallel, fused = config.parallel, config.trainer.device == "cuda"
    item = activation_bytes(config)
    length = min(config.engine.max_length, max(config.trainer.microbatch_tokens, 1))
    tokens = -(-max(config.trainer.microbatch_tokens, config.engine.max_length) // parallel.cp)
    saved = [saved_bytes(spec, layer, item=item, fused=fused, length=length) * tokens for layer in range(spec.layers)]
    block, rounded = sizes.largest_block(parallel.ep), item if item < FLOAT else 0
    gathers = parallel.shards > 1
    recomputes = config.trainer.recomputes
    states = spec.layers * tokens * spec.hidden_size * item
    gathered = FLOAT if config.numerics.experts != "plain" else item
    copies = sizes.outer * FLOAT + GATHERED_BLOCKS * block * gathered if gathers else 0
    learns = not config.lora.trains("rl")  # otherwise the weights get no gradients
    matrix = sizes.largest_outer if learns else 0
    backward = backward_bytes(spec, tokens, item, block, matrix) + (max(saved) if recomputes else 0)
    unreduced = sizes.outer * GRADIENT_BYTES + GATHERED_BLOCKS * block * (gathered + GRADIENT_BYTES) if gathers else 0
    chunk_rows = max(1, min(CHUNK_LOGITS["cuda" if fused else "cpu"] // spec.vocab_size, tokens))
    logits = chunk_rows * spec.vocab_size * (2 * item + LOGIT_BYTES["cuda" if fused else "cpu"])
    logits += (rounded + item + GRADIENT_BYTES) * matrix  # the rounded head and its gradient
    words = f"{tokens:,} tokens of {item} bytes a number, "
    return [
        MemoryPart(
            name="gathered weights",
            size_bytes=copies,
            words=f"{GATHERED_BLOCKS} blocks, and all outside of blocks in float32",
            key="parallel.ep" if spec.experts else "",
            lasts=False,
        ),
        MemoryPart(
            name="unsharded gradients",
            size_bytes=unreduced,
            words="of the gathered weights, until they are summed over all ranks",
            key="parallel.ep" if spec.experts else "",
            lasts=False,
        ),
        MemoryPart(
            name="activations",
            size_bytes=states if recomputes else sum(saved),
            words=words + ("one state per block" if recomputes else "all that each block keeps"),
            key="trainer.microbatch_tokens" if recomputes else "trainer.checkpoint_activations",
            lasts=False,
        ),
        MemoryPart(
            name="working set",
            size_bytes=max(backward, logits),
            words="a block of the backward pass" if backward > logits else f"logits of {chunk_rows:,} tokens",
            key="trainer.microbatch_tokens" if backward > logits else "",
            lasts=False,
        ),
    ]


def backward_bytes(spec: ModelSpec, tokens: int, item: int, block: int, outer: int) -> int:
    """Temporary bytes of a block's backward pass: gradients of its widest activations, and of its largest matrix before
    they are accumulated.
    """
    widest = max(spec.hidden_size, _widest(spec))
    return item * tokens * widest + (item + GRADIENT_BYTES) * min(block // 2, outer)


def activation_bytes(config: RunConfig) -> int:
    """Bytes of a number in the trainer's activations."""
    return (
        FLOAT if is_invariant(config.numerics, config.trainer.device) else DTYPES[config.numerics.stored_dtype].itemsize
    )


def _check_experts(experts: ExpertsSpec, hidden: int, ranks: int, ep: int) -> None:
    """Raise :class:`~etude.errors.ConfigError` for experts that cannot be distributed and sharded."""
    shards = ranks // ep
    if experts.count % ep or hidden % shards or 2 * experts.size % shards:
        raise ConfigError(
            f"parallel.ep = {ep} of {ranks} ranks: {experts.count} experts must divide by ep, and {hidden} and "
            f"{2 * experts.size} rows of their matrices by the {shards} ranks that hold the same experts; set "
            f"parallel.dp * parallel.cp and parallel.ep to powers of two"
        )


def _shard(kind: str, ranks: int) -> str:
    return f"{kind}, sharded over {ranks} ranks" if ranks > 1 else kind


# --- Engines ----------------------------------------------------------------------------------------------------------


def engine_memory(config: RunConfig, spec: ModelSpec, sizes: ModelSizes, gpu_bytes: int | None) -> ProcessMemory:
    """Memory of each engine."""
    problem = ""
    if isinstance(config.engine.options, NativeOptions):
        parts = _native_parts(config, spec, sizes)
    else:
        parts, problem = _server_parts(config, spec, sizes, gpu_bytes)
    gpus = engine_gpus(config)
    return ProcessMemory(name="engine", count=config.engine.replicas, gpus=gpus, parts=tuple(parts), problem=problem)


def _native_parts(config: RunConfig, spec: ModelSpec, sizes: ModelSizes) -> list[MemoryPart]:
    engine, item, on_gpu = config.engine, DTYPES[config.numerics.stored_dtype].itemsize, config.engine.device == "cuda"
    quantised = config.numerics.experts != "plain"
    weights = (sizes.outer + sum(sizes.shared)) * item + sum(sizes.routed) * (FLOAT if quantised else item)
    positions = -(-engine.resolved_cache_tokens // PAGE) * PAGE
    layers, slots = spec.routes_shape
    routes = 2 * layers * slots if config.numerics.replay not in ("off", "auto") else 0
    has_spare = engine.native.spare_weights and not config.lora.trains("rl")
    words = config.numerics.stored_dtype + (", routed experts in float32" if quantised else "")
    parts = [
        MemoryPart(name="weights", size_bytes=weights, words=words),
        MemoryPart(
            name="spare weights",
            size_bytes=weights if has_spare else 0,
            words="an update is written into them",
            key="engine.options.spare_weights" if has_spare else "",
        ),
        MemoryPart(
            name="cache",
            size_bytes=positions * (spec.cached_numbers * item + routes),
            words=f"{positions:,} positions of {spec.cached_numbers * item + routes:,} bytes",
            key="engine.options.cache_tokens",
        ),
    ]
    if on_gpu:
        rows = min(engine.max_running, engine.native.step_tokens)
        step = engine.native.step_tokens * _step_width(spec) * item + rows * spec.vocab_size * (item + 2 * FLOAT)
        parts += [
            MemoryPart(
                name="step",
                size_bytes=step,
                words=f"{engine.native.step_tokens:,} tokens, logits of {rows}",
                key="engine.options.step_tokens",
                lasts=False,
            ),
            MemoryPart(name="buffers", size_bytes=CONTEXT_BYTES + GRAPH_BYTES, words="CUDA's context, graphs"),
        ]
    return parts


def _server_parts(
    config: RunConfig, spec: ModelSpec, sizes: ModelSizes, gpu_bytes: int | None
) -> tuple[list[MemoryPart], str]:
    """Parts of a server's share of each GPU: weights, a step, and the cache in the rest. The text names the problem if
    the cache cannot hold one sequence.
    """
    match config.engine.options:
        case VllmOptions(arguments=arguments):
            share_key, tensor_key, share = "gpu-memory-utilization", "tensor-parallel-size", VLLM_SHARE
        case SglangOptions(arguments=arguments):
            share_key, tensor_key, share = "mem-fraction-static", "tp-size", SGLANG_SHARE
        case _:
            return [], ""
    if gpu_bytes is None:
        return [], ""
    keys = [f"engine.options.arguments.{key}" for key in (share_key, tensor_key)]
    tensor, pipeline, _ = engine_sizes(config)
    item, longest = DTYPES[config.numerics.stored_dtype].itemsize, config.engine.max_length
    taken = int(float(str(arguments.get(share_key, share))) * gpu_bytes)
    weights = -(-sizes.total // (tensor * pipeline)) * item
    step_tokens = int(str(arguments.get("max-num-batched-tokens", SERVER_STEP_TOKENS)))
    step = step_tokens * _step_width(spec) * item // tensor + config.engine.max_running * spec.vocab_size * FLOAT
    position = server_position_bytes(spec, item, tensor, pipeline)
    cache = max(0, taken - weights - step - CONTEXT_BYTES - GRAPH_BYTES)
    sequences = cache // (longest * position)
    parts = [
        MemoryPart(
            name="weights",
            size_bytes=weights,
            words=f"{config.numerics.stored_dtype}, over {tensor * pipeline} GPUs",
            key=keys[1],
        ),
        MemoryPart(
            name="cache",
            size_bytes=cache,
            words=f"{cache // position:,} positions of {position:,} bytes: {sequences:,} of engine.max_length",
            key=keys[0],
        ),
        MemoryPart(name="step", size_bytes=step, words=f"{step_tokens:,} tokens, logits", lasts=False),
        MemoryPart(name="buffers", size_bytes=CONTEXT_BYTES + GRAPH_BYTES, words="CUDA's context, graphs"),
    ]
    problem = (
        f"{config.engine.kind} takes {formatting.size(taken)} of each GPU: weights are {formatting.size(weights)}, a "
        f"step {formatting.size(step)}, and {formatting.size(cache)} are left for a cache, where one sequence of "
        f"engine.max_length = {longest} needs {formatting.size(longest * position)}: raise {keys[1]} or {keys[0]}, or "
        f"lower engine.max_length"
    )
    return parts, "" if sequences else problem


def server_position_bytes(spec: ModelSpec, item: int, tensor: int, pipeline: int) -> int:
    """Bytes of a position in vLLM's or SGLang's cache, per GPU: heads are divided, latents are not."""
    layers = math.ceil(spec.layers / pipeline)
    if isinstance(spec.attention, GroupedSpec):
        return layers * math.ceil(spec.attention.kv_heads / tensor) * 2 * spec.attention.head_dim * item
    return layers * spec.attention.key_width * item


def _step_width(spec: ModelSpec) -> int:
    """Numbers per token that a forward pass without gradients holds at once, in its widest block."""
    return 4 * spec.hidden_size + _widest(spec)


def _widest(spec: ModelSpec) -> int:
    """Numbers per token inside the widest feed-forward layer."""
    experts = spec.experts
    routed = 0 if experts is None else experts.per_token * (spec.hidden_size + 3 * experts.size)
    return max(3 * spec.dense_size, routed)


# --- This machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The processes that share one device."""

    device: str
    processes: tuple[ProcessMemory, ...]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(process.total for process in self.processes)

    def compare(self, free: int) -> str:
        """A warning if the device has less memory than its processes take; empty if it has enough.

        Raises :class:`~etude.errors.UserError` if one of them does not fit even alone.
        """
        needs = ", ".join(f"{formatting.size(process.total)} for the {process.name}" for process in self.processes)
        fixes = ", ".join(dict.fromkeys(fix for each in self.processes if (fix := each.fixes())))
        words = (
            f"{self.device} has {formatting.size(free)} of memory free, and this run takes {needs}: change {fixes} or "
            f"use a smaller model; `etude plan memory` shows the size of each part"
        )
        if max(process.least for process in self.processes) > free:
            raise UserError(words)
        return words if self.total > free else ""


def device_uses(config: RunConfig, plan: MemoryPlan, gpus: int) -> list[DeviceUse]:
    """The devices of one machine with ``gpus`` GPUs and the processes on each; equal devices appear once.

    Raises as :func:`~etude.run.gpus.divide_gpus` does.
    """
    shares = divide_gpus(config, gpus) if gpus else {}
    sides = {"trainer": plan.trainer, "engine": plan.engine}
    devices = {"trainer": resolve_device(config.trainer.device), "engine": resolve_device(config.engine.device)}
    host = [side for name, side in sides.items() if devices[name] == "cpu" for _ in range(side.count) if side.parts]
    cards = {name: side for name, side in sides.items() if devices[name] == "cuda" and side.parts}
    uses = [DeviceUse(device="cpu", processes=tuple(host))] if host else []
    if not shares and cards:
        return [*uses, DeviceUse(device="cuda:0", processes=tuple(cards.values()))]
    for name, side in cards.items():
        numbers = [
            gpu for process, own in shares.items() if (process == str(TRAINER)) == (name == "trainer") for gpu in own
        ]
        uses += [DeviceUse(device=f"cuda:{gpu}", processes=(side,)) for gpu in numbers]
    return uses


def check_memory(config: RunConfig, spec: ModelSpec) -> list[str]:
    """Warnings about the memory of this machine, for a resolved recipe. Raises as :meth:`DeviceUse.compare`."""
    plan = MemoryPlan.of(config, spec)
    return check_uses(device_uses(config, plan, count_gpus(config)))


def check_uses(uses: Sequence[DeviceUse], free: Mapping[str, int] | None = None) -> list[str]:
    """Warnings about devices; ``free`` has the free bytes of each, by default measured on this machine."""
    warnings = []
    for use in uses:
        available = _free_bytes(use.device) if free is None else free[use.device]
        if available is not None and (words := use.compare(available)):
            warnings.append(words)
    return warnings


def _free_bytes(device: str) -> int | None:
    """Free bytes of a device; ``None`` if the system does not report them."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return int(MemoryGauge().read().available_bytes)
    except InfrastructureError:
        return None
