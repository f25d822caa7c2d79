"""``[placement]``: which GPUs of the machine each process of a run computes on."""

from collections import Counter
from typing import Annotated, Self, TypeAlias

from pydantic import Field, model_validator

from etude.config.section import Section

Gpu: TypeAlias = Annotated[int, Field(ge=0)]
"""Number of a GPU of this machine, as ``nvidia-smi`` counts them."""


class PlacementConfig(Section):
    """``[placement]``: GPUs by process, for a run on one machine; without it engines come first, then the trainer.

    Several engines, or an engine beside a trainer of several ranks, each need GPUs of their own.
    """

    engine: tuple[tuple[Gpu, ...], ...] = ()
    """GPUs of each of ``engine.replicas``: ``[[0], [1]]``."""
    production: tuple[tuple[Gpu, ...], ...] = ()
    """GPUs of each of ``release.engines``, which serve users."""
    trainer: tuple[Gpu, ...] = ()
    """A GPU for each rank."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is named."""
        return not (self.engine or self.production or self.trainer)

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        named = Counter(gpu for each in (*self.engine, *self.production, self.trainer) for gpu in each)
        if twice := sorted(gpu for gpu, times in named.items() if times > 1):
            raise ValueError(f"placement names GPU {twice[0]} twice: name another one, or leave [placement] out")
        if not all((*self.engine, *self.production)):
            raise ValueError("placement has an engine without a GPU: name at least one, such as engine = [[0], [1]]")
        return self
