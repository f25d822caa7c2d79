"""The modelled speed and cost of a run on given GPUs, without running it.

    recipe, model shape, GPUs, workload, assumptions ──▶ RunCalibration ──▶ simulation (:mod:`etude.simulation.run`)
                                                  figures of the simulation ──▶ money, operations, bytes between regions

    decode step     a line through the times of :class:`~etude.run.roofline.DecodeStep` at 1/8 of an engine's places
                    and at all of them
    prompts         operations of a forward pass, over peak · share
    trainer         :class:`~etude.run.roofline.TrainingStep` (three forward passes, a fourth if activations are
                    recomputed: 6 to 8 · parameters · tokens) over ranks · peak · share, and the optimiser's bytes
    new weights     a share of the parameters' bytes, over the slower of trainer's and region's link

The efficiency of each is a named assumption (:class:`Assumptions`). Pure.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import exp
from random import Random
from typing import Self

from pydantic import Field, model_validator

from etude.config.recipe import RunConfig
from etude.config.section import Section
from etude.errors import ConfigError
from etude.models.flops import head_flops, pair_flops, token_flops
from etude.models.sizes import ModelSizes
from etude.models.spec import ModelSpec
from etude.run.gpus import engine_sizes
from etude.run.hardware import GpuSheet, Market, gpu_sheet, load_gpus
from etude.run.memory_plan import server_position_bytes
from etude.run.roofline import DecodeStep, Rates, TrainingStep
from etude.simulation.calibration import RunCalibration, TrainerTimes
from etude.simulation.engine import EngineRates
from etude.simulation.figures import HOUR_S, RunFigures
from etude.simulation.run import Lent, RegionModel
from etude.simulation.workload import RolloutWork, Workload

CACHE_BYTES = 2
"""Bytes of one number in an engine's cache."""
MEMORY_SHARE = 0.9
"""Share of a GPU's memory that an engine may fill, as servers do by default."""
GROUPS = 64
"""Number of rollout groups in a drawn workload."""
GIGABIT = 1e9 / 8
DAY_H = 24.0


class WorkloadShape(Section):
    """``[workload]``: the mean rollout, and the spread of rollout lengths."""

    turns: int = Field(default=8, ge=1)
    sampled_tokens: int = Field(default=2_000, ge=1)
    """Tokens that the model samples, over all turns."""
    prompt_tokens: int = Field(default=4_000, ge=1)
    """Tokens that the model reads, over all turns: task and tool outputs, without those in the engine's cache."""
    spread: float = Field(default=0.7, ge=0)
    """Standard deviation of the logarithm of a rollout's length."""
    sandbox_s: float = Field(default=2.0, ge=0)
    tools_s: float = Field(default=30.0, ge=0)
    """Commands of the agent, over all turns."""
    grading_s: float = Field(default=20.0, ge=0)

    @property
    def tokens(self) -> int:
        """Tokens of a trajectory: all of them are computed in training, the sampled ones have a loss."""
        return self.sampled_tokens + self.prompt_tokens


class Assumptions(Section):
    """``[assumptions]``: shares of the hardware's peak, and times, that are not measured here."""

    training_share: float | None = Field(default=None, gt=0, le=4)
    """Speed of the trainer as a share of its peak in bfloat16, which kernels in FP8 can exceed twofold and in FP4
    fourfold; ``None``: the share of étude's trainer on an H200 (0.55, mixtures 0.22).
    """
    prefill_share: float | None = Field(default=None, gt=0, le=4)
    """The same for an engine that reads prompts; ``None``: as ``training_share``."""
    grouped_bytes_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the bandwidth with which experts are read; ``None``: 0.55, the share of étude's kernels."""
    latent_bytes_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the bandwidth with which latent attention reads its cache; ``None``: 0.26, the share of étude's kernels.
    """
    weight_bytes: int = Field(default=2, ge=1, le=2)
    """Bytes of a weight in engines; 1 for FP8."""
    published_bytes: int = Field(default=2, ge=1, le=2)
    """Bytes of a weight in a published version, of which a delta is a share; 1 for FP8."""
    optimiser_bytes: float = Field(default=30.0, ge=0)
    """Bytes that an optimiser step reads and writes per parameter: AdamW with a float32 gradient and master copy."""
    save_s: float = Field(default=1.0, ge=0)
    """Between two steps, for a copy of the weights."""
    delta_share: float = Field(default=0.02, gt=0, le=1)
    """Share of a version that is published: at a learning rate of 1e-6, 1.5 to 4 % of bfloat16 weights change
    (docs/weights.md)."""
    encode_gb_s: float = Field(default=2.0, gt=0)
    """Gigabytes of parameters that each machine of the trainer compares and encodes per second, during a step."""
    upload_gbit_s: float = Field(default=100.0, gt=0)
    """Bandwidth from the whole trainer to the store."""
    swap_s: float = Field(default=2.0, ge=0)
    """From a version's arrival in a region until its engines sample with it."""
    call_s: float = Field(default=0.05, ge=0)
    """Seconds of a model call outside the engine."""
    machine_gpus: int = Field(default=8, ge=1)
    """GPUs per machine."""
    egress_usd_gb: float = Field(default=0.02, ge=0)
    """Price of a gigabyte sent from home to another region: AWS between regions of the US,
    https://repost.aws/articles/ARjzluyMS8RbeOOK4MGXRG6Q, read 2026-11-28."""


class PlannedRegion(Section):
    """``[[regions]]``: a site with engines."""

    name: str
    engines: int = Field(ge=1)
    lent_engines: int = Field(default=0, ge=0)
    """Engines that production lends in the hours of ``lent``."""
    lent: tuple[float, float] = (20.0, 8.0)
    """First and last hour of the day."""
    lent_usd_share: float = Field(default=1.0, ge=0)
    """Their price in these hours, as a share of the market price."""
    rtt_ms: float = Field(default=0.0, ge=0)
    """Round-trip time from home; 0: it is home."""
    link_gbit_s: float = Field(default=10.0, gt=0)
    """Bandwidth from the store at home to the region's store."""

    @property
    def paid_share(self) -> float:
        """Cost of its engines, as a share of their price if all of them are used all day."""
        paid = (self.lent[1] - self.lent[0]) % DAY_H / DAY_H * self.lent_usd_share
        return (self.engines - self.lent_engines * (1 - paid)) / self.engines

    @model_validator(mode="after")
    def _check_lent(self) -> Self:
        begin, end = self.lent
        if not (min(begin, end) >= 0 and max(begin, end) < DAY_H and begin != end):
            raise ValueError("lent: expected two different hours from 0 to below 24")
        if self.lent_engines >= self.engines:
            raise ValueError(
                f"lent_engines: {self.lent_engines} of {self.engines} engines leave none in the other hours"
            )
        return self


class PricedPlan(Section):
    """A file for ``etude plan run --hardware``: everything of a plan that is not in its recipe."""

    engine: str = "h100"
    """GPU of engines."""
    trainer: str = "h100"
    engine_market: Market = "on_demand"
    trainer_market: Market = "on_demand"
    workload: WorkloadShape = WorkloadShape()
    assumptions: Assumptions = Assumptions()
    regions: tuple[PlannedRegion, ...] = ()
    """None: all engines are at home, ``engine.replicas`` of them."""
    gpus: dict[str, GpuSheet] = Field(default_factory=dict)
    """Your own GPUs by name; they replace built-in ones of the same name."""

    @property
    def places(self) -> tuple[PlannedRegion, ...]:
        """The regions; without any, a single one at home."""
        return self.regions or (PlannedRegion(name="home", engines=1),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Input of a plan's computation: a recipe's model and sizes on a plan's GPUs."""

    config: RunConfig
    spec: ModelSpec
    sizes: ModelSizes
    plan: PricedPlan
    ranks: int
    """GPUs that train."""
    engines: tuple[int, ...]
    """Engines of each region."""

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec, plan: PricedPlan) -> "Fleet":
        """The fleet of a resolved recipe. Raises :class:`~etude.errors.ConfigError` if the engines cannot hold the
        model.
        """
        engines = tuple(region.engines for region in plan.regions) or (config.engine.replicas,)
        sizes = ModelSizes.of(spec)
        fleet = cls(config=config, spec=spec, sizes=sizes, plan=plan, ranks=config.parallel.ranks, engines=engines)
        fleet.check()
        return fleet

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        tensor, pipeline, data = engine_sizes(self.config)
        return tensor * pipeline * data

    @property
    def sampling_gpus(self) -> int:
        """GPUs of all engines."""
        return sum(self.engines) * self.engine_gpus

    @property
    def context(self) -> int:
        """Tokens of a sequence in an engine's cache, averaged over its turns."""
        return self.plan.workload.tokens // 2

    @property
    def rollouts(self) -> int:
        """Rollouts of a step."""
        return self.config.rollouts.rollouts_per_step

    @property
    def regions(self) -> tuple[RegionModel, ...]:
        """The regions for a simulation; the size of a version determines its arrival time."""
        return tuple(
            RegionModel(
                name=region.name,
                engines=engines,
                rtt_s=region.rtt_ms / 1e3,
                arrival_s=self.delta_bytes / (region.link_gbit_s * GIGABIT) if region.rtt_ms else 0.0,
                lent=lent_of(region) if region.lent_engines else None,
            )
            for region, engines in zip(self.plan.places, self.engines, strict=True)
        )

    @property
    def remote_regions(self) -> int:
        """Number of regions other than home."""
        return sum(region.rtt_ms > 0 for region in self.plan.regions)

    @property
    def delta_bytes(self) -> float:
        """Bytes of one published version."""
        return self.sizes.total * self.plan.assumptions.published_bytes * self.plan.assumptions.delta_share

    @property
    def delta_s(self) -> float:
        """Seconds from a step's end until the last region's engines sample with its weights."""
        trainer = self.calibration.trainer
        arrival_s = max(region.arrival_s + region.rtt_s for region in self.regions)
        return trainer.save_s + trainer.publish_s + arrival_s + self.plan.assumptions.swap_s

    @property
    def training_flops(self) -> float:
        """Operations of the training in a step."""
        return self._training(self.rollouts * self.plan.workload.tokens).flops

    @property
    def sampling_flops(self) -> float:
        """Operations of the rollouts of a step."""
        work = self.plan.workload
        read = work.tokens * (token_flops(self.spec) + self.context * pair_flops(self.spec))
        return float(self.rollouts * (read + work.sampled_tokens * head_flops(self.spec)))

    @property
    def calibration(self) -> RunCalibration:
        """The speeds of all modelled parts."""
        assumed = self.plan.assumptions
        machines = -(-self.ranks // assumed.machine_gpus)
        encode_s = self.sizes.total * assumed.published_bytes / (machines * assumed.encode_gb_s * 1e9)
        upload_s = self.delta_bytes / (assumed.upload_gbit_s * GIGABIT)
        rates, tokens = self._rates(self.plan.trainer), self.plan.workload.tokens
        trained_s = self._training(tokens).seconds(rates) / self.ranks  # of a rollout
        state_bytes = self.sizes.total * assumed.optimiser_bytes / self.ranks
        return RunCalibration(
            engine=self._engine_rates(),
            trainer=TrainerTimes(
                fixed_s=state_bytes / rates.bytes_per_s,
                token_s=trained_s / self.plan.workload.sampled_tokens,
                save_s=assumed.save_s,
                publish_s=encode_s + upload_s,
            ),
            swap_s=assumed.swap_s,
            call_s=assumed.call_s,
            workload=draw_workload(self.plan.workload),
        )

    def check(self) -> None:
        """Raise :class:`~etude.errors.ConfigError` if an engine's GPUs cannot hold the weights or the cache."""
        tokens, longest = self.plan.workload.tokens, self.config.engine.max_length
        if tokens > longest:
            raise ConfigError(
                f"rollouts of {tokens:,} tokens (workload.prompt_tokens, workload.sampled_tokens) are longer than "
                f"engine.max_length = {longest:,}: raise that, or make them shorter"
            )
        sheet = self.sheet(self.plan.engine)
        tensor, pipeline, data = engine_sizes(self.config)
        routed, item = sum(self.sizes.routed), self.plan.assumptions.weight_bytes
        weights = (self.sizes.total - routed + routed / data) * item / (tensor * pipeline)
        cache = self.config.engine.max_running * self.context * self._position_bytes / (data * pipeline)
        room = sheet.kind.memory_bytes * MEMORY_SHARE
        if weights + cache > room:
            raise ConfigError(
                f"an engine of {self.engine_gpus} {self.plan.engine} has {room / 1e9:.0f} GB on each: weights take "
                f"{weights / 1e9:.0f} and {self.config.engine.max_running} sequences of {self.context:,} tokens "
                f"{cache / 1e9:.0f}; lower engine.max_running, give it more GPUs (engine.options.arguments) or take "
                f"assumptions.weight_bytes=1"
            )

    def sheet(self, name: str) -> GpuSheet:
        """A GPU of the plan. Raises :class:`~etude.errors.ConfigError`."""
        return gpu_sheet(load_gpus(self.plan.gpus), name)

    @property
    def _position_bytes(self) -> int:
        """Bytes of one token in the cache of one GPU of an engine."""
        tensor, _, _ = engine_sizes(self.config)
        return server_position_bytes(self.spec, CACHE_BYTES, tensor, 1)

    @property
    def assumptions(self) -> Assumptions:
        """The plan's assumptions; missing shares are those that étude's own kernels reached."""
        assumed, rates = self.plan.assumptions, self._rates(self.plan.trainer)
        training = _training_share(rates, self.spec)
        return assumed.model_copy(
            update={
                "training_share": training,
                "prefill_share": assumed.prefill_share or training,
                "grouped_bytes_share": rates.grouped_bytes,
                "latent_bytes_share": rates.latent_bytes,
            }
        )

    def _rates(self, gpu: str) -> Rates:
        """Rates of a GPU with the assumed shares."""
        assumed, rates = self.plan.assumptions, Rates.of_gpu(self.sheet(gpu).kind)
        return replace(
            rates,
            training=assumed.training_share or rates.training,
            grouped_training=assumed.training_share or rates.grouped_training,
            grouped_bytes=assumed.grouped_bytes_share or rates.grouped_bytes,
            latent_bytes=assumed.latent_bytes_share or rates.latent_bytes,
        )

    def _training(self, tokens: int) -> TrainingStep:
        return TrainingStep.of(
            self.spec, tokens=tokens, length=self.plan.workload.tokens, recomputes=self.config.trainer.recomputes
        )

    def _engine_rates(self) -> EngineRates:
        rates, places = self._rates(self.plan.engine), self.config.engine.max_running
        few = max(1, places // 8)
        low_s, high_s = (self._decode_s(batch, rates) for batch in (few, places))
        sequence_s = max(0.0, high_s - low_s) / max(1, places - few)
        share = self.plan.assumptions.prefill_share or _training_share(rates, self.spec)
        read = token_flops(self.spec) + self.context * pair_flops(self.spec)
        return EngineRates(
            step_s=max(0.0, high_s - places * sequence_s),
            sequence_s=sequence_s,
            prompt_s=read / (self.engine_gpus * rates.flops * share),
            max_running=places,
        )

    def _decode_s(self, batch: int, rates: Rates) -> float:
        """Seconds of a step; with data parallelism each rank has its own sequences, and all ranks share the experts."""
        tensor, _, data = engine_sizes(self.config)
        step = DecodeStep.of(
            self.spec,
            batch=batch,
            context=self.context,
            item=self.plan.assumptions.weight_bytes,
            gpus=tensor * data,
            cached_bytes=self._position_bytes,
        )
        return replace(step, weight_bytes=step.weight_bytes * data, cache_bytes=step.cache_bytes // data).seconds(rates)


@cache
def draw_workload(shape: WorkloadShape) -> Workload:
    """Groups of rollouts whose lengths have the mean and the spread of a shape; those of a group share half of it."""
    random = Random(0)
    half = shape.spread / 2**0.5
    lengths = [
        [exp(group + random.gauss(0.0, half) - shape.spread**2 / 2) for _ in range(4)]
        for group in (random.gauss(0.0, half) for _ in range(GROUPS))
    ]
    mean = sum(map(sum, lengths)) / (4 * GROUPS)
    return Workload(tuple(tuple(_work(shape, length / mean) for length in group) for group in lengths))


def _work(shape: WorkloadShape, factor: float) -> RolloutWork:
    turns = max(1, round(shape.turns * factor))
    return RolloutWork(
        turns=turns,
        sampled_tokens=max(turns, round(shape.sampled_tokens * factor)),
        prompt_tokens=max(turns, round(shape.prompt_tokens * factor)),
        sandbox_s=shape.sandbox_s,
        tools_s=shape.tools_s * factor,
        grading_s=shape.grading_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a step and of an hour."""

    engine_usd_h: float
    trainer_usd_h: float
    egress_usd_step: float
    step_s: float

    @classmethod
    def of(cls, fleet: Fleet, figures: RunFigures) -> "Costs":
        """Compute them. Raises :class:`~etude.errors.ConfigError` for a GPU without a price."""
        paid = sum(engines * region.paid_share
                   for region, engines in zip(fleet.plan.places, fleet.engines, strict=True))  # fmt: skip
        return cls(
            engine_usd_h=paid * fleet.engine_gpus * gpu_price(fleet, fleet.plan.engine, fleet.plan.engine_market),
            trainer_usd_h=fleet.ranks * gpu_price(fleet, fleet.plan.trainer, fleet.plan.trainer_market),
            egress_usd_step=fleet.remote_regions * fleet.delta_bytes / 1e9 * fleet.plan.assumptions.egress_usd_gb,
            step_s=figures.step_s,
        )

    @property
    def usd_step(self) -> float:
        """Dollars of a step."""
        return (self.engine_usd_h + self.trainer_usd_h) * self.step_s / HOUR_S + self.egress_usd_step

    @property
    def usd_h(self) -> float:
        """Dollars of an hour."""
        return self.usd_step * HOUR_S / self.step_s


def lent_of(region: PlannedRegion) -> Lent:
    """The engines that production lends to a region."""
    begin_s, end_s = (HOUR_S * hour for hour in region.lent)
    share = region.lent_engines / region.engines
    return Lent(share=share, day_s=HOUR_S * DAY_H, begin_s=begin_s, end_s=end_s)


def gpu_price(fleet: Fleet, name: str, market: Market) -> float:
    """Dollars for an hour of a GPU. Raises :class:`~etude.errors.ConfigError` if there is no price."""
    price = fleet.sheet(name).price(market)
    if price is None:
        raise ConfigError(f"no {market} price of {name!r} is known: give {market}_usd_h under [gpus.{name}] of a file")
    return price.value


def _training_share(rates: Rates, spec: ModelSpec) -> float:
    """Share of the peak that a training step reaches."""
    return rates.grouped_training if spec.experts else rates.training
