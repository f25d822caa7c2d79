"""``[judge]``: the model that grades aspects of a rollout, what it may cost, and when it is trusted."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.section import OptionsOf, Section
from etude.types import MIN_TEMPERATURE

KEY_VARIABLE = "ETUDE_JUDGE_KEY"
"""Variable of the environment with the key of the endpoint; the key itself is never in a recipe."""


class JudgeOptions(Section):
    """Programs instead of a model, called over the same API."""

    votes: int = Field(default=1, ge=1, le=15)
    """Calls per aspect; every second call lists the scale from best to worst."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge. With several votes it must be above 0, or all votes are equal."""
    max_tokens: int = Field(default=256, ge=16)
    """Most tokens of one reply, reasoning included."""
    text_characters: int = Field(default=20_000, ge=200, le=2_000_000)
    """Most characters of the task, and of the work, that the judge is shown: a longer text is cut in the middle, with a
    note of what is left out.
    """
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one judgement: all votes, pauses, retries, and waiting until ``concurrency`` and the budget have
    room. Scoring a rollout takes one judgement per aspect, and one for each request for hints.
    """
    concurrency: int = Field(default=16, ge=1)
    """Most calls at a time."""
    calls_per_rollout: int = Field(default=100, ge=1)
    """Most calls about one rollout, for its reward; its hints have a separate limit of the same size."""
    tokens_per_rollout: int = Field(default=1_000_000, ge=1)
    """Most tokens of these calls, read and written. Must be enough for one judgement on every aspect of texts of full
    length.
    """
    calls_per_run: int = Field(default=1_000_000, ge=1)
    """Most calls of a run, restarts included."""
    tokens_per_run: int = Field(default=1_000_000_000, ge=1)
    """Most tokens of a run's calls, read and written."""
    prices: tuple[float, float] = (0.0, 0.0)
    """Prices of a million tokens, read and written, in any currency."""
    cost_per_run: float = Field(default=0.0, ge=0)
    """Most that a run's calls may cost at these prices; 0: no limit."""
    on_alarm: Literal["warn", "hold"] = "warn"
    """Reaction when the endpoint's model changes, or agrees less with people: ``warn`` warns; ``hold`` stops
    judging until a person removes ``judge-held.txt`` from the run folder.
    """

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        where = "judge.options"
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"{where}.temperature = {self.temperature:g}: expected 0, or at least {MIN_TEMPERATURE:g}")
        if self.votes > 1 and not self.temperature:
            raise ValueError(
                f"{where}.votes = {self.votes} would have little effect at {where}.temperature = 0: raise it, or ask "
                f"once"
            )
        if min(self.prices) < 0:
            raise ValueError(f"{where}.prices = {list(self.prices)}: a price is 0 or more")
        if self.cost_per_run and not any(self.prices):
            raise ValueError(f"{where}.cost_per_run would have no effect without {where}.prices")
        return self


class ModelJudgeOptions(JudgeOptions):
    """A model behind an OpenAI-compatible API."""

    url: str
    """Base URL of the API, including ``/v1``."""
    model: str = Field(min_length=1)
    """Name of the model at that endpoint."""
    structured: bool = False
    """True if the endpoint enforces a JSON schema on replies (``response_format``). Replies are checked in any case."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError(f"judge.options.url = {self.url!r}: expected http://… or https://…, up to and with /v1")
        if urlsplit(self.url).password is not None:
            raise ValueError(f"judge.options.url has a password in it: take it out and put the key into {KEY_VARIABLE}")
        return self


JUDGE_OPTIONS = OptionsOf("judge", "kind", {"model": ModelJudgeOptions, "rules": JudgeOptions})


class JudgeConfig(Section):
    """``[judge]``: the judge that grades aspects of a rollout, and when it is trusted. Aspects become parts of
    ``[reward]``.
    """

    kind: Literal["none", "model", "rules"] = "none"
    """``none``: no judge; ``model``: a model behind an API; ``rules``: programs that some families provide, served on
    this machine over the same API.
    """
    options: Annotated[SerializeAsAny[Section], PlainValidator(JUDGE_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[judge.options]``: the judge's calls and their limits."""
    rubrics: dict[str, str] = Field(default={})
    """Aspect → rubric as TOML; ``"@NAME"`` stands for the text of a file beside the recipe."""
    calibrations: dict[str, str] = Field(default={})
    """Aspect → the report of ``etude judge calibrate``; ``"@NAME"`` stands for the text of a file beside the recipe."""
    min_agreement: float = Field(default=0.4, ge=-1, le=1)
    """Least weighted kappa between judge and people's labels, at the lower end of its 95 % interval; 0.4 counts as
    moderate agreement.
    """
    allow_uncalibrated: bool = False
    """True to train even with a judge whose agreement with people has not been measured."""

    @property
    def required_options(self) -> JudgeOptions:
        """The options of a judge. Raises ``AssertionError`` where the recipe has none."""
        assert isinstance(self.options, JudgeOptions), self.kind
        return self.options

    @model_validator(mode="after")
    def _check_idle(self) -> Self:
        if self.kind == "none":
            self.refuse_idle("judge", type(self).model_fields.keys() - {"kind", "options"}, "with judge.kind = 'none'")
        for aspect in self.calibrations.keys() - self.rubrics.keys():
            raise ValueError(f"judge.calibrations.{aspect} would have no effect: there is no judge.rubrics.{aspect}")
        return self
