"""``[midtrain]``, ``[sft]``, ``[transcripts]``: what is learnt by imitation before reinforcement learning."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Self

from pydantic import Field, model_validator

from etude.config.section import Section

PRACTICE_SOURCES = ("stdlib", "code", "sessions")
"""What a mixture may name: the Python standard library, a family's right code, sessions of an imperfect agent."""
FILE_SOURCES = ("text:", "chat:")
"""What else it may name, followed by a path: text files or a folder of them, conversations as JSON lines."""


class ImitationConfig(Section):
    """What mid-training and SFT have in common: next-token prediction over documents."""

    batch_tokens: int = Field(default=2_000, ge=256)
    """Tokens of one optimiser step, at most; a document that is longer is a step of its own."""
    first_batch_tokens: int = Field(default=0, ge=0)
    """Tokens of the first step, from where they grow to ``batch_tokens``; 0: they do not grow."""
    ramp_share: float = Field(default=0.0, ge=0, le=1)
    """First share of the phase's tokens, over which they grow linearly."""
    microbatch_tokens: int = Field(default=12_000, ge=256)
    """Tokens of one forward and backward pass; a step that is larger adds up the gradients of several."""
    learning_rate: float = Field(default=4e-3, gt=0)
    """Peak of the schedule."""
    schedule: Literal["wsd", "cosine", "constant"] = "wsd"
    """What follows the warm-up: a plateau and a linear decay, half a cosine, or a plateau. What decays ends at 5 %."""
    warmup_steps: int = Field(default=40, ge=1)
    """Linear warm-up from 0."""
    decay_share: float = Field(default=0.4, ge=0, le=1)
    """Last share of the steps, over which the rate of ``wsd`` falls."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's moment decay rates."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Decay of matrices."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm."""
    context_weight: float = Field(default=0.3, ge=0, le=1)
    """Loss weight of the tokens in a conversation that the agent did not write."""
    checkpoint_steps: int = Field(default=200, ge=1)
    """Steps between checkpoints: what a killed phase has to do again, at most."""
    threads: int = Field(default=2, ge=1)
    """CPU threads; the machine is otherwise idle in these phases."""

    @model_validator(mode="after")
    def _scheduled(self) -> Self:
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
    """``[midtrain]``: from random weights, or a checkpoint's, to a model that knows the craft, badly."""

    tokens: int = Field(default=2_200_000, ge=0)
    """Training tokens; 0 takes the model as it is."""
    stdlib_share: float = Field(default=0.06, ge=0, le=1)
    """Share of tokens from the Python standard library."""
    code_share: float = Field(default=0.34, ge=0, le=1)
    """Share of clean domain code; the rest are agent transcripts."""
    mixture: dict[str, float | tuple[float, float]] = Field(default={})
    """Instead of the two: source → its share of the tokens, or its first and its last one, between which it changes
    linearly. Sources are ``stdlib``, ``code``, ``sessions``, ``text:PATH`` and ``chat:PATH``.
    """
    document_bytes: int = Field(default=1_024, ge=64)
    """Longest piece of a text file that is one document."""

    @property
    def shares(self) -> Mapping[str, tuple[float, float]]:
        """Source → its first and its last share; those that never have one are left out."""
        rest = max(0.0, 1.0 - self.stdlib_share - self.code_share)
        plain = dict(zip(PRACTICE_SOURCES, (self.stdlib_share, self.code_share, rest), strict=True))
        chosen = self.mixture or plain
        ends = {name: share if isinstance(share, tuple) else (share, share) for name, share in chosen.items()}
        return {name: shares for name, shares in ends.items() if any(shares)}

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.stdlib_share + self.code_share > 1:
            raise ValueError("stdlib_share + code_share is more than 1: nothing would be left for transcripts")
        if not self.mixture:
            return self
        self.refuse_idle("midtrain", ["stdlib_share", "code_share"], "beside midtrain.mixture")
        for name in self.mixture:
            if name not in PRACTICE_SOURCES and not (name.startswith(FILE_SOURCES) and name.partition(":")[2]):
                known = ", ".join((*PRACTICE_SOURCES, *(f"{kind}PATH" for kind in FILE_SOURCES)))
                raise ValueError(f"midtrain.mixture: {name!r} is none of {known}")
        for end, place in enumerate(("first", "last")):
            ends = [shares[end] for shares in self.shares.values()]
            if min(ends, default=0.0) < 0 or abs(sum(ends) - 1) > SHARE_TOLERANCE:
                raise ValueError(
                    f"midtrain.mixture: the {place} shares are {ends}; they must be positive and add up to 1"
                )
        return self


SHARE_TOLERANCE = 1e-6
"""How far from 1 shares may add up: decimal fractions are not exact."""


class SftConfig(ImitationConfig):
    """``[sft]``: conversations to imitate before reinforcement learning."""

    file: str = ""
    """JSON lines of ``{"messages": […], "tools": […]}`` as OpenAI spells them; empty: there is no such phase."""
    epochs: int = Field(default=2, ge=1)
    """How often each conversation is read."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak of the schedule."""
    context_weight: float = Field(default=0.0, ge=0, le=1)
    """Loss weight of tokens that the agent did not write: by default it learns from its own alone."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if not self.file:
            self.refuse_idle("sft", type(self).model_fields, "without sft.file")
        return self


class TranscriptConfig(Section):
    """``[transcripts]``: how imperfect the agent is that mid-training imitates."""

    right_edit: float = Field(default=0.4, ge=0, le=1)
    """Probability that an edit is the right one."""
    read_first: float = Field(default=0.8, ge=0, le=1)
    """Probability of reading the file before the first edit."""
    test_after: float = Field(default=0.5, ge=0, le=1)
    """Probability of testing after an edit."""
    retry: float = Field(default=0.45, ge=0, le=1)
    """Probability of trying again after a failing test."""
    bad_call: float = Field(default=0.0, ge=0, le=1)
    """Probability that an edit is first written as ``edit FILE:N``, which is no call, and then rightly."""
    reminded: float = Field(default=0.0, ge=0, le=1)
    """Probability, before anything the agent says, that the user reminds of how an edit is written; an edit that comes
    next is written rightly.
    """
    keep_fact: float = Field(default=0.8, ge=0, le=1)
    """Probability that a summary has a fact that is asked for, rather than another one (``lookup``)."""


TRANSCRIPT_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bugfix": ("right_edit", "read_first", "test_after", "retry", "bad_call", "reminded"),
        "repository": ("right_edit", "read_first"),
        "lookup": ("keep_fact",),
        "nextedit": ("right_edit",),
    }
)
"""Family of tasks → what is said of the agent that its sessions imitate; of other families there are none."""
TOOL_HABITS = ("bad_call", "reminded")
"""Those that are about the built-in harness's tools."""
