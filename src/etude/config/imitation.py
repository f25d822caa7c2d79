"""``[midtrain]``, ``[sft]``: learning by imitation, before reinforcement learning."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config.section import Section

FAMILY_SOURCES = ("stdlib", "code", "sessions")
"""Sources of a mixture that the task family brings along, and the Python standard library."""
FILE_SOURCES = ("text:", "chat:")
"""Prefixes of sources that are files: text files or a folder of them, conversations as JSON lines."""


class ImitationConfig(Section):
    """The keys that mid-training and SFT have in common: next-token prediction over documents."""

    batch_tokens: int = Field(default=2_000, ge=256)
    """Most tokens of one optimiser step; a longer document is a step of its own."""
    first_batch_tokens: int = Field(default=0, ge=0)
    """Tokens of the first step, from which they grow to ``batch_tokens``; 0: they do not grow."""
    ramp_share: float = Field(default=0.0, ge=0, le=1)
    """Initial share of the phase's tokens over which they grow linearly."""
    learning_rate: float = Field(default=4e-3, gt=0)
    """Peak of the schedule."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """Learning-rate schedule after the warm-up: a plateau and a linear decay, half a cosine, or a plateau. A rate that
    decays ends at 5 %.
    """
    warmup_steps: int = Field(default=40, ge=1)
    """Linear warm-up from 0."""
    decay_share: float = Field(default=0.4, ge=0, le=1)
    """Final share of the steps over which the rate of ``wsd`` falls."""
    context_weight: float = Field(default=0.3, ge=0, le=1)
    """Loss weight of the tokens in a conversation that the agent did not write."""
    checkpoint_steps: int = Field(default=200, ge=1)
    """Steps between checkpoints: the most that a killed phase has to repeat."""
    threads: int = Field(default=2, ge=1)
    """CPU threads of each rank; the machine is otherwise idle in these phases."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        section = self._name()
        if self.schedule != "wsd":
            self.refuse_idle(section, ["decay_share"], f"with schedule = {self.schedule!r}")
        if bool(self.first_batch_tokens) != bool(self.ramp_share):
            raise ValueError(f"{section}.first_batch_tokens and ramp_share make a ramp together: set both, or neither")
        if self.first_batch_tokens > self.batch_tokens:
            raise ValueError(
                f"{section}.first_batch_tokens={self.first_batch_tokens} is above batch_tokens={self.batch_tokens}"
            )
        return self

    @classmethod
    def _name(cls) -> str:
        return cls.__name__.removesuffix("Config").lower()


class MidtrainConfig(ImitationConfig):
    """``[midtrain]``: mid-training, from random weights or a checkpoint to the base policy of RL."""

    tokens: int = Field(default=2_200_000, ge=0)
    """Training tokens; 0 takes the model as it is."""
    mixture: dict[str, float | tuple[float, float]] = Field(default={"stdlib": 0.06, "code": 0.34, "sessions": 0.6})
    """Source → its share of the tokens, or its first and last share, between which it changes linearly. Sources are
    ``stdlib``, the Python standard library; ``code``, right code of the family; ``sessions`` of an imperfect agent on
    its tasks; ``text:PATH`` and ``chat:PATH``.
    """

    @property
    def shares(self) -> Mapping[str, tuple[float, float]]:
        """Source → its first and its last share; those that never have one are left out."""
        ends = {name: share if isinstance(share, tuple) else (share, share) for name, share in self.mixture.items()}
        return {name: shares for name, shares in ends.items() if any(shares)}

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        for name in self.mixture:
            if name not in FAMILY_SOURCES and not (name.startswith(FILE_SOURCES) and name.partition(":")[2]):
                sources = ", ".join((*FAMILY_SOURCES, *(f"{kind}PATH" for kind in FILE_SOURCES)))
                raise ValueError(f"midtrain.mixture: {name!r} is none of {sources}")
        for end, place in enumerate(("first", "last")):
            ends = [shares[end] for shares in self.shares.values()]
            if min(ends, default=0.0) < 0 or abs(sum(ends) - 1) > SHARE_TOLERANCE:
                raise ValueError(
                    f"midtrain.mixture: the {place} shares are {ends}; they must be positive and add up to 1"
                )
        return self


SHARE_TOLERANCE = 1e-6
"""Distance from 1 that a sum of shares may have: decimal fractions are not exact."""


class SftConfig(ImitationConfig):
    """``[sft]``: supervised fine-tuning on conversations, before RL."""

    file: str = ""
    """JSON lines of ``{"messages": […], "tools": […]}`` in OpenAI's format; empty: no such phase."""
    epochs: int = Field(default=2, ge=1)
    """Passes over all conversations."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak of the schedule."""
    context_weight: float = Field(default=0.0, ge=0, le=1)
    """Loss weight of tokens that the agent did not write; by default it learns from its own tokens alone."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if not self.file:
            self.refuse_idle("sft", type(self).model_fields, "without sft.file")
        return self
