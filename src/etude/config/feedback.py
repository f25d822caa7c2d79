"""``[feedback]``: users' signals about live sessions, and the reward that a session gets for them."""

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
ONE_SIDED = (SignalKind.REVERTED, SignalKind.ABANDONED)
"""Kinds that are sent only when the event happens, so that no model can be fitted to them."""
FOLLOW_UPS = Registry("feedback.follow_up", "rule", {"words": "etude.feedback.follow_up:WordRule"})
"""Rules of follow-up messages by name: each is a :class:`~etude.feedback.follow_up.FollowUpRule`."""


def _follow_up(name: str) -> str:
    return name and FOLLOW_UPS(name)


class SignalPart(Section):
    """``[[feedback.reward.parts]]``: one part, worth weight · value, with the value clipped to ``range``."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)
    """Name under which its value, before weight and range, is recorded with every session."""
    signal: Literal["kept", "reverted", "edited", "follow_up", "tests", "thumbs", "latency", "abandoned"]
    """Kind of signal. If there are several for one turn and span, the newest counts; turns and spans are averaged."""
    weight: float = Field(allow_inf_nan=False)
    """Reward per unit of the value; negative for a penalty. 0: the value is only recorded."""
    range: tuple[float, float]
    """Lowest and highest value: values outside are clipped to these."""
    per: Literal["session", "turn"] = "session"
    """Scope of the reward: the whole session, or the turn of the signal alone, with ``credit.kind = "shaped"``."""
    missing: Literal["estimate"] | float = "estimate"
    """Value of a session without the signal: an estimate from sessions that were equally likely to send one; or a
    number, if the product reports every occurrence, so that a missing signal means that nothing occurred.
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
    def _check_range(self) -> Self:
        (low, high), where = self.range, f"feedback.reward.parts: {self.name!r}"
        if not (isfinite(low) and isfinite(high) and low < high):
            raise ValueError(f"{where} has range = [{low:g}, {high:g}]: expected two finite numbers, the lower first")
        if isinstance(self.missing, float) and not low <= self.missing <= high:
            raise ValueError(f"{where}: missing = {self.missing:g} is outside of range = [{low:g}, {high:g}]")
        if self.missing == "estimate" and self.kind in ONE_SIDED:
            raise ValueError(
                f"{where}: {self.signal!r} is sent only when it happens, so there is nothing to estimate from: "
                f"set missing = 0.0 if the product reports every one, or leave the part out"
            )
        return self


class SignalReward(Section):
    """``[feedback.reward]``: the reward of a session, Σ weight · value over its parts. Frozen for the whole run."""

    parts: tuple[SignalPart, ...] = ()
    """``[[feedback.reward.parts]]``, in any order."""
    max_inverse: float = Field(default=20.0, ge=1)
    """Largest inverse propensity: a signal whose probability was below 1 / ``max_inverse`` is weighted as if its
    probability had been that. This limits the noise and leaves a bias (``docs/live.md``).
    """
    folds: int = Field(default=5, ge=2)
    """Folds of users for cross-fitting: the models that predict whether a user sends a signal, and its value, are
    fitted without that user's fold.
    """
    history: int = Field(default=4096, ge=0)
    """Number of newest earlier sessions that these models are fitted to as well."""

    @property
    def is_by_turn(self) -> bool:
        """True if a part is about single turns."""
        return any(part.per == "turn" for part in self.parts)

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        names = [part.name for part in self.parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"feedback.reward.parts: two are called {twice[0]!r}; names must differ")
        if self.parts and not any(part.weight for part in self.parts):
            raise ValueError("feedback.reward.parts: every weight is 0, so every reward would be 0: set one")
        return self


def _each_redactor(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check that each can be found. Raises ``ValueError`` for one that cannot."""
    return tuple(map(REDACTORS, names))


class PoisoningLimits(Section):
    """``[feedback.poisoning]``: limits of the influence that one user, or a ring of users, has on training."""

    largest_share: float = Field(default=0.05, gt=0, le=1)
    """Largest share of one user's sessions in a batch; above it each of the user's sessions counts less."""
    per_hour: int = Field(default=120, ge=1)
    """Rated sessions in one hour above which a user is considered a program."""
    outlier_z: float = Field(default=5.0, gt=0)
    """Standard deviations from other users' ratings above which a user's ratings are not learnt from."""
    min_sessions: int = Field(default=8, ge=2)
    """Rated sessions that a user needs before the user is compared with others."""
    min_users: int = Field(default=8, ge=3)
    """Users with that many sessions that are needed before outliers are detected."""
    alpha: float = Field(default=0.001, gt=0, lt=1)
    """Probability, over all pairs of users, that two independent users are mistaken for a ring."""
    min_ring: int = Field(default=3, ge=2)
    """Linked users that count as a ring."""


class FeedbackConfig(Section):
    """``[feedback]``: users' signals about live sessions."""

    window_s: float = Field(default=0.0, ge=0)
    """Seconds after the end of a session in which signals about it count; then session and signals are joined. 0: no
    session is recorded, with or without consent.
    """
    follow_up: Annotated[str, AfterValidator(_follow_up)] = "words"
    """Rule that tells from a user's next message whether the reply satisfied them, if no client reports it: ``words``
    (negation, retry and thanks in English); empty for none; or a class of your own.
    """
    redactors: Annotated[tuple[str, ...], AfterValidator(_each_redactor)] = ("secrets",)
    """Detectors of text that must not be stored: ``secrets`` and ``emails``, by their form, or functions of your own
    that return spans of characters. In messages of users and tools, fillers replace such text; a session in which the
    model wrote such text is not stored at all.
    """
    regions: tuple[str, ...] = ()
    """Regions, as the product names them, whose sessions are recorded; empty: all, also sessions without a region."""
    keep_days: float = Field(default=0.0, ge=0)
    """Days for which sessions and signals are stored, trained on or not; 0: until a user requests deletion."""
    poisoning: PoisoningLimits = PoisoningLimits()
    """Limits of one user's influence on training."""
    reward: SignalReward = SignalReward()
    """The reward of a session."""

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if not self.window_s:
            idle = ("follow_up", "redactors", "regions", "keep_days")
            self.refuse_idle("feedback", idle, "with feedback.window_s = 0, as no session is recorded")
        return self
