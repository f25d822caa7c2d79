"""Contents of a run as plain frozen records, and as data frames.

    run.rollouts(reward=">0")  ──▶  Records[RolloutRecord]  ──▶  .to_pandas(), .to_polars()

Owns the record types. :mod:`etude.api.run` reads them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar, get_origin, overload

from etude.errors import UserError

if TYPE_CHECKING:
    import pandas
    import polars
    from _typeshed import DataclassInstance

RecordT_co = TypeVar("RecordT_co", bound="DataclassInstance", covariant=True)


class Records(Sequence[RecordT_co], Generic[RecordT_co]):
    """An immutable list of records of one kind."""

    def __init__(self, kind: type[RecordT_co], records: Iterable[RecordT_co]) -> None:
        self._kind, self._records = kind, tuple(records)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RecordT_co]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> RecordT_co: ...
    @overload
    def __getitem__(self, index: slice) -> "Records[RecordT_co]": ...
    def __getitem__(self, index: int | slice) -> "RecordT_co | Records[RecordT_co]":
        return Records(self._kind, self._records[index]) if isinstance(index, slice) else self._records[index]

    def __repr__(self) -> str:
        return f"<{len(self)} × {self._kind.__name__}>"

    def columns(self) -> dict[str, list[object]]:
        """The values by field; those of a mapping by key, as ``ended.submit``, ``None`` for absent ones. The fields
        exist even without records.
        """
        columns: dict[str, list[object]] = {}
        for field in fields(self._kind):
            values = [getattr(record, field.name) for record in self._records]
            if get_origin(field.type) is Mapping:
                for key in dict.fromkeys(key for value in values for key in value):
                    columns[f"{field.name}.{key}"] = [value.get(key) for value in values]
            else:
                columns[field.name] = values
        return columns

    def to_pandas(self) -> "pandas.DataFrame":
        """A frame with a row for each record. Raises :class:`~etude.errors.UserError` without pandas."""
        _require("pandas")
        import pandas

        return pandas.DataFrame(self.columns())

    def to_polars(self) -> "polars.DataFrame":
        """A frame with a row for each record. Raises :class:`~etude.errors.UserError` without polars."""
        _require("polars")
        import polars

        return polars.DataFrame(self.columns(), infer_schema_length=None)


def _require(library: str) -> None:
    try:
        import_module(library)
    except ModuleNotFoundError as error:
        raise UserError(f"{library} is not installed: pip install {library}, or read .columns()") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One committed optimiser step, which made weight version ``step``."""

    step: int
    at_s: float
    """Unix time at which it was computed."""
    reward: float | None
    """Mean reward of its rollouts."""
    metrics: Mapping[str, float]
    """Values by the names of ``etude.telemetry.metrics.METRICS``; those that do not apply to the step are absent."""
    reward_parts: Mapping[str, float]
    """Part of the reward → mean over the rollouts that have it."""
    ended: Mapping[str, int]
    """Reason why the agent stopped → rollouts of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One rollout, without its turns."""

    rollout_id: str
    purpose: str
    """``train``, or the label of an evaluation: ``before-greedy``."""
    group: int
    slot: int
    attempt: int
    status: str
    """``graded``, ``failed_infra`` or ``dropped``."""
    reward: float | None
    reason: str
    """Reason for which the agent stopped, or the failure."""
    step: int | None
    """The optimiser step that took its group; ``None``: none so far."""
    disposition: str | None
    """``keep``, ``quarantine`` or ``zero``; ``None`` if cheating was not monitored."""
    cause: str
    """The reason for the disposition."""
    turns: int
    summaries: int
    hints: int
    prompt_tokens: int
    """Sum over its turns; shared tokens are counted each time."""
    sampled_tokens: int
    first_version: int | None
    """The oldest weight version that sampled a part of it."""
    last_version: int | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One model call of a rollout, in words and in tokens."""

    rollout_id: str
    group: int
    slot: int
    turn: int
    """Its number in the rollout, from 0 on."""
    kind: str
    """Purpose of the call: ``act``, ``summary``, …"""
    reward: float | None
    """Reward of the whole rollout."""
    new_text: str
    """Text of the context that is new in this turn: the task, or the output of a tool."""
    completion: str
    """The model's text."""
    finish: str
    """``stop``, or ``length`` if it was truncated."""
    temperature: float
    prompt_ids: tuple[int, ...]
    """Tokens of the whole context."""
    completion_ids: tuple[int, ...]
    """Tokens that were sampled."""
    logprobs: tuple[float, ...]
    """Natural log of each token's probability, as the engine sampled it."""
    versions: tuple[int, ...]
    """Weight version that sampled each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """One published weight version."""

    version: int
    step: int
    kind: str
    """``full`` or ``delta``."""
    base: int | None
    """The version that a delta changes."""
    size_bytes: int
    digest: str
    """Digest of the whole state: versions with one digest have the same weights."""
    created: str
    """UTC, ISO 8601."""
