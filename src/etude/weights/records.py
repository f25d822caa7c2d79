"""The records of the weight store: small signed JSON objects, and the keys under which everything lies.

    log.json                                    which log this is (:class:`LogStart`)
    commits/<version>.json                      a version exists (:class:`~etude.types.WeightVersion`)
    links/<source|anchor>-<target>.json         another way to a version (:class:`Link`)
    staged/<version>/<writer>/<seq>.json        packs that are up before the version is (:class:`Announcement`)
    leases/<reader>/<seq>.json                  a reader still needs a version (:class:`ReaderLease`)
    packs/<sha256>, layouts/<sha256>.json       what records refer to, named by its content

This file owns their form: it turns records into bytes and back and does no I/O. Nothing from a bucket is trusted. A
record must be canonical JSON (sorted keys, no spaces), lie where it says it lies, and have every field in its type and
range; fields unknown here are refused unless their names start with ``x_``. With a key, records are signed (HMAC-SHA256
of the canonical bytes without ``signature``) and unsigned ones are refused; without one, signatures are not looked at.
Every record bears its ``format`` and the id of its ``log``, so that a record of one log is none of another's, and what
is a change of a version bears the digest of that, so that no record continues any other history than its own. The
format has room for shares of several ranks; what is written and read is one, of rank 0.
"""

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, assert_never

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import ErrorDetails

from etude.errors import DamagedError
from etude.types import Json, WeightPack, WeightVersion

FORMAT = 2
"""The format that records name. Those of format 1 said nothing, bore no log id and are refused."""
LOG_KEY = "log.json"
"""Key of a log's first record."""
MOST_VERSION = 10**12
"""The highest version number."""
MOST_RECORD_BYTES = 64 << 20
"""No record is larger: a version of a few TB in packs of 32 MB needs less than 1 % of it."""

_RANK = 0
_MOST_TEXT = 10_000
_MOST_SHOWN = 100
_MOST_FAULTS = 5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_LOG_ID = re.compile(r"[0-9a-f]{32}")
_ANCHOR = "anchor"
_SIGNATURE = "signature"
_FOREIGN = "x_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStart:
    """The first record of a log, which says nothing but when that began: what counts is the log id that it bears."""

    created: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way to ``target`` besides its own commit: several deltas merged, an anchor, or a delta turned around."""

    source: int | None
    """The version that the packs are a change of; ``None`` when they hold everything."""
    source_digest: str | None
    """Digest of the whole state at ``source``; ``None`` where that is."""
    target: int
    digest: str
    """Digest of the whole state at ``target``, 32 hex digits."""
    layout: str
    """SHA-256 of the layout."""
    packs: tuple[WeightPack, ...]

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"a link from weight version {self.source} to itself leads nowhere")

    @property
    def kind(self) -> Literal["merged", "anchor", "inverse"]:
        """The kind of way: one that skips versions, starts from nothing, or goes back."""
        if self.source is None:
            return "anchor"
        return "merged" if self.source < self.target else "inverse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Packs that have been uploaded for a version that is not committed yet, and perhaps never will be."""

    version: int
    writer: str
    """Name of the process: new after each restart, so that announcements of a dead one are not mixed with ours."""
    sequence: int
    """Counts the announcements of a version from 0."""
    packs: tuple[WeightPack, ...]

    def __post_init__(self) -> None:
        _require_name("writer", self.writer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLease:
    """A reader's lease of ``version``: what leads from it to the newest must be kept."""

    reader: str
    version: int
    sequence: int
    """Counts the renewals of one reader from 0."""

    def __post_init__(self) -> None:
        _require_name("reader", self.reader)


Record: TypeAlias = LogStart | WeightVersion | Link | Announcement | ReaderLease
"""Anything that lies in the store as a record."""
RecordT = TypeVar("RecordT", bound=Record)


# --- Keys ---------------------------------------------------------------------------------------------------------


def commit_key(version: int) -> str:
    """Key of a version's record."""
    return f"commits/{version:08d}.json"


def link_key(source: int | None, target: int) -> str:
    """Key of the link between two versions; ``source`` is ``None`` for anchors."""
    return f"links/{_ANCHOR if source is None else f'{source:08d}'}-{target:08d}.json"


def pack_key(digest: str) -> str:
    """Key of the pack with this SHA-256."""
    return f"packs/{digest}"


def layout_key(digest: str) -> str:
    """Key of the layout with this SHA-256."""
    return f"layouts/{digest}.json"


def staged_folder(version: int) -> str:
    """Folder of the announcements for a version."""
    return f"staged/{version:08d}"


def lease_folder(reader: str) -> str:
    """Folder of a reader's leases."""
    return f"leases/{reader}"


def record_key(record: Record) -> str:
    """Key of a record."""
    match record:
        case LogStart():
            return LOG_KEY
        case WeightVersion():
            return commit_key(record.version)
        case Link():
            return link_key(record.source, record.target)
        case Announcement():
            return f"{staged_folder(record.version)}/{record.writer}/{record.sequence:06d}.json"
        case ReaderLease():
            return f"{lease_folder(record.reader)}/{record.sequence:08d}.json"
        case _:
            assert_never(record)


def parse_commit_key(key: str) -> int | None:
    """The version whose record lies at ``key``; ``None`` for any other key."""
    match = re.fullmatch(r"commits/(\d{8,15})\.json", key, re.ASCII)
    version = int(match[1]) if match else None
    return version if version is not None and commit_key(version) == key else None


def parse_link_key(key: str) -> tuple[int | None, int] | None:
    """The source and target of the link that lies at ``key``; ``None`` for any other key."""
    match = re.fullmatch(rf"links/(\d{{8,15}}|{_ANCHOR})-(\d{{8,15}})\.json", key, re.ASCII)
    if match is None:
        return None
    ends = None if match[1] == _ANCHOR else int(match[1]), int(match[2])
    return ends if link_key(*ends) == key else None


# --- Bytes --------------------------------------------------------------------------------------------------------


def require_log_id(log_id: str) -> None:
    """Raise ``ValueError`` for what cannot be the id of a log."""
    if not _LOG_ID.fullmatch(log_id):
        raise ValueError(f"the log id {log_id!r} does not have 32 hex digits: `etude weights ls` shows a log's own")


def record_bytes(record: Record, log_id: str, key: bytes | None = None) -> bytes:
    """The canonical bytes of a record of the log ``log_id``, signed when there is a ``key``.

    Raises ``ValueError`` for a record that could not be read back, e.g. with a negative size.
    """
    try:
        fields = _plain(record, log_id)
        data = _canonical(fields)
        if key is not None:
            data = _canonical({**fields, _SIGNATURE: _sign(data, key)})
        back: Record = parse_record(data, type(record), record_key(record), key)[0]
    except (DamagedError, TypeError) as error:
        raise ValueError(f"this record must not be written: {error}") from error
    if back != record:
        raise ValueError(f"this record must not be written, it would be read as {back!r}: {record!r}")
    return data


def parse_record(data: bytes, kind: type[RecordT], name: str, key: bytes | None = None) -> tuple[RecordT, str]:
    """The record of type ``kind`` that lies at the object key ``name``, and the id of its log.

    Raises :class:`~etude.errors.DamagedError`, naming the object, for anything but a record of that kind that belongs
    there and, with a ``key``, bears its signature.
    """
    try:
        fields = _load(data)
        _check_signature(fields, key)
        record, log_id = _read(fields, kind)
        if record_key(record) != name:
            raise ValueError(f"it belongs at {record_key(record)}")
    except (ValueError, TypeError) as error:
        raise DamagedError(f"record {name} is damaged: {error}; run `etude weights verify`") from error
    return record, log_id


def _plain(record: Record, log_id: str) -> dict[str, Json]:
    fields: dict[str, Any] = orjson.loads(orjson.dumps(dataclasses.asdict(record)))
    if "layout" in fields:
        fields["layouts"] = [fields.pop("layout")]
    for pack in fields.get("packs", ()):
        pack["rank"] = _RANK
    return {"kind": _KINDS[type(record)], "format": FORMAT, "log": log_id, **fields}


def _canonical(fields: Mapping[str, Json]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


def _load(data: bytes) -> dict[str, Json]:
    if len(data) > MOST_RECORD_BYTES:
        raise ValueError(f"it has {len(data)} bytes, at most {MOST_RECORD_BYTES} are allowed")
    fields = orjson.loads(data)
    if not isinstance(fields, dict):
        raise ValueError(f"it is a {type(fields).__name__}, not an object")
    if _canonical(fields) != data:
        raise ValueError("it is not in canonical form")
    return fields


def _sign(data: bytes, key: bytes) -> str:
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _check_signature(fields: dict[str, Json], key: bytes | None) -> None:
    """Take the signature out of ``fields``. Raises ``ValueError`` unless it is right or there is no key."""
    signature = fields.pop(_SIGNATURE, None)
    if key is None:
        return
    if not isinstance(signature, str):
        raise ValueError("it is not signed")
    if not hmac.compare_digest(signature.encode(), _sign(_canonical(fields), key).encode()):
        raise ValueError("its signature is wrong: another key, or it was changed")


# --- Fields -------------------------------------------------------------------------------------------------------


def _check_printable(text: str) -> str:
    """Refuse what a terminal would act upon: there are no control characters in it but line ends."""
    if len(text) > _MOST_TEXT or not text.replace("\n", "").isprintable():
        raise ValueError(f"expected printable text of at most {_MOST_TEXT} characters")
    return text


def _check_utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta(0):
        raise ValueError("expected a date and time in UTC as of ISO 8601")
    return text


_Count: TypeAlias = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""Beyond it, JSON readers in other languages round."""
_Version: TypeAlias = Annotated[int, Field(ge=0, le=MOST_VERSION)]
_Chunk: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
_Name: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{_NAME.pattern}$")]
_Sha256: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_StateDigest: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{_LOG_ID.pattern}$")]
_Text: TypeAlias = Annotated[str, AfterValidator(_check_printable)]
_Utc: TypeAlias = Annotated[_Text, AfterValidator(_check_utc)]


class _StrictForm(BaseModel):
    """Fields of their types, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _PackFields(_StrictForm):
    rank: Annotated[int, Field(ge=_RANK, le=_RANK)]
    digest: _Sha256
    size_bytes: _Count
    first: _Chunk
    last: _Chunk

    @model_validator(mode="after")
    def _check_chunks(self) -> Self:
        if self.first > self.last:
            raise ValueError(f"a pack's first chunk {self.first} comes after its last, {self.last}")
        return self


class _RecordFields(_StrictForm):
    """Fields of every record."""

    log: _StateDigest
    kind: str
    format: Literal[2]


class _StartFields(_RecordFields):
    created: _Utc


class _StateFields(_RecordFields):
    """Fields of what leads to a state."""

    digest: _StateDigest
    layouts: Annotated[list[_Sha256], Field(min_length=1, max_length=1)]
    packs: list[_PackFields]


class _VersionFields(_StateFields):
    version: _Version
    base: _Version | None
    base_digest: _StateDigest | None
    step: _Count
    recipe: _Text
    writer: _Text
    created: _Utc

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        if self.base is not None and self.base >= self.version:
            raise ValueError(f"base is {self.base}, which does not come before version {self.version}")
        _require_both("base", self.base, self.base_digest)
        return self


class _LinkFields(_StateFields):
    source: _Version | None
    source_digest: _StateDigest | None
    target: _Version

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        _require_both("source", self.source, self.source_digest)
        return self


class _AnnouncementFields(_RecordFields):
    version: _Version
    writer: _Name
    sequence: _Count
    packs: list[_PackFields]


class _LeaseFields(_RecordFields):
    reader: _Name
    version: _Version
    sequence: _Count


def _read(fields: Mapping[str, Json], kind: type[RecordT]) -> tuple[RecordT, str]:
    """The record that fields of JSON are, and the id of its log; those of others are left out."""
    if "format" not in fields:
        raise ValueError(f"it is of format 1, which bore no log id; formats from {FORMAT} on are read")
    own = {name: value for name, value in fields.items() if not name.startswith(_FOREIGN)}
    try:
        content = dict(_FORMS[kind].model_validate(own))
    except ValidationError as error:
        raise ValueError("; ".join(map(_explain, error.errors()[:_MOST_FAULTS]))) from error
    if content.pop("kind") != _KINDS[kind]:
        raise ValueError(f"kind is {_shown(fields['kind'])}, not {_KINDS[kind]!r}")
    if "layouts" in content:
        (content["layout"],) = content.pop("layouts")
    if "packs" in content:
        content["packs"] = tuple(WeightPack(**pack.model_dump(exclude={"rank"})) for pack in content["packs"])
    log_id = content.pop("log")
    del content["format"]
    return kind(**content), log_id


def _explain(fault: ErrorDetails) -> str:
    """The name and value of a field, and what is wrong with it."""
    name = ".".join(map(str, fault["loc"])) or "it"
    match fault["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            return f"{name} is unknown"
        case "value_error" if not fault["loc"] or isinstance(fault["input"], dict):
            return str(fault["ctx"]["error"])
    return f"{name} is {_shown(fault['input'])}: {fault['msg']}"


def _shown(value: object) -> str:
    """A value for a message, however large it is."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _require_both(name: str, version: int | None, digest: str | None) -> None:
    if (version is None) != (digest is None):
        raise ValueError(f"{name} is {version} and {name}_digest {digest}: there are both or neither")


def _require_name(role: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{role} {name!r} must be 1 to 100 letters, digits, - and _: it becomes part of object keys")


_FORMS: Mapping[type[object], type[_RecordFields]] = {
    LogStart: _StartFields,
    WeightVersion: _VersionFields,
    Link: _LinkFields,
    Announcement: _AnnouncementFields,
    ReaderLease: _LeaseFields,
}
_KINDS: Mapping[type[object], str] = {
    LogStart: "log",
    WeightVersion: "version",
    Link: "link",
    Announcement: "announcement",
    ReaderLease: "lease",
}
