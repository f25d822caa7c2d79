"""Messages between a remote provider and its server: JSON over HTTP, and tars as they are. Pure.

    GET    /v2/capabilities                            → CapabilitiesReply
    PUT    /v2/sandboxes/NAME             CreateRequest → LeaseReply   repeated, it returns the same sandbox
    POST   /v2/sandboxes/NAME/exec        ExecRequest  → ExecReply
    POST   /v2/sandboxes/NAME/read        PathOnly     → FileText
    POST   /v2/sandboxes/NAME/write       FileText     → Done
    POST   /v2/sandboxes/NAME/export      ExportRequest → a tar
    POST   /v2/sandboxes/NAME/load        a tar        → Done
    POST   /v2/sandboxes/NAME/stats                    → Use
    POST   /v2/sandboxes/NAME/kill                     → Done         everything that runs inside
    POST   /v2/sandboxes/NAME/snapshot                 → ImageReply
    POST   /v2/sandboxes/NAME/fork        SandboxNames → Done         repeated, it returns the same forks
    DELETE /v2/sandboxes/NAME                          → Done         also if there is none
    POST   /v2/leases                     SandboxNames → SandboxNames renews them; the answer has the lost ones

and, for the choice of a host (:mod:`etude.sandboxes.remote.hosts`):

    GET    /v2/host                                    → HostReply    its capacity, and whether it is being drained
    POST   /v2/announce                   BurstRequest → Done         sandboxes needed soon, which a pool prepares
    POST   /v2/drain                                   → HostReply    an operator's: accepts no new sandboxes

Every request has ``Authorization: Bearer KEY``. The client chooses a sandbox's NAME, 32 hexadecimal digits, so that a
request whose answer was lost can be repeated; names belong to one key. A sandbox without requests for ``lease_s`` is
closed. Cancelling a request ends its command.

An answer other than 200 holds an :class:`ErrorReply`, whose kind becomes the client's exception. Both ends reject
unknown fields and unknown kinds of values: the other end may rely on them. A change of meaning gets a new version
number in the path.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from etude.errors import AgentFault, ConfigError, SandboxError, SandboxesBusy, Unsupported
from etude.protocols import ExecResult
from etude.sandbox_spec import Capability, Image, SandboxSpec, SandboxStats
from etude.sandboxes.images.archives import EXPORT_LIMIT_BYTES
from etude.sandboxes.remote.placement import HostReport

VERSION = 2
"""Version number in every path."""
JSON_LIMIT_BYTES = 96 << 20
"""Largest body other than a tar: an input of many megabytes fits, encoded as JSON."""
TAR_SLACK_BYTES = 1 << 20
"""Bytes beyond its limit at which a tar's reader disconnects."""
MAX_FORKS = 64
"""Maximum number of forks in one request."""
MAX_NAMES = 10_000
"""Maximum number of leases in one request; a client with more sends several."""
MAX_BURST = 1 << 20
"""Maximum number of sandboxes that can be announced."""

Name = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Texts = dict[str, str]
M = TypeVar("M", bound="WireMessage")


class WireMessage(BaseModel):
    """A typed JSON body; unknown fields and other types are errors, also in nested objects."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Done(WireMessage):
    """An empty reply."""


class CapabilitiesReply(WireMessage):
    """The capabilities of the server's provider."""

    version: int
    capabilities: list[str]
    """Capabilities of the server; a client ignores unknown ones."""


class CreateRequest(WireMessage):
    """The files of a new sandbox, and its specification; layers and mounts are paths on the server's machine."""

    files: Texts
    spec: SandboxSpec


class LeaseReply(WireMessage):
    """A new sandbox, and the time for which the client holds it without a request."""

    lease_s: float


class ExecRequest(WireMessage):
    """Request for one command."""

    argv: list[str]
    stdin: str
    timeout_s: float
    environment: Texts


class ExecReply(WireMessage):
    """The result of a command."""

    result: ExecResult


class ImageReply(WireMessage):
    """A snapshot, which the server stores under its digest."""

    image: Image


class PathOnly(WireMessage):
    """Request that only names the path of a file."""

    path: str


class FileText(WireMessage):
    """A file and its text, ``None`` if there is none."""

    path: str
    text: str | None


class ExportRequest(WireMessage):
    """The paths to export, and the limit."""

    paths: list[str]
    limit_bytes: Annotated[int, Field(ge=0)] = EXPORT_LIMIT_BYTES


class SandboxNames(WireMessage):
    """Names of sandboxes."""

    names: list[Name] = Field(max_length=MAX_NAMES)


class HostReply(WireMessage):
    """The capacity of a host, for the requesting client."""

    report: HostReport


class BurstRequest(WireMessage):
    """Sandboxes of one specification that will be requested soon."""

    spec: SandboxSpec
    count: Annotated[int, Field(gt=0, le=MAX_BURST)]


class Use(WireMessage):
    """A sandbox's usage: fields of :class:`~etude.sandbox_spec.SandboxStats`; ``None`` for unknown ones."""

    memory_bytes: float | None
    disk_bytes: float | None
    processes: float | None
    cpu_s: float | None
    age_s: float | None

    def stats(self) -> SandboxStats:
        """The statistics in this message."""
        return SandboxStats(**{name: math.nan if value is None else value for name, value in self.model_dump().items()})

    @classmethod
    def of(cls, stats: SandboxStats) -> "Use":
        """The message for some statistics."""
        return cls(
            **{
                name: None if math.isnan(value := getattr(stats, name)) else float(value)
                for name in ("memory_bytes", "disk_bytes", "processes", "cpu_s", "age_s")
            }
        )


class ErrorKind(StrEnum):
    """Kind of error in a reply, which decides the exception that the client raises."""

    VALUE = "value"
    UNSUPPORTED = "unsupported"
    AGENT = "agent"
    BUSY = "busy"
    SANDBOX = "sandbox"
    CONFIG = "config"
    KEY = "key"


class ErrorReply(WireMessage):
    """Reply to a failed request."""

    fault: ErrorKind
    message: str

    def error(self) -> Exception:
        """The exception that the client raises."""
        return ERRORS[self.fault].exception(self.message)

    @classmethod
    def of(cls, error: Exception) -> "ErrorReply":
        """The message for an exception, of the most specific kind."""
        fault = next(
            (fault for fault, meaning in ERRORS.items() if isinstance(error, meaning.exception)), ErrorKind.SANDBOX
        )
        return cls(fault=fault, message=str(error))

    @property
    def status(self) -> int:
        """Status of the HTTP answer, for people and proxies; clients use the kind."""
        return ERRORS[self.fault].status


class ErrorMeaning(NamedTuple):
    """HTTP status and exception of one kind of error."""

    exception: type[Exception]
    status: int


ERRORS: Mapping[ErrorKind, ErrorMeaning] = MappingProxyType(
    {
        ErrorKind.UNSUPPORTED: ErrorMeaning(Unsupported, 501),
        ErrorKind.CONFIG: ErrorMeaning(ConfigError, 404),
        ErrorKind.VALUE: ErrorMeaning(ValueError, 400),
        ErrorKind.AGENT: ErrorMeaning(AgentFault, 409),
        ErrorKind.BUSY: ErrorMeaning(SandboxesBusy, 503),
        ErrorKind.SANDBOX: ErrorMeaning(SandboxError, 503),
        ErrorKind.KEY: ErrorMeaning(ConfigError, 401),
    }
)
"""Specific kinds before general ones."""


def read_message(kind: type[M], body: bytes) -> M:
    """Parse a message. Raises ``ValueError`` naming the fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in error.errors()[:5]
        )
        raise ValueError(f"no {kind.__name__}: {faults}") from error


def write_message(message: WireMessage) -> bytes:
    """Encode a message. Raises ``ValueError`` for text that is not Unicode (a lone surrogate)."""
    return message.model_dump_json().encode()


def known_capabilities(names: list[str]) -> frozenset[Capability]:
    """The capabilities with these names; names unknown to this version are ignored."""
    words = {str(capability) for capability in Capability}
    return frozenset(Capability(name) for name in names if name in words)
