"""The routing table: which weight versions users may meet, and which share of the users meets which.

    user ──SHA-256 with the salt──▶ bucket in [0, 1) ──▶ arm: "live" or "canary" ──▶ the digest that must answer

Written by the process `release`, read by the gateways for users and by the engines behind them; so the noun lies
beneath the stages. Owns the noun, its JSON and the bucket of a user. How tables follow from each other is
:mod:`etude.releases.routing`'s, where they lie :mod:`etude.run.routing_tables`'.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Self

LIVE, CANARY, SHADOW, FALLBACK = "live", "canary", "shadow", "fallback"
"""Names of arms: what users have; what a share of them tries; what answers the same prompts unseen; what was live
before and is kept ready, for going back.
"""
BUCKET_BYTES = 8
"""Bytes of a hash that make a bucket: 2^64 of them, so that any share is met to the last user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One weight version in the table. Raises ``ValueError`` for a share outside of [0, 1] or an empty digest."""

    name: str
    version: int
    digest: str
    """State digest of its weights: an engine must report exactly this to be given a call of the arm."""
    share: float = 0.0
    """Share of the users; 0 for arms that no user meets."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not self.digest or self.version < 0:
            raise ValueError(f"{self}: expected a share from 0 to 1, a digest, and a version from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The arm of one user under one table."""

    arm: Arm
    label: str
    """Arm and generation, such as ``canary.12``: sessions of one label were drawn alike, experiments count by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """All arms at one time. Raises ``ValueError`` unless there is one live arm and shares add up to 1."""

    generation: int
    """Ascends with every change; the table of the highest generation counts."""
    salt: str
    """Makes buckets of one experiment independent of those of another."""
    arms: tuple[Arm, ...]
    """Arms that users meet: live, and canary if there is one."""
    shadow: Arm | None = None
    fallback: Arm | None = None

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if names not in ([LIVE], [LIVE, CANARY]) or abs(sum(arm.share for arm in self.arms) - 1) > 1e-9:
            raise ValueError(f"{self}: expected a live arm, perhaps a canary, and shares that add up to 1")

    @property
    def live(self) -> Arm:
        """The arm of all users who are in no experiment."""
        return self.arms[0]

    @property
    def canary(self) -> Arm | None:
        """The arm that a share of the users tries."""
        return self.arms[1] if len(self.arms) > 1 else None

    def assign(self, user: str) -> Assignment:
        """The arm of a user. A larger share of the canary takes users in and lets none out."""
        canary = self.canary
        arm = canary if canary is not None and bucket(self.salt, user) < canary.share else self.live
        return Assignment(arm=arm, label=self.label(arm))

    def label(self, arm: Arm) -> str:
        """The label of an arm's sessions under this table."""
        return f"{arm.name}.{self.generation}"

    def to_json(self) -> bytes:
        """The table as :meth:`from_json` reads it."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The table that was written so. Raises ``ValueError`` for anything else."""
        try:
            fields = json.loads(data)
            arms = tuple(Arm(**arm) for arm in fields.pop("arms"))
            shadow, fallback = fields.pop(SHADOW), fields.pop(FALLBACK)
            return cls(
                arms=arms,
                shadow=None if shadow is None else Arm(**shadow),
                fallback=None if fallback is None else Arm(**fallback),
                **fields,
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is not a routing table: {error!r}") from error


def bucket(salt: str, user: str) -> float:
    """The place of a user in [0, 1), the same everywhere: SHA-256 over salt and user."""
    digest = hashlib.sha256(f"{salt}\0{user}".encode("utf-8", "surrogatepass")).digest()
    return float(int.from_bytes(digest[:BUCKET_BYTES]) / (1 << (8 * BUCKET_BYTES)))
