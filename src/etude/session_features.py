"""Features of live sessions that are there before the model says anything. Pure.

template, arm, length of the prompt, what its user said of earlier sessions ──▶ row [D]
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log1p
from typing import Self

from etude.types import Observation

MOST_NAMES = 24
"""Templates, and arms, with a feature of their own: the most frequent; the others share one."""
PRIOR = 4.0
"""Values of the average user that a user's own earlier ones are weighed against."""
MEASURES = 3
"""Features that are no names."""


@dataclass(slots=True)
class UserRecord:
    """Values that one user has given so far."""

    requests: int = 0
    """Times that some could have been given."""
    given: int = 0
    total: float = 0.0

    def add(self, values: Sequence[float | None]) -> None:
        """Count the values of a session; ``None`` was not given."""
        given = [value for value in values if value is not None]
        self.requests += len(values)
        self.given += len(given)
        self.total += sum(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFeatures:
    """The features of some sessions: which names have one of their own, and what a value is usually."""

    templates: Mapping[str, int]
    arms: Mapping[str, int]
    usual: float

    @classmethod
    def of(cls, observations: Sequence[Observation], usual: float) -> Self:
        """Features for sessions like these."""
        return cls(
            templates=_numbered(observation.template for observation in observations),
            arms=_numbered(observation.arm for observation in observations),
            usual=usual,
        )

    @property
    def width(self) -> int:
        """D."""
        return len(self.templates) + len(self.arms) + 2 + MEASURES

    def row(self, observation: Observation, record: UserRecord) -> list[float]:
        """[D] of a session, whose user has that record of earlier ones."""
        return [
            *_one_hot(self.templates, observation.template),
            *_one_hot(self.arms, observation.arm),
            log1p(observation.prompt_tokens),
            (record.given + PRIOR / 2) / (record.requests + PRIOR),
            (record.total + PRIOR * self.usual) / (record.given + PRIOR),
        ]


def _numbered(names: Iterable[str]) -> dict[str, int]:
    common = sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_NAMES]
    return {name: number for number, (name, _) in enumerate(common)}


def _one_hot(numbers: Mapping[str, int], name: str) -> list[float]:
    row = [0.0] * (len(numbers) + 1)
    row[numbers.get(name, len(numbers))] = 1.0
    return row
