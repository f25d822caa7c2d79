"""Keeping an engine's weights on the newest version of a log, with hardly a pause.

    log ──fetch, verify──▶ copy on the host ──what changed──▶ spare model ──swap──▶ serves; the other is the spare now

With a spare the engine holds its weights twice: changes are written into the model that does not serve, and the pause
is that of exchanging two references. Without one they are written into the serving model between two steps. Either way
an update costs what changed, not what there is; where very much changed, everything is loaded.

What an engine does about a log that it cannot follow is here as well, for every kind of engine (:func:`next_arrival`).
"""

import asyncio
import logging
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
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.weights.inplace import RELOAD_SHARE, InPlaceWeights, Scatter
from etude.errors import DamagedError, InfrastructureError
from etude.models.spec import ModelSpec
from etude.run.numerics import largest_state, load_published, serving_model, to_tensors
from etude.weights.log import WeightLog
from etude.weights.pull import Arrival, Receiver
from etude.weights.replica import ChangedNumbers, PulledWeights

POLL_S = 0.05
"""How often the store is asked for the next version."""
LOOK_S = 1.0
"""How often it is asked for packs of a version that is not committed yet, and for versions behind a gap."""
LONGEST_PAUSE_S = 10.0
"""Between two tries to follow a log that cannot be followed; the first is ``LOOK_S``, and they double."""
PATIENCE_S = 3600.0
"""How long that is tried: a plea is answered with the next version, and the steps of a large model take minutes."""
PROOF_EVERY = 16
"""Every how many versions the resident weights are read and compared with what was published."""
LEASE_S = 30.0
"""How often the engine says which version it holds, so that nothing it needs is collected."""

Changed: TypeAlias = Mapping[str, Sequence[ChangedNumbers]] | None
"""What one version changed, by tensor; ``None`` for so much that everything shall be loaded."""

logger = logging.getLogger(__name__)


async def next_arrival(log: WeightLog, receiver: Receiver, served: int) -> Arrival:
    """Wait for a version after ``served`` and bring the copy of ``receiver`` to the newest there is.

    consumes: commit records; waits for: the record after the one served; woken by: its own polling; on shutdown:
    cancelled between two polls. While no sound way leads on, as while the store is away and waited for, the engine
    serves what it has: the receiver has left a plea, which the publisher answers with a whole version. Admission counts
    the version that is served, so the bound of staleness holds and the run slows down by itself. Damage is raised after
    ``PATIENCE_S``.
    """
    since_s, pause_s = None, LOOK_S
    while True:
        try:
            if await _is_behind(log, receiver, served):
                return await asyncio.to_thread(receiver.advance)
            since_s, pause_s = None, LOOK_S
        except DamagedError as error:
            now_s = time.monotonic()
            if since_s is None:
                since_s = now_s
                logger.warning("weight version %d is served on until a newer one can be had: %s", served, error)
            elif now_s - since_s > PATIENCE_S:
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _is_behind(log: WeightLog, receiver: Receiver, served: int) -> bool:
    """Whether there is a version after ``served``; ``False`` after waiting for it as long as it pays to do only that.

    Then what is announced of it has been fetched, and it has been looked for behind a gap.
    """
    looked_s = time.monotonic()
    while time.monotonic() - looked_s < LOOK_S:
        if await asyncio.to_thread(_is_committed, log, served + 1):
            return True
        await asyncio.sleep(POLL_S)
    await asyncio.to_thread(receiver.prefetch)
    return await asyncio.to_thread(log.latest, after=served) != served


def _is_committed(log: WeightLog, version: int) -> bool:
    """Whether a version is there, be its record damaged: then there may be a way to a later one."""
    try:
        return log.read(version) is not None
    except DamagedError:
        return True


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
        self._weights = InPlaceWeights(self.model.state_dict(), self._load, specs)  # a router's correction, too
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
        """Read the weights. Raises :class:`~etude.errors.InfrastructureError` when they are not those of ``digest``.

        Quantised experts are held decoded: what was pulled was proven, what is resident of them cannot be.
        """
        if self._weights.reloading:
            return
        if (found := self._weights.digest()) != digest:
            raise InfrastructureError(
                f"the engine holds {found[:12]}, weight version {version} is {digest[:12]}: started again it loads it "
                f"anew"
            )


@final
class WeightFollower:
    """Moves one engine to the newest version of a log; for one thread at a time."""

    def __init__(self, log: WeightLog, serving: Serving) -> None:
        self._log = log
        self._serving = serving
        self._copies = 2 if serving.spare else 1
        self._residents: list[ResidentModel] = []
        self._receiver = Receiver(log, largest_state(serving.spec))
        self._lease = log.lease(f"engine-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._leased_s: float | None = None

    def start(self) -> Weights:
        """Fetch the newest version, learn the model's layout, load it and prove what it holds."""
        self._receiver.advance()
        pulled = self._receiver.weights()
        self._renew_lease(pulled.version)
        self._residents = [ResidentModel(pulled, self._serving) for _ in range(self._copies)]
        for resident in self._residents:
            resident.prove(pulled.version, pulled.digest)
        return Weights(self._residents[0].model, pulled.version, pulled.digest)

    async def update(self, engine: NativeEngine) -> tuple[float, float]:
        """Let ``engine`` sample with the newest version, once there is one after what it has.

        Returns for how many seconds that was staged and for how many the engine paused. Raises as
        :func:`next_arrival`, and :class:`~etude.errors.InfrastructureError` when a proof fails.
        """
        arrival = await self.next_arrival(engine.weights.version)
        started_s = time.perf_counter()
        weights, scatters = await asyncio.to_thread(self.stage, arrival)
        stage_s = arrival.seconds + time.perf_counter() - started_s
        return stage_s, await self.swap_into(engine, weights, scatters)

    async def next_arrival(self, served: int) -> Arrival:
        """Move the copy on the host, as :func:`next_arrival` does."""
        return await next_arrival(self._log, self._receiver, served)

    def stage(self, arrival: Arrival) -> tuple[Weights, list[Scatter]]:
        """Prepare what arrived; nothing that serves is touched.

        Returns what shall serve and what has to be written into it in the pause, which is nothing when there is a
        spare. To be swapped in before the next call.
        """
        self._renew_lease(arrival.version)
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
        with suppress(InfrastructureError):  # a lease that is not renewed ends by itself
            self._lease.release()
        self._receiver.close()

    def _renew_lease(self, version: int) -> None:
        now_s = time.monotonic()
        if self._leased_s is None or now_s - self._leased_s > LEASE_S:
            self._lease.renew(version)
            self._leased_s = now_s
