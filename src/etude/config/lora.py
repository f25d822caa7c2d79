"""``[lora]``: low-rank adapters that are trained instead of a model's weights."""

from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config.section import Section

LoraTarget = Literal["attention", "feed_forward", "experts"]
LoraPhase = Literal["midtrain", "sft", "rl"]


class LoraConfig(Section):
    """``[lora]``: low-rank adapters (arXiv 2106.09685) that are trained instead of the weights, which stay frozen."""

    rank: int = Field(default=0, ge=0, multiple_of=8)
    """Rank of the adapter of each projection and expert; 0 trains the weights themselves."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is multiplied by ``alpha`` / ``rank``."""
    targets: tuple[LoraTarget, ...] = Field(default=("attention", "feed_forward", "experts"), min_length=1)
    """Layers whose matrices get an adapter; shared experts belong to ``feed_forward``. Routers, embeddings and the
    output matrix have none.
    """
    phases: tuple[LoraPhase, ...] = Field(default=("midtrain", "sft", "rl"), min_length=1)
    """Phases that train an adapter. Those of mid-training and SFT are merged into the model of the next phase; the
    weight log of RL holds adapters alone.
    """
    start: str = ""
    """PEFT folder of the adapter that RL starts with; empty: one without effect."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if not self.rank:
            self.refuse_idle("lora", ["alpha", "targets", "phases", "start"], "with lora.rank = 0")
        if self.start and "rl" not in self.phases:
            raise ValueError("lora.start would have no effect: lora.phases has no 'rl'; leave one of the two out")
        return self

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / self.rank

    def trains(self, phase: LoraPhase) -> bool:
        """True if a phase trains an adapter."""
        return self.rank > 0 and phase in self.phases
