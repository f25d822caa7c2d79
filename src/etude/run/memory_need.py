"""Memory of a new run: what trainer and engine will hold at the least, compared with what this machine has.

Owns the estimate: weights, gradients, moments and the key/value cache. Activations, sandboxes and the programs
themselves are left out, since they cannot be known; so is vLLM, which takes its own share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.errors import InfrastructureError, UserError
from etude.models.spec import ModelSpec
from etude.run.disk_space import MODEL_BYTES, moment_bytes
from etude.run.numerics import DTYPES
from etude.run.resolve import resolve_device
from etude.sandboxes.memory_pressure import MemoryGauge

GRADIENT_BYTES = 4
"""Bytes of a parameter's gradient, beside it and its moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that a run holds at the least."""

    trainer: int
    """Parameters, gradients and moments."""
    engine: int
    """All engines: the weights, once or twice, and the key/value cache."""

    @classmethod
    def of(cls, config: RunConfig, spec: ModelSpec, parameters: int) -> "MemoryNeed":
        """Memory that a recipe takes with a model of that shape. Pure."""
        moments = 0 if config.optimiser.state == "offload" else moment_bytes(config.optimiser)
        trainer = parameters * (MODEL_BYTES + moments + GRADIENT_BYTES) // config.parallel.ranks
        if config.engine.kind != "native":
            return cls(trainer=trainer, engine=0)
        engine, item = config.engine, DTYPES[config.numerics.stored_dtype].itemsize
        position = spec.cached_numbers * item
        weights = parameters * item * (2 if engine.native.spare_weights else 1)
        return cls(trainer=trainer, engine=engine.replicas * (weights + engine.resolved_cache_tokens * position))

    def compare(self, free: Mapping[str, int], *, trainer: str, engine: str) -> list[str]:
        """Warnings where a device has less free bytes than the sides on it take. Raises
        :class:`~etude.errors.UserError` where a side cannot even be held alone.
        """
        advice: list[str] = []
        for device, bytes_free in free.items():
            sides = {"trainer": self.trainer * (trainer == device), "engine": self.engine * (engine == device)}
            words = (
                f"{device} has {formatting.size(bytes_free)} of memory free, and this run takes at least "
                + ", ".join(f"{formatting.size(need)} for the {side}" for side, need in sides.items() if need)
                + ": lower engine.options.cache_tokens (or engine.max_running, max_length), set "
                "engine.options.spare_weights = false, start fewer engine.replicas, or take "
                "a smaller model"
            )
            if max(sides.values()) > bytes_free:
                raise UserError(words)
            if sum(sides.values()) > bytes_free:
                advice.append(words)
        return advice


def check_memory(config: RunConfig, spec: ModelSpec, parameters: int) -> list[str]:
    """Warnings about the memory of this machine. Raises as :meth:`MemoryNeed.compare`."""
    trainer, engine = resolve_device(config.trainer.device), resolve_device(config.engine.device)
    free = {device: _free_bytes(device) for device in sorted({trainer, engine})}
    readings = {device: available for device, available in free.items() if available is not None}
    return MemoryNeed.of(config, spec, parameters).compare(readings, trainer=trainer, engine=engine)


def _free_bytes(device: str) -> int | None:
    """Free bytes of a device; ``None`` where the system does not say."""
    if device == "cuda":
        import torch  # only where there is a GPU to ask

        return int(torch.cuda.mem_get_info()[0])
    try:
        return int(MemoryGauge().read().available_bytes)
    except InfrastructureError:
        return None
