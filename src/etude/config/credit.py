"""``[credit]``: which of its turns a rollout's reward is credited to."""

from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from etude.config.section import Section

CreditKind: TypeAlias = Literal["rollout", "discounted", "shaped", "shared_prefix"]
"""Credit assignments: shares of a reward over turns; :mod:`etude.trainer.batching.credit` has the equations."""
BranchAt: TypeAlias = Literal["random", "error"]
"""When rollouts branch: after a call to the sandbox that was drawn beforehand, or after the first that failed."""
CREDIT_KEYS: dict[CreditKind, frozenset[str]] = {
    "rollout": frozenset(),
    "discounted": frozenset({"discount"}),
    "shaped": frozenset({"discount", "shaping"}),
    "shared_prefix": frozenset({"branches", "branch_at", "branch_within"}),
}
"""Kind → the keys that it looks at, beside ``summaries``."""
NEEDED: dict[CreditKind, tuple[str, str]] = {
    "discounted": ("discount", "below 1"),
    "shaped": ("shaping", "above 0"),
    "shared_prefix": ("branches", "to 2 or more"),
}
"""Kind → the key without which it would be another one, and what to set it to."""


class CreditConfig(Section):
    """``[credit]``: how a rollout's reward is shared out over its turns. A turn is one model call."""

    kind: CreditKind = "rollout"
    """All turns alike; the later the more; with rewards of single turns; or by comparing how one prefix went on."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """γ: what a reward is worth one turn earlier."""
    shaping: float = Field(default=0.0, ge=0)
    """Weight of one unit of a turn's own reward, in units of a rollout's."""
    summaries: Literal["train", "mask"] = "train"
    """True if turns that summarise the context are trained on, or only read."""
    branches: int = Field(default=1, ge=1)
    """Rollouts of a group that begin as one (B): they share a sandbox and a conversation until they branch."""
    branch_at: BranchAt = "random"
    """When they do. What never comes to that stays one rollout, and counts as B."""
    branch_within: int = Field(default=4, ge=1)
    """``random``: the last call to the sandbox behind which they may."""

    @property
    def is_by_turn(self) -> bool:
        """True if turns of one rollout may have different advantages."""
        return self.kind != "rollout"

    @model_validator(mode="after")
    def _effective(self) -> Self:
        looked_at = CREDIT_KEYS[self.kind]
        idle = sorted(frozenset().union(*CREDIT_KEYS.values()) - looked_at)
        self.refuse_idle("credit", idle, f"with credit.kind = {self.kind!r}")
        if self.kind in NEEDED:
            name, fix = NEEDED[self.kind]
            if not self.is_set(name):
                raise ValueError(f"credit.kind = {self.kind!r} would have no effect with credit.{name} = "
                                 f"{getattr(self, name)!r}: set that {fix}")  # fmt: skip
        if self.branch_at == "error":
            self.refuse_idle("credit", ["branch_within"], "with credit.branch_at = 'error'")
        return self
