"""The native engine: starts it, and updates the weights of its model in place.

    update ──stage──▶ writes into the spare model ──swap──▶ it serves; the other becomes the spare

A checkpoint's tensors are views into the model's parameters (``models/naming.py``), so each changed number is written
in place: the cost of an update depends on the number of changes, not on the size of the model. With a spare the engine
has its weights twice, and sampling pauses only to exchange two references. Without a spare, the writes happen between
two steps.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from etude.config.inference import EngineConfig
from etude.engines.kinds import EngineContext, ServedEngine, Swap, WeightUpdate
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.scatter import SIGNED, Load, Scatter, check_change, scatter_of, write_to
from etude.errors import InfrastructureError
from etude.models.checkpoint import state_views
from etude.models.decoder import Decoder
from etude.telemetry.events import EngineStats
from etude.telemetry.log import EventLog
from etude.types import TensorSpec
from etude.weights.device import STORED_TYPES, digest_tensor
from etude.weights.digest import Digest, layout_digest
from etude.weights.replica import ChangedNumbers, PulledWeights
from etude.weights.state import Region, spec_key
from etude.weights.tensors import to_tensors

STATS_S = 1.0
"""Seconds between two reports of the load."""
PROOF_EVERY = 16
"""Versions between two comparisons of the resident weights with the published digest."""

Changed: TypeAlias = Mapping[str, Sequence[ChangedNumbers]] | None
"""The numbers that one version changed, by tensor; ``None``: so many that the whole state is loaded."""


@asynccontextmanager
async def open_native(context: EngineContext, pulled: PulledWeights) -> AsyncIterator[ServedEngine]:
    """Load a version into each model that the recipe asks for, verify them, and serve the first."""
    config, routes = context.config.engine, context.config.numerics.replay != "off"
    torch.set_num_threads(config.native.threads)
    open_updater = partial(NativeUpdater.open, pulled, config, context.make_model, context.load, record_routes=routes)
    updater = await asyncio.to_thread(open_updater)
    tasks = (updater.engine.run, lambda: report_load(updater.engine, context.events))
    yield ServedEngine(engine=updater.engine, updater=updater, tasks=tasks)


@final
class ResidentModel:
    """One copy of a model's weights, moved from version to version in place."""

    def __init__(self, model: Decoder, load: Load, pulled: PulledWeights) -> None:
        """Load ``pulled`` into ``model`` with ``load`` and verify it; raises as :meth:`prove` does."""
        self.model = model
        self._load = load
        self._specs = {name: stored.spec for name, stored in pulled.state.items()}
        self._views = {name: view for name, view in state_views(model) if _holds(view, self._specs.get(name))}
        self._behind: list[Changed] = []
        load(to_tensors(pulled.state))
        self.prove(pulled.version, pulled.digest)

    def fall_behind(self, changed: Changed) -> None:
        """Record what a version changed, without writing it yet."""
        self._behind.append(changed)

    def catch_up(self, whole: Mapping[str, Tensor]) -> list[Scatter]:
        """Prepare the writes up to the newest recorded version, in order; ``whole`` is its full state."""
        behind, self._behind = self._behind, []
        scatters = []
        for changed in behind:
            if changed is None or changed.keys() - self._views.keys():
                return [Scatter(writes=(), reload=lambda: self._load(whole))]
            scatters.append(self._scatter(changed))
        return scatters

    def digest(self) -> str:
        """The state digest, in hex, of the resident weights, computed in place."""
        parts = (
            digest_tensor(view, spec_key(self._specs[name]), Region.run(0, view.numel()))
            for name, view in self._views.items()
        )
        return (layout_digest(self._specs.values()) + sum(parts, start=Digest.ZERO)).hex()

    def prove(self, version: int, digest: str) -> None:
        """Verify the resident weights. Raises :class:`~etude.errors.InfrastructureError` if they do not have this
        ``digest``.

        Quantised experts are resident in decoded form and cannot be verified here; they were verified when pulled.
        """
        if self._specs.keys() == self._views.keys() and (resident := self.digest()) != digest:
            raise InfrastructureError(
                f"the engine holds {resident[:12]}, but weight version {version} is {digest[:12]}: restart the engine, "
                f"which then loads it anew"
            )

    def _scatter(self, changed: Mapping[str, Sequence[ChangedNumbers]]) -> Scatter:
        """One write per parameter, for any number of changed views."""
        parts: dict[int, tuple[Tensor, list[Tensor], list[Tensor]]] = {}
        for name, runs in changed.items():
            view = self._views[name]
            parameter, positions, bits = parts.setdefault(view.untyped_storage().data_ptr(), (_flat(view), [], []))
            for run in runs:
                check_change(self._specs[name], run)
                positions.append(torch.from_numpy(run.indices.astype(np.int64) + view.storage_offset()))
                bits.append(torch.from_numpy(np.array(run.bits)).view(parameter.dtype))
        return scatter_of(
            write_to(parameter, torch.cat(positions), torch.cat(bits)) for parameter, positions, bits in parts.values()
        )


@final
class NativeUpdater:
    """Updates a native engine from version to version; implements :class:`~etude.engines.kinds.WeightUpdater`."""

    def __init__(self, engine: NativeEngine, residents: Sequence[ResidentModel]) -> None:
        """The first of the ``residents`` is served; a second one is the spare."""
        self.engine = engine
        self._residents = list(residents)
        self._latest: PulledWeights | None = None

    @classmethod
    def open(
        cls,
        pulled: PulledWeights,
        config: EngineConfig,
        make_model: Callable[[], Decoder],
        load: Callable[[Decoder, Mapping[str, Tensor]], None],
        *,
        record_routes: bool = False,
    ) -> "NativeUpdater":
        """An engine that serves ``pulled``, with as many models as ``config`` keeps, and its updater."""
        models = [make_model()]
        if config.native.spare_weights and models[0].adapters is None:  # an adapter is small and fast to write
            models.append(make_model())
        residents = [ResidentModel(model, partial(load, model), pulled) for model in models]
        engine = NativeEngine(
            Weights(residents[0].model, pulled.version, pulled.digest),
            config,
            seed=secrets.randbits(64),  # a restarted engine must not repeat the numbers of the one before
            record_routes=record_routes,
        )
        return cls(engine, residents)

    @property
    def version(self) -> int:
        """The weight version being served."""
        return self.engine.weights.version

    def stage(self, update: WeightUpdate) -> Swap:
        """Write an update into the spare model, or prepare the writes if there is none."""
        pulled = self._latest = update.weights
        for resident in self._residents:
            resident.fall_behind(update.changed)
        self._residents.append(self._residents.pop(0))  # the spare becomes the first; a single model stays in place
        chosen = self._residents[0]
        is_proof = pulled.version % PROOF_EVERY == 0
        scatters = chosen.catch_up(to_tensors(pulled.state))
        if len(self._residents) > 1:
            while scatters:
                scatters.pop(0).apply()
            if is_proof:
                chosen.prove(pulled.version, pulled.digest)

        async def swap() -> float:
            pause_s = await self.engine.swap(Weights(chosen.model, pulled.version, pulled.digest), scatters)
            if scatters and is_proof:
                chosen.prove(pulled.version, pulled.digest)
            return pause_s

        return swap

    def settle(self) -> None:
        """Write the swapped-in update into the spare as well."""
        if self._latest is None:
            return
        for spare in self._residents[1:]:
            for scatter in spare.catch_up(to_tensors(self._latest.state)):
                scatter.apply()
        self._latest = None


async def report_load(engine: NativeEngine, events: EventLog) -> None:
    """Log the engine's load statistics, once per ``STATS_S``."""
    busy_s, since_s = engine.busy_s, time.perf_counter()
    while True:
        await asyncio.sleep(STATS_S)
        counters, health, now_s = engine.take_counters(), await engine.health(), time.perf_counter()
        events.write(
            EngineStats(
                busy_s=engine.busy_s - busy_s,
                window_s=now_s - since_s,
                generated_tokens=counters.generated_tokens,
                prefill_tokens=counters.prefill_tokens,
                reused_tokens=counters.reused_tokens,
                running=health.running,
                waiting=health.waiting,
                drafted_tokens=counters.drafted_tokens,
                accepted_tokens=counters.accepted_tokens,
                steps=counters.steps,
            )
        )
        busy_s, since_s = engine.busy_s, now_s


def _holds(view: Tensor, spec: TensorSpec | None) -> bool:
    """True if a view has the numbers of a published tensor unchanged, which is false for a quantised one."""
    return spec is not None and spec.dtype == STORED_TYPES[view.dtype] and spec.shape == tuple(view.shape)


def _flat(view: Tensor) -> Tensor:
    """[n] the whole parameter that ``view`` is a part of, as integers of its numbers' width."""
    assert view.is_contiguous(), f"a view of shape {list(view.shape)} and strides {view.stride()} has gaps"
    count = view.untyped_storage().nbytes() // view.element_size()
    return view.detach().as_strided((count,), (1,), 0).view(SIGNED[view.element_size()])
