"""Speed of a decode step and of a training step, predicted from bytes and operations (roofline: Williams et al. 2009).

    time of a part = max(bytes / (bandwidth · its share), operations / (peak · its share))

    decode step      each weight that the batch uses and each sequence's keys and values, read once; a fixed time
    training step    three times the operations of a forward pass; four times if activations are recomputed

The bandwidth is that of the device's own copies, the peak that of its own large products. Both are measured or, for a
GPU that this machine lacks, the data sheet's values times the shares that an H200 reached. The shares of kernels are
those that étude's kernels reached on that H200, with the shapes of docs/gpu.md; nothing else is fitted. Pure.
"""

from dataclasses import dataclass

from etude.config.recipe import RunConfig
from etude.models.flops import head_flops, pair_flops, token_flops
from etude.models.sizes import ModelSizes
from etude.models.spec import LatentSpec, ModelSpec
from etude.run.gpus import engine_sizes
from etude.run.hardware import GpuKind
from etude.run.memory_plan import server_position_bytes
from etude.run.numerics import DTYPES

SHORT_CONTEXT = 1024
"""Tokens of a short context."""
SCORED_SHARE = 0.4
"""Share of a batch's tokens that have a loss, as measured in docs/gpu.md."""
COPY_SHEET, PRODUCT_SHEET = 4.18 / 4.8, 775 / 989
"""Shares of an H200's data sheet that its copies and its bfloat16 products reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a device, and the shares of these rates that kernels reach."""

    bytes_per_s: float
    """Bytes per second that a copy reads and writes."""
    flops: float
    """Operations per second of a large product."""
    matrix_bytes: float = 0.82
    """Share of the bandwidth that products with few rows reach: 15.1 GB of Qwen3-8B in 4.4 ms."""
    grouped_bytes: float = 0.55
    """The same for products of experts: Qwen3-30B-A3B, 64 sequences."""
    cache_bytes: float = 0.88
    """The same for attention over the cache: Qwen3-8B, 64 sequences of 8,192 tokens."""
    latent_bytes: float = 0.26
    """The same for latent attention: DeepSeek-V3, 64 sequences of 8,192 tokens."""
    layer_s: float = 36e-6
    """Fixed time of a layer's small kernels in a decode step: 1.3 ms for 36 layers."""
    step_s: float = 1.1e-3
    """Fixed time of a decode step: 0.2 ms for sampling, 0.9 ms between two steps."""
    training: float = 0.55
    """Share of the peak that a training step reaches, with recomputed operations: layers of Qwen3-8B and Qwen3-1.7B."""
    grouped_training: float = 0.22
    """The same for a mixture of experts: 1 B parameters, 32 experts."""

    @classmethod
    def of_gpu(cls, kind: GpuKind) -> "Rates":
        """Rates of a GPU from its data sheet."""
        return cls(bytes_per_s=kind.bytes_per_s * COPY_SHEET, flops=kind.flops * PRODUCT_SHEET)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One token for each of some sequences, on one of the GPUs that share a model."""

    weight_bytes: int
    """Matrices that all tokens use."""
    expert_bytes: int
    """Routed experts that the batch uses: each of E experts with probability 1 − (1 − k/E)^batch."""
    cache_bytes: int
    flops: int
    layers: int
    is_latent: bool

    @classmethod
    def of(
        cls, spec: ModelSpec, *, batch: int, context: int, item: int, gpus: int = 1, cached_bytes: int | None = None
    ) -> "DecodeStep":
        """The step of ``batch`` sequences of ``context`` tokens, with ``item`` bytes per number.

        ``cached_bytes`` is the size of a cached position on one GPU, by default that of the native engine.
        """
        sizes, experts = ModelSizes.of(spec), spec.experts
        met = 1 - (1 - experts.per_token / experts.count) ** batch if experts else 0.0
        embedding = 0 if spec.tied else spec.vocab_size * spec.hidden_size
        flops = batch * (token_flops(spec) + head_flops(spec) + context * pair_flops(spec))
        return cls(
            weight_bytes=(sizes.outer - embedding + sum(sizes.shared)) * item // gpus,
            expert_bytes=int(met * sum(sizes.routed)) * item // gpus,
            cache_bytes=batch * context * (cached_bytes or spec.cached_numbers * item),
            flops=flops // gpus,
            layers=spec.layers,
            is_latent=isinstance(spec.attention, LatentSpec),
        )

    @property
    def least_bytes(self) -> int:
        """Bytes that the step must read."""
        return self.weight_bytes + self.expert_bytes + self.cache_bytes

    def seconds(self, rates: Rates) -> float:
        """Predicted time."""
        attention = rates.latent_bytes if self.is_latent else rates.cache_bytes
        reading = (
            self.weight_bytes / rates.matrix_bytes
            + self.expert_bytes / rates.grouped_bytes
            + self.cache_bytes / attention
        ) / rates.bytes_per_s
        return max(reading, self.flops / rates.flops) + self.layers * rates.layer_s + rates.step_s

    def bandwidth_share(self, rates: Rates) -> float:
        """Share of the copy bandwidth at which the step reads its bytes."""
        return self.least_bytes / rates.bytes_per_s / self.seconds(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """Forward and backward pass of the tokens of one rank."""

    flops: float
    """Operations that the model requires: three forward passes, with the head for scored tokens only."""
    again: float
    """Recomputed operations."""
    sent_bytes: float
    """Bytes of weights that a rank receives and of gradients that it sends; 0 for a single rank."""
    is_grouped: bool

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        tokens: int,
        length: int,
        recomputes: bool,
        ranks: int = 1,
        ep: int = 1,
    ) -> "TrainingStep":
        """The pass of ``tokens`` in sequences of ``length``. Gathered blocks have two bytes per number, and are
        gathered twice if the pass ``recomputes``; gradients are summed in four bytes.
        """
        layers = tokens * (token_flops(spec) + length / 2 * pair_flops(spec))
        head = tokens * SCORED_SHARE * head_flops(spec)
        sizes = ModelSizes.of(spec)
        gathered = sum(sizes.shared) + sum(sizes.routed) / ep
        moved = gathered * (2 * (2 if recomputes else 1) + 4) + sizes.outer * 8 if ranks > 1 else 0.0
        return cls(
            flops=3 * (layers + head),
            again=head + (layers if recomputes else 0.0),
            sent_bytes=moved,
            is_grouped=spec.experts is not None,
        )

    def seconds(self, rates: Rates) -> float:
        """Predicted time of the arithmetic; transfers overlap with it."""
        share = rates.grouped_training if self.is_grouped else rates.training
        return (self.flops + self.again) / (rates.flops * share)

    def utilisation(self, rates: Rates, *, peak: float | None = None) -> float:
        """Model FLOPs utilisation, relative to ``peak``; default: the rate of the device's own products."""
        return self.flops / self.seconds(rates) / (peak or rates.flops)


def decode_steps(config: RunConfig, spec: ModelSpec) -> dict[int, DecodeStep]:
    """Context → the decode step of a resolved recipe's engine with all its sequences, for a short context and the
    longest.

    The stages of a pipeline run one after the other: a step passes all of them.
    """
    item, batch, longest = (
        DTYPES[config.numerics.stored_dtype].itemsize,
        config.engine.max_running,
        config.engine.max_length,
    )
    tensor, _, _ = engine_sizes(config)
    cached = None if config.engine.kind == "native" else server_position_bytes(spec, item, tensor, 1)
    return {
        context: DecodeStep.of(spec, batch=batch, context=context, item=item, gpus=tensor, cached_bytes=cached)
        for context in sorted({min(SHORT_CONTEXT, longest), longest})
    }


def training_pass(config: RunConfig, spec: ModelSpec) -> TrainingStep:
    """One pass of a resolved recipe's trainer, on one rank."""
    trainer, parallel = config.trainer, config.parallel
    return TrainingStep.of(
        spec,
        tokens=trainer.microbatch_tokens // parallel.cp,
        length=min(config.engine.max_length, trainer.microbatch_tokens),
        recomputes=trainer.recomputes,
        ranks=parallel.ranks,
        ep=parallel.ep,
    )


def measured_rates(*, bytes_per_s: float, flops: float) -> Rates:
    """Rates of a measured device, with every share 1 and no fixed times."""
    return Rates(
        bytes_per_s=bytes_per_s,
        flops=flops,
        matrix_bytes=1.0,
        grouped_bytes=1.0,
        cache_bytes=1.0,
        latent_bytes=1.0,
        layer_s=0.0,
        step_s=0.0,
        training=1.0,
        grouped_training=1.0,
    )
