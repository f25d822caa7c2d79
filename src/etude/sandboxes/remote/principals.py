"""The clients of a server of sandboxes, and what its operator lets each of them ask for.

    FILE: what holds for all, and a table [clients.NAME] each ──▶ Client: digest of a key, permissions, quota

What a client may name of the server's machine and network, and how much it may have, is never the client's word: who
is told of nothing has no network, no folders and the usual limits. Does no more I/O than reading the file.
"""

import json
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError, field_validator
from pydantic_core import ErrorDetails

from etude.config.section import Section
from etude.errors import ConfigError, Unsupported
from etude.sandbox_spec import WORKDIR, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.remote.holdings import EACH, SANDBOXES, TOTAL, Quota

TABLE = "clients"
"""The key of the file below which each client has a table; what is beside it holds for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The things that a client may name: none, unless its operator says so."""

    allow: Container[str] = ()
    """Places ``host:port`` that its sandboxes may reach, each exactly as it is asked for."""
    folders: Sequence[Path] = ()
    """Folders below which a layer or a mount may be: clients see all that is in there."""
    images: Callable[[str], Image] | None = None
    """Finds a stored image by its digest or name, or raises :class:`~etude.errors.ConfigError`."""

    def resolve(self, spec: SandboxSpec, snapshots: Mapping[str, Image]) -> SandboxSpec:
        """The specification with its image found.

        Raises :class:`~etude.errors.Unsupported` for places and paths that are not allowed.

        An image is found by its digest, so that a client may name one that is stored on both machines; variables and
        working folder of the specification come before those that are stored.
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
        return replace(spec, image=replace(stored, environment=environment, workdir=workdir))

    def _stored(self, image: Image, snapshots: Mapping[str, Image]) -> Image | None:
        if not image.digest:
            return None
        if image.digest in snapshots:
            return snapshots[image.digest]
        if self.images is None:
            if image.layers:
                return None
            raise ConfigError(f"image {image.digest!r} is no snapshot, and this server has no store of images")
        return self.images(image.digest)

    def _check(self, paths: Iterable[Path], what: str) -> None:
        for path in paths:
            if not any(path.resolve().is_relative_to(folder.resolve()) for folder in self.folders):
                raise Unsupported(
                    f"{path} cannot be {what} of a remote sandbox: use an image by its digest, or let the server share "
                    "the folder"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The holder of a key, and what that opens."""

    digest: str
    """SHA-256 of the key, in hexadecimal digits."""
    permissions: Permissions = Permissions()
    quota: Quota = field(default_factory=Quota)


class Caps(Section):
    """Fields of :class:`~etude.sandbox_spec.SandboxLimits`; those that are not named have the usual cap."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    processes: int | None = None
    cpus: float | None = None

    def over(self, usual: SandboxLimits) -> SandboxLimits:
        """The usual caps but for those that are named. ``ValueError`` for one that nobody could keep to."""
        return replace(usual, **self.model_dump(exclude_none=True))


class ClientSection(Section):
    """A client as its operator describes it."""

    key_sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    """Digest of the client's key, in hexadecimal digits: ``printf %s KEY | sha256sum``."""
    allow: tuple[str, ...] = ()
    """Places ``host:port`` that its sandboxes may reach."""
    folders: tuple[Path, ...] = ()
    """Folders below which its layers and mounts may be: it sees all that is in there."""
    sandboxes: Annotated[int, Field(ge=1)] = SANDBOXES
    """Open at a time."""
    each: Caps = Caps()
    """The highest limits of one sandbox."""
    total: Caps = Caps()
    """The highest sum of the limits of all."""

    @field_validator("allow")
    @classmethod
    def _are_places(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        return SandboxSpec(allow=allow).allow

    def client(self, images: Callable[[str], Image] | None) -> Client:
        """Make a noun of it. ``ValueError`` for caps that contradict each other."""
        return Client(
            digest=self.key_sha256,
            permissions=Permissions(allow=frozenset(self.allow), folders=self.folders, images=images),
            quota=Quota(sandboxes=self.sandboxes, each=self.each.over(EACH), total=self.total.over(TOTAL)),
        )


def read_clients(file: Path, images: Callable[[str], Image] | None) -> dict[str, Client]:
    """The clients of a TOML file, by name; ``images`` finds a stored image for any of them.

    Raises :class:`~etude.errors.ConfigError` with the file, the client, the key and the value.
    """
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"clients cannot be read from {str(file)!r}: {error}") from error
    tables = tree.pop(TABLE, None)
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{str(file)!r} names no clients: expected a table [{TABLE}.NAME] with key_sha256 for each")
    clients = {
        name: parse_client(f"{file}, client {name!r}", {**tree, **table}, images) for name, table in tables.items()
    }
    if len({client.digest for client in clients.values()}) < len(clients):
        raise ConfigError(f"{str(file)!r}: two clients have the same key_sha256; give each a key of its own")
    return clients


def parse_client(source: str, tree: Mapping[str, object], images: Callable[[str], Image] | None) -> Client:
    """A client from plain values. Raises :class:`~etude.errors.ConfigError`, which begins with ``source``."""
    try:
        return ClientSection.model_validate_json(json.dumps(tree, default=str)).client(images)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(map(_explain, error.errors()))}") from error
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def _explain(fault: ErrorDetails) -> str:
    """The key, its value and what is wrong with it; errors of ours say all of that themselves."""
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    return f"{'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}"
