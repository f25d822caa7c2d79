"""The protocol of an engine kind: opened with a weight version, updated to later ones while it serves.

    open(context, weights) ──▶ ServedEngine:  engine ──▶ HTTP server
                                              updater ◀── stage, swap ── weight follower
                                              tasks ──▶ background

A kind is an opener that ``engine.kind`` names; built-in ones are rows of ``config/inference.py:ENGINES``. The weight
log, retries, leases, events and the HTTP server belong to the process and are the same for all kinds.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from etude.config.recipe import RunConfig
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.protocols import Engine
from etude.telemetry.log import EventLog
from etude.weights.replica import ChangedNumbers, PulledWeights
from etude.weights.state import State


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightUpdate:
    """An update of an engine's weights to one version."""

    weights: PulledWeights
    """The whole version, in memory that is valid until the next update."""
    changed: Mapping[str, Sequence[ChangedNumbers]] | None
    """The numbers that changed since the previous update, by tensor; ``None``: so many that the whole state is
    loaded.
    """


Swap: TypeAlias = Callable[[], Awaitable[float]]
"""Makes the engine sample with the staged weights; returns the pause in seconds. Called at most once."""


class WeightUpdater(Protocol):
    """Moves one engine from version to version; one update at a time."""

    @property
    def version(self) -> int:
        """The weight version being served."""
        ...

    def stage(self, update: WeightUpdate) -> Swap:
        """Prepare an update without touching the serving weights. May block: it is called in a thread. The swap raises
        :class:`~etude.errors.InfrastructureError` if the engine then has other weights.
        """
        ...

    def settle(self) -> None:
        """Do work after a swap that shortens the next update, while nothing waits. May block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine:
    """An open engine and the parts that its process uses."""

    engine: Engine
    updater: WeightUpdater
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    """Background tasks while the engine serves; an error in one ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The run for which an engine is opened."""

    config: RunConfig
    spec: ModelSpec
    model_folder: Path
    """Holds the model's ``config.json``."""
    logs: Path
    """Folder for the log of a process."""
    events: EventLog
    make_model: Callable[[], Decoder]
    """Builds a model for published weights, with the run's arithmetic, on the engine's device."""
    load: Callable[[Decoder, Mapping[str, Tensor]], None]
    """Copies a published state into such a model."""
    base: Callable[[], State] | None = None
    """Reads the frozen weights over which adapters are published; ``None`` if whole models are published."""


Opener: TypeAlias = Callable[[EngineContext, PulledWeights], AbstractAsyncContextManager[ServedEngine]]
"""Opens an engine that serves these weights; raises :class:`~etude.errors.ConfigError` if it cannot."""
