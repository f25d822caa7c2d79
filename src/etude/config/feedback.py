"""``[feedback]``: what users say about live sessions, and what a session is worth by it."""

from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from etude.config.plugins import Registry
from etude.config.section import Section
from etude.types import SignalKind

REDACTORS = Registry(
    "feedback.redactors",
    "redactor",
    {name: f"etude.feedback.redaction:{name}" for name in ("secrets", "emails")},
)
"""Redactors by name: each is a :data:`~etude.feedback.redaction.Redactor`."""
ONLY_WHEN_IT_HAPPENS = (SignalKind.REVERTED, SignalKind.ABANDONED)
"""Kinds that say one thing alone, so that where they say nothing no model can learn what they would have said."""


FOLLOW_UPS = Registry("feedback.follow_up", "rule", {"words": "etude.feedback.follow_up:WordRule"})
"""Rules of follow-up messages by name: each is a :class:`~etude.feedback.follow_up.FollowUpRule`."""


def _follow_up(name: str) -> str:
    return name and FOLLOW_UPS(name)


class SignalPart(Section):
    """``[[feedback.reward.parts]]``: one part, worth weight · value; a value outside of its range counts as the nearer
    end.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)
    """Under which its value, before weight and range, is recorded with every session."""
    signal: Literal["kept", "reverted", "edited", "follow_up", "tests", "thumbs", "latency", "abandoned"]
    """Kind of signal that it is about. Of several with the same turn and span the newest counts, and of several turns
    and spans their mean.
    """
    weight: float = Field(allow_inf_nan=False)
    """Weight of one unit of it; 0: it is only recorded."""
    range: tuple[float, float]
    """The lowest and the highest value that count."""
    per: Literal["session", "turn"] = "session"
    """Scope of its worth: the whole session, or the turn that the signal is about; the latter takes ``credit.kind =
    "shaped"``.
    """
    missing: Literal["estimate"] | float = "estimate"
    """Reaction to silence: an estimate of what would have been said, by those who were as likely to say something; or a
    number, where a product reports every occurrence, so that silence is a word.
    """

    @property
    def kind(self) -> SignalKind:
        """The kind of signal."""
        return SignalKind(self.signal)

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest contribution of a value that was given."""
        low, high = sorted(self.weight * end + 0.0 for end in self.range)  # without a negative zero
        return low, high

    @model_validator(mode="after")
    def _sound(self) -> Self:
        (low, high), where = self.range, f"feedback.reward.parts: {self.name!r}"
        if not (isfinite(low) and isfinite(high) and low < high):
            raise ValueError(f"{where} has range = [{low:g}, {high:g}]: expected two finite numbers, the lower first")
        if isinstance(self.missing, float) and not low <= self.missing <= high:
            raise ValueError(f"{where}: missing = {self.missing:g} is outside of range = [{low:g}, {high:g}]")
        if self.missing == "estimate" and self.kind in ONLY_WHEN_IT_HAPPENS:
            raise ValueError(
                f"{where}: {self.signal!r} is sent only when it happens, so there is no other answer to estimate by: "
                f"set missing = 0.0 if the product reports every one, or leave the part out"
            )
        return self


class SignalReward(Section):
    """``[feedback.reward]``: what a session is worth: Σ weight · part. Frozen for the whole run."""

    parts: tuple[SignalPart, ...] = ()
    """``[[feedback.reward.parts]]``, in any order."""
    max_inverse: float = Field(default=20.0, ge=1)
    """Largest inverse propensity: what was answered with a smaller chance than one in so many counts as if with that,
    which leaves a bias (``docs/live.md``) and bounds the noise.
    """
    folds: int = Field(default=5, ge=2)
    """Models of answering and of answers, each for a share of the users, of whom it has seen nothing."""
    history: int = Field(default=4096, ge=0)
    """Earlier sessions, the newest, that those models learn from, too."""

    @property
    def is_by_turn(self) -> bool:
        """True if a part is about single turns."""
        return any(part.per == "turn" for part in self.parts)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [part.name for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"feedback.reward.parts: two are called {twice[0]!r}; each needs a name of its own")
        if self.parts and not any(part.weight for part in self.parts):
            raise ValueError("feedback.reward.parts: every weight is 0, so that nothing would be worth anything")
        return self


def _each_redactor(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each can be found. Raises ``ValueError`` for one that cannot."""
    return tuple(map(REDACTORS, names))


class PoisoningLimits(Section):
    """``[feedback.poisoning]``: limits of what one user, or a ring of them, can do to what is learnt."""

    largest_share: float = Field(default=0.05, gt=0, le=1)
    """Largest share of what is learnt from that one user's sessions are; beyond it each counts less."""
    per_hour: int = Field(default=120, ge=1)
    """Rated sessions within an hour, above which a user is taken for a program."""
    outlier_z: float = Field(default=5.0, gt=0)
    """Standard deviations from other users' ratings of the same kinds, above which a user's are not learnt from."""
    min_sessions: int = Field(default=8, ge=2)
    """Rated sessions of a user, below which they are compared with nobody."""
    min_users: int = Field(default=8, ge=3)
    """Such users, below which there is no telling who is an outlier."""
    alpha: float = Field(default=0.001, gt=0, lt=1)
    """Chance, over all pairs of users, that two who know nothing of each other are taken for a ring."""
    min_ring: int = Field(default=3, ge=2)
    """Linked users that make a ring."""


class FeedbackConfig(Section):
    """``[feedback]``: what users say about live sessions."""

    window_s: float = Field(default=0.0, ge=0)
    """Seconds after the end of a session in which signals about it count; then it is joined with them. 0: no session is
    recorded, whatever its calls say of consent.
    """
    follow_up: Annotated[str, AfterValidator(_follow_up)] = "words"
    """Judgement of a user's next message, dissatisfied with the reply or not, where no client says: ``words``, a rule
    of negation, retry and thanks in English; empty, none; or a class of your own.
    """
    redactors: Annotated[tuple[str, ...], AfterValidator(_each_redactor)] = ("secrets",)
    """Finders of what must not be kept: ``secrets`` and ``emails``, by their form, or functions of your own, from a
    text to the spans of characters. What users and tools said is kept with fillers in place of that; of a session in
    which the model says such a thing nothing is.
    """
    regions: tuple[str, ...] = ()
    """Regions whose users' sessions are recorded, as the product names them; empty: all, and those that name none."""
    keep_days: float = Field(default=0.0, ge=0)
    """Days for which sessions and signals are kept after they ended, trained on or not; 0: until somebody asks."""
    poisoning: PoisoningLimits = PoisoningLimits()
    """Limits of what one user can do to what is learnt."""
    reward: SignalReward = SignalReward()
    """Its worth."""

    @model_validator(mode="after")
    def _recorded(self) -> Self:
        if not self.window_s:
            idle = ("follow_up", "redactors", "regions", "keep_days")
            self.refuse_idle("feedback", idle, "with feedback.window_s = 0, as no session is recorded")
        return self
