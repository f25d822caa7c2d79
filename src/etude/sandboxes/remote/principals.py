"""Clients of a sandbox server, and their permissions.

    FILE: what holds for all, and a table [clients.NAME] each ──▶ Client: digest of a key, permissions, quota

The operator, never the client, decides which parts of the server's machine and network a client may use, and how much:
a client without permissions has no network, no folders and the default limits. The only I/O is reading the file.
"""

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError, field_validator
from pydantic_core import ErrorDetails

from etude.config.section import Section
from etude.errors import ConfigError, SandboxError, SandboxesBusy, Unsupported
from etude.sandbox_spec import WORKDIR, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.remote.placement import SANDBOX_BYTES

SANDBOXES = 256
"""Concurrent sandboxes of one key on a small machine; the default."""
EACH = SandboxLimits(memory_bytes=8 << 30, disk_bytes=8 << 30, processes=4096, cpus=4.0)
"""Largest limits of one sandbox; the default: enough for builds and databases."""


def limits_of_many(sandboxes: int) -> SandboxLimits:
    """The total limits of a number of default sandboxes."""
    usual = SandboxLimits()
    return SandboxLimits(**{limit.name: sandboxes * getattr(usual, limit.name) for limit in fields(SandboxLimits)})


def _amounts(limits: SandboxLimits) -> list[tuple[str, float]]:
    return [(limit.name, getattr(limits, limit.name)) for limit in fields(limits)]


TOTAL = limits_of_many(SANDBOXES)
"""Largest total limits of a key's sandboxes; the default: its maximum number with default limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most sandboxes and resources that one client may have at a time."""

    sandboxes: int = SANDBOXES
    each: SandboxLimits = EACH
    """Largest limits of one sandbox."""
    total: SandboxLimits = TOTAL
    """Largest sum of the limits of all sandboxes."""

    def __post_init__(self) -> None:
        if self.sandboxes < 1:
            raise ValueError(f"sandboxes={self.sandboxes}: expected at least 1")
        for name, most in _amounts(self.each):
            if most > getattr(self.total, name):
                raise ValueError(f"each.{name}={most} is more than total.{name}={getattr(self.total, name)}")

    def check(self, limits: SandboxLimits, holder: str) -> None:
        """Raise :class:`~etude.errors.Unsupported` for limits that no sandbox of ``holder`` may have."""
        for name, amount in _amounts(limits):
            if amount > (most := getattr(self.each, name)):
                raise Unsupported(
                    f"limits.{name}={amount}: a sandbox of key {holder!r} may have {most} on this server; "
                    "ask for less, or let its operator allow more"
                )


def usual_quota(memory_bytes: float) -> Quota:
    """The default quota of a key on a machine with this much memory for sandboxes: most working agents are idle, and a
    few build.
    """
    sandboxes = max(SANDBOXES, int(memory_bytes) // SANDBOX_BYTES)
    return Quota(sandboxes=sandboxes, total=limits_of_many(sandboxes))


USUAL_QUOTA = Quota()


@dataclass(frozen=True, slots=True)
class RegisteredSandbox:
    """One registered sandbox; its name is unique among its client's."""

    holder: str
    name: str


@dataclass(slots=True)
class _Terms:
    ends: float
    """End of its lease, in monotonic seconds."""
    dies: float
    """End of its time to live."""
    limits: SandboxLimits
    requests: int = 0
    """Requests in progress."""


class SandboxRegistry:
    """All sandboxes that a server's clients hold."""

    def __init__(self, *, lease_s: float, quotas: Mapping[str, Quota], most: int | None = None) -> None:
        """``quotas`` by holder; ``most`` limits the sandboxes of all holders together."""
        self.lease_s = lease_s
        self._quotas = quotas
        self._most = most
        self._terms: dict[RegisteredSandbox, _Terms] = {}
        self._counts: dict[str, Counter[SandboxLimits]] = {holder: Counter() for holder in quotas}
        """Sandboxes of each holder, counted by their limits: only a few distinct ones."""

    def __len__(self) -> int:
        """The number of sandboxes."""
        return len(self._terms)

    def __contains__(self, registered: RegisteredSandbox) -> bool:
        """Say whether a sandbox is registered."""
        return registered in self._terms

    def take(self, needed: Sequence[RegisteredSandbox], limits: SandboxLimits, ttl_s: float, now: float) -> None:
        """Register new sandboxes, all or none.

        Raises ``ValueError`` if one is already registered, :class:`~etude.errors.SandboxesBusy` beyond the quota of
        their holder or the total limit.
        """
        clients_by_digest = [registered.name for registered in needed if registered in self._terms]
        if clients_by_digest:
            raise ValueError(f"sandbox {clients_by_digest[0]} is there already: give new ones names of their own")
        for holder, count in Counter(registered.holder for registered in needed).items():
            self._check_room(holder, count, limits)
        for registered in needed:
            self._terms[registered] = _Terms(ends=now + self.lease_s, dies=now + ttl_s, limits=limits)
            self._counts[registered.holder][limits] += 1

    def places(self, holder: str) -> int:
        """The number of sandboxes that a holder may still make, if their limits fit."""
        own = self._quotas[holder].sandboxes - self._counts[holder].total()
        return own if self._most is None else max(0, min(own, self._most - len(self)))

    def limits(self, registered: RegisteredSandbox) -> SandboxLimits:
        """The limits of a sandbox. ``KeyError`` if it is not registered."""
        return self._terms[registered].limits

    def _check_room(self, holder: str, count: int, limits: SandboxLimits) -> None:
        """Raise an error unless ``count`` more sandboxes of a holder fit."""
        quota, counts, fix = self._quotas[holder], self._counts[holder], "close some, or try again later"
        if counts.total() + count > quota.sandboxes:
            raise SandboxesBusy(
                f"{counts.total()} of {quota.sandboxes} sandboxes of key {holder!r} are open, {count} more do "
                f"not fit: {fix}"
            )
        if self._most is not None and len(self) + count > self._most:
            raise SandboxesBusy(
                f"{len(self)} of {self._most} sandboxes of this server are open, {count} more do not fit: {fix}"
            )
        for name, amount in _amounts(limits):
            used = sum(number * getattr(each, name) for each, number in counts.items())
            if used + count * amount > (most := getattr(quota.total, name)):
                raise SandboxesBusy(
                    f"sandboxes of key {holder!r} have {name}={used} of {most}, {count * amount} more do not fit: {fix}"
                )

    def begin(self, registered: RegisteredSandbox, now: float) -> bool:
        """Begin a request on a sandbox; return false, without effect, if it is not registered."""
        terms = self._terms.get(registered)
        if terms is None:
            return False
        terms.requests += 1
        terms.ends = now + self.lease_s
        return True

    def end(self, registered: RegisteredSandbox, now: float) -> None:
        """End a request on a sandbox, which may have been removed meanwhile."""
        terms = self._terms.get(registered)
        if terms is not None:
            terms.requests -= 1
            terms.ends = now + self.lease_s

    def renew(self, needed: Iterable[RegisteredSandbox], now: float) -> list[RegisteredSandbox]:
        """Renew the leases of some sandboxes; return those that are not registered."""
        lost = []
        for registered in needed:
            terms = self._terms.get(registered)
            if terms is None:
                lost.append(registered)
            else:
                terms.ends = now + self.lease_s
        return lost

    def drop(self, registered: RegisteredSandbox) -> None:
        """Remove a sandbox that is closed or being closed; doing so again has no effect."""
        terms = self._terms.pop(registered, None)
        if terms is not None:
            counts = self._counts[registered.holder]
            counts[terms.limits] -= 1
            if not counts[terms.limits]:
                del counts[terms.limits]

    def due(self, now: float) -> list[RegisteredSandbox]:
        """The sandboxes whose time to live is over, or whose lease is over with no request in progress."""
        return [
            registered
            for registered, terms in self._terms.items()
            if terms.dies <= now or (terms.ends <= now and not terms.requests)
        ]


SNAPSHOT = "snapshot-"
"""Prefix of the digest of a snapshot on a server; no other image has it."""
TABLE = "clients"
"""The key in the file with one table per client; keys next to it apply to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Images, paths and places that a client may name: none, unless the operator allows them."""

    allow: Container[str] = ()
    """Places ``host:port`` that its sandboxes may reach; a request must match one exactly."""
    folders: Sequence[Path] = ()
    """Folders that may contain layers and mounts: clients see all their content."""
    images: Callable[[str], Image] | None = None
    """Finds a stored image by its digest or name, or raises :class:`~etude.errors.ConfigError`."""

    def resolve(self, spec: SandboxSpec, snapshots: Mapping[str, Image]) -> SandboxSpec:
        """The specification with its image resolved.

        Raises :class:`~etude.errors.Unsupported` for places and paths that are not allowed.

        An image is found by its digest, so a client may name one that is stored on both machines. The specification's
        variables, working folder, entry point and checks override the stored ones.
        """
        for place in spec.allow:
            if place not in self.allow:
                raise Unsupported(
                    f"allow={place!r}: sandboxes of this key may not reach it; let the server's operator allow it"
                )
        self._check(spec.mounts.values(), "a mount")
        stored = self._stored(spec.image, snapshots)
        if stored is None:
            self._check(spec.image.layers, "a layer")
            return spec
        environment = {**stored.environment, **spec.image.environment}
        workdir = stored.workdir if spec.image.workdir == WORKDIR else spec.image.workdir
        image = replace(
            stored,
            environment=environment,
            workdir=workdir,
            entrypoint=spec.image.entrypoint or stored.entrypoint,
            healthchecks=spec.image.healthchecks or stored.healthchecks,
        )
        return replace(spec, image=image)

    def _stored(self, image: Image, snapshots: Mapping[str, Image]) -> Image | None:
        if not image.digest:
            return None
        if image.digest in snapshots:
            return snapshots[image.digest]
        if image.digest.startswith(SNAPSHOT):
            raise SandboxError(f"{image.digest} is gone: the server that kept it was started anew")
        if self.images is None:
            if image.layers:
                return None
            raise ConfigError(f"image {image.digest!r} is not a snapshot, and this server has no store of images")
        return self.images(image.digest)

    def _check(self, paths: Iterable[Path], what: str) -> None:
        for path in paths:
            if not any(path.resolve().is_relative_to(folder.resolve()) for folder in self.folders):
                raise Unsupported(
                    f"{path} cannot be {what} of a remote sandbox: use an image by its digest, or let the server share "
                    "the folder"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxClient:
    """A client, identified by its key, and its permissions."""

    digest: str
    """SHA-256 of the key, in hexadecimal digits."""
    permissions: Permissions = Permissions()
    quota: Quota = USUAL_QUOTA
    is_operator: bool = False
    """True if it may drain the server."""


class Caps(Section):
    """Fields of :class:`~etude.sandbox_spec.SandboxLimits`; those that are not named have the usual cap."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    processes: int | None = None
    cpus: float | None = None

    def over(self, usual: SandboxLimits) -> SandboxLimits:
        """The default caps, overridden by the named ones. ``ValueError`` for a cap that cannot be enforced."""
        return replace(usual, **self.model_dump(exclude_none=True))


class ClientSection(Section):
    """The section of a clients file for one client."""

    key_sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    """Digest of the client's key, in hexadecimal digits: ``printf %s KEY | sha256sum``."""
    allow: tuple[str, ...] = ()
    """Places ``host:port`` that its sandboxes may reach."""
    folders: tuple[Path, ...] = ()
    """Folders below which its layers and mounts may be: it sees all that is in there."""
    sandboxes: Annotated[int, Field(ge=1)] | None = None
    """Open at a time; what the machine has memory for, unless it is said."""
    each: Caps = Caps()
    """The highest limits of one sandbox."""
    total: Caps = Caps()
    """The highest sum of the limits of all."""
    operator: bool = False
    """May drain the server."""

    @field_validator("allow")
    @classmethod
    def _are_places(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        return SandboxSpec(allow=allow).allow

    def client(self, images: Callable[[str], Image] | None, usual: Quota) -> SandboxClient:
        """The client for this section. ``ValueError`` for contradictory caps."""
        sandboxes = self.sandboxes or usual.sandboxes
        total = limits_of_many(max(sandboxes, SANDBOXES))
        return SandboxClient(
            digest=self.key_sha256,
            permissions=Permissions(allow=frozenset(self.allow), folders=self.folders, images=images),
            quota=Quota(sandboxes=sandboxes, each=self.each.over(usual.each), total=self.total.over(total)),
            is_operator=self.operator,
        )


def read_clients(
    file: Path, images: Callable[[str], Image] | None, usual: Quota = USUAL_QUOTA
) -> dict[str, SandboxClient]:
    """The clients of a TOML file, by name; ``images`` finds a stored image for any of them, and ``usual`` is the
    default quota.

    Raises :class:`~etude.errors.ConfigError` with the file, the client, the key and the value.
    """
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"clients cannot be read from {str(file)!r}: {error}") from error
    tables = tree.pop(TABLE, None)
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{str(file)!r} names no clients: expected a table [{TABLE}.NAME] with key_sha256 for each")
    clients = {
        name: parse_client(f"{file}, client {name!r}", {**tree, **table}, images, usual)
        for name, table in tables.items()
    }
    if len({client.digest for client in clients.values()}) < len(clients):
        raise ConfigError(f"{str(file)!r}: two clients have the same key_sha256; give each a key of its own")
    return clients


def parse_client(
    source: str, tree: Mapping[str, object], images: Callable[[str], Image] | None, usual: Quota = USUAL_QUOTA
) -> SandboxClient:
    """Parse a client from plain values. Raises :class:`~etude.errors.ConfigError`, which begins with ``source``."""
    try:
        return ClientSection.model_validate_json(json.dumps(tree, default=str)).client(images, usual)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(map(_explain, error.errors()))}") from error
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def _explain(fault: ErrorDetails) -> str:
    """The key, its value and the error; étude's own errors contain all of that already."""
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
