"""Keeping an engine's weights on the newest version of a log, with hardly a pause.

    log ──fetch, verify──▶ copy on the host ──what changed──▶ spare model ──swap──▶ serves; the other is the spare now

With a spare the engine holds its weights twice: changes are written into the model that does not serve, and the pause
is that of exchanging two references. Without one they are written into the serving model between two steps. Either way
an update costs what changed, not what there is; where very much changed, everything is loaded.
"""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.engines.inplace import RELOAD_SHARE, InPlaceWeights, Scatter
from etude.engines.native import NativeEngine, Weights
from etude.errors import DamagedError, InfrastructureError
from etude.models.spec import ModelSpec
from etude.run.numerics import load_published, serving_model
from etude.run.states import to_tensors
from etude.weights.log import WeightLog
from etude.weights.pull import Arrival, Receiver
from etude.weights.replica import ChangedNumbers, PulledWeights

PROOF_EVERY = 16
"""Every how many versions the resident weights are read and compared with what was published."""
LEASE_S = 30.0
"""How often the engine says which version it holds, so that nothing it needs is collected."""

Changed: TypeAlias = Mapping[str, Sequence[ChangedNumbers]] | None
"""What one version changed, by tensor; ``None`` for so much that everything shall be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How weights are served."""

    spec: ModelSpec
    numerics: NumericsConfig
    device: str
    spare: bool
    """Whether they are held twice."""


@final
class ResidentModel:
    """One copy of a model's weights, moved from version to version in place."""

    def __init__(self, pulled: PulledWeights, serving: Serving) -> None:
        self.model = serving_model(serving.spec, serving.numerics, serving.device)
        self._load = partial(load_published, self.model, config=serving.numerics)
        specs = [stored.spec for stored in pulled.state.values()]
        self._weights = InPlaceWeights(dict(self.model.named_parameters()), self._load, specs)
        self._load(to_tensors(pulled.state))
        self._behind: list[Changed] = []

    def fall_behind(self, changed: Changed) -> None:
        """Take note of a version without writing it yet."""
        self._behind.append(changed)

    def catch_up(self, whole: Mapping[str, Tensor]) -> list[Scatter]:
        """The writes that lead to the newest version noted, in order; ``whole`` is all of that version."""
        behind, self._behind = self._behind, []
        if None in behind:
            return [Scatter(writes=(), reload=lambda: self._load(whole))]
        return [self._weights.prepare(changed, whole) for changed in behind if changed is not None]

    def prove(self, version: int, digest: str) -> None:
        """Read the weights. Raises :class:`~etude.errors.DamagedError` when they are not those of ``digest``.

        Quantised experts are held decoded: what was pulled was proven, what is resident of them cannot be.
        """
        if self._weights.reloading:
            return
        if (found := self._weights.digest()) != digest:
            raise DamagedError(
                f"the engine holds {found[:12]}, weight version {version} is {digest[:12]}: it must load it anew"
            )


@final
class WeightFollower:
    """Moves one engine to the newest version of a log; for one thread at a time."""

    def __init__(self, log: WeightLog, serving: Serving) -> None:
        self.log = log
        self._serving = serving
        self._copies = 2 if serving.spare else 1
        self._residents: list[ResidentModel] = []
        self._receiver = Receiver(log)
        self._lease = log.lease(f"engine-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._leased_s: float | None = None

    def start(self) -> Weights:
        """Fetch the newest version, learn the model's layout, load it and prove what it holds."""
        self._receiver.advance()
        self._renew_lease()
        pulled = self._receiver.weights()
        self._residents = [ResidentModel(pulled, self._serving) for _ in range(self._copies)]
        for resident in self._residents:
            resident.prove(pulled.version, pulled.digest)
        return Weights(self._residents[0].model, pulled.version, pulled.digest)

    def prefetch(self) -> None:
        """Fetch what is announced of the next version."""
        self._receiver.prefetch()

    def stage(self) -> tuple[Weights, list[Scatter]]:
        """Fetch the newest version and prepare it; nothing that serves is touched.

        Returns what shall serve and what has to be written into it in the pause, which is nothing when there is a
        spare. To be swapped in before the next call. After an :class:`~etude.errors.InfrastructureError` of the store
        the next call goes on from there.
        """
        arrival = self._advance()
        pulled = self._receiver.weights()
        dense = self._receiver.changed_share(arrival) * RELOAD_SHARE > 1
        changed = None if dense else self._receiver.changed(arrival)
        for resident in self._residents:
            resident.fall_behind(changed)
        self._residents.append(self._residents.pop(0))  # the spare comes first; alone, a model is its own
        chosen = self._residents[0]
        scatters = chosen.catch_up(to_tensors(pulled.state))
        if self._copies > 1:
            for scatter in scatters:
                scatter.apply()
            scatters = []
            if pulled.version % PROOF_EVERY == 0:
                chosen.prove(pulled.version, pulled.digest)
        return Weights(chosen.model, pulled.version, pulled.digest), scatters

    async def swap_into(self, engine: NativeEngine, weights: Weights, scatters: Sequence[Scatter]) -> float:
        """Let ``engine`` sample with what was staged; returns the pause in seconds."""
        pause_s = await engine.swap(weights, scatters)
        if scatters and weights.version % PROOF_EVERY == 0:
            self._residents[0].prove(weights.version, weights.digest)
        return pause_s

    def settle(self) -> None:
        """Write what was swapped in into the spare as well, while nothing waits for it; the next stage is shorter."""
        whole = to_tensors(self._receiver.weights().state)
        for spare in self._residents[1:]:
            for scatter in spare.catch_up(whole):
                scatter.apply()

    def close(self) -> None:
        """Let go of the log."""
        self._lease.release()
        self._receiver.close()

    def _advance(self) -> Arrival:
        """Move the copy on the host. Of a journey that broke off nobody knows what it changed: all is loaded then."""
        before = self._receiver.version
        try:
            arrival = self._receiver.advance()
        except InfrastructureError:
            if self._receiver.version != before:
                for resident in self._residents:
                    resident.fall_behind(None)
            raise
        with suppress(InfrastructureError):  # what arrived must not be lost over it; the next call tries again
            self._renew_lease()
        return arrival

    def _renew_lease(self) -> None:
        now_s = time.monotonic()
        if self._receiver.version is not None and (self._leased_s is None or now_s - self._leased_s > LEASE_S):
            self._lease.renew(self._receiver.version)
            self._leased_s = now_s
