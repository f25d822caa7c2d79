"""``[credit]``: credit assignment, the turns to which a rollout's reward is credited."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.section import OptionsOf, Section

CreditKind: TypeAlias = Literal["rollout", "discounted", "shaped", "shared_prefix"]
"""Credit assignments: shares of a reward over turns; :mod:`etude.trainer.batching.credit` has the equations."""
BranchAt: TypeAlias = Literal["random", "error"]
"""When rollouts branch: after a call to the sandbox that was drawn beforehand, or after the first that failed."""


class DiscountedOptions(Section):
    """The later a turn, the more it is credited."""

    discount: float = Field(gt=0, lt=1)
    """γ: discount per turn; one unit of reward counts as γ one turn earlier."""


class ShapedOptions(Section):
    """With rewards of single turns."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """γ: discount per turn; one unit of reward counts as γ one turn earlier."""
    shaping: float = Field(gt=0)
    """Weight of one unit of a turn's own reward, in units of a rollout's."""


class SharedPrefixOptions(Section):
    """By comparing how one prefix went on."""

    branches: int = Field(ge=2)
    """Rollouts of a group that begin as one (B): they share a sandbox and a conversation until they branch."""
    branch_at: BranchAt = "random"
    """The point at which they branch. A rollout that never gets there stays one, and counts as B."""
    branch_within: int = Field(default=4, ge=1)
    """``random``: the last call to the sandbox after which they may branch."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if self.branch_at == "error":
            self.refuse_idle("credit.options", ["branch_within"], "with credit.options.branch_at = 'error'")
        return self


CREDIT_OPTIONS = OptionsOf(
    "credit",
    "kind",
    {"discounted": DiscountedOptions, "shaped": ShapedOptions, "shared_prefix": SharedPrefixOptions},
)


class CreditConfig(Section):
    """``[credit]``: the shares of a rollout's reward that its turns get. A turn is one model call."""

    kind: CreditKind = "rollout"
    """All turns alike; the later the more; with rewards of single turns; or by comparing how one prefix went on."""
    summaries: Literal["train", "mask"] = "train"
    """Turns that summarise the context: trained on, or only read."""
    options: Annotated[SerializeAsAny[Section], PlainValidator(CREDIT_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[credit.options]``: keys of the kind alone."""

    @property
    def is_by_turn(self) -> bool:
        """True if turns of one rollout may have different advantages."""
        return self.kind != "rollout"

    @property
    def branches(self) -> int:
        """Rollouts of a group that begin as one; 1 where none do."""
        return self.options.branches if isinstance(self.options, SharedPrefixOptions) else 1
