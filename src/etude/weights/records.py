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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, TypeVar, assert_never, cast

import orjson

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

_MOST_INTEGER = 2**53 - 1  # beyond it, JSON readers in other languages round
_RANK = 0
_MOST_CHUNK = 2**32 - 1
_MOST_TEXT = 10_000
_MOST_SHOWN = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STATE_DIGEST = re.compile(r"[0-9a-f]{32}")
_ANCHOR = "anchor"
_SIGNATURE = "signature"
_LOG_ID = _STATE_DIGEST
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
    """A reader holds ``version``, or is on its way there: what leads from it to the newest must stay."""

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
        reader = _FieldReader(fields)
        reader.format()
        log_id = reader.matching("log", _LOG_ID)
        reader.literal("kind", _KINDS[kind])
        record = cast(RecordT, _READERS[kind](reader))
        reader.refuse_others()
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


class _FieldReader:
    """Takes fields out of JSON, each checked; raises ``ValueError`` with the name and value of what is wrong."""

    def __init__(self, fields: Mapping[str, Json]) -> None:
        self._left = dict(fields)

    def take(self, name: str) -> Json:
        """Any value, which must be there."""
        if name not in self._left:
            raise ValueError(f"{name} is missing")
        return self._left.pop(name)

    def format(self) -> None:
        """The format of this file."""
        if "format" not in self._left:
            raise ValueError(f"it is of format 1, which bore no log id; formats from {FORMAT} on are read")
        if (value := self.take("format")) != FORMAT or type(value) is not int:
            raise ValueError(f"format is {_shown(value)}, this étude reads {FORMAT}")

    def literal(self, name: str, expected: str) -> None:
        """Exactly ``expected``."""
        value = self.take(name)
        if value != expected:
            raise ValueError(f"{name} is {_shown(value)}, not {expected!r}")

    def integer(self, name: str, most: int = _MOST_INTEGER) -> int:
        """From 0 to ``most``."""
        value = self.take(name)
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name} is {_shown(value)}, not an integer from 0 to {most}")
        return value

    def version(self, name: str) -> int:
        """The number of a version."""
        return self.integer(name, MOST_VERSION)

    def text(self, name: str) -> str:
        """Something that can be shown on a terminal: no control characters but line ends."""
        value = self.take(name)
        if not isinstance(value, str) or len(value) > _MOST_TEXT or not value.replace("\n", "").isprintable():
            raise ValueError(f"{name} is {_shown(value)}, not printable text of at most {_MOST_TEXT} characters")
        return value

    def utc(self, name: str) -> str:
        """A date and time in UTC."""
        value = self.text(name)
        try:
            is_utc = datetime.fromisoformat(value).utcoffset() == timedelta(0)
        except ValueError:
            is_utc = False
        if not is_utc:
            raise ValueError(f"{name} is {_shown(value)}, not a date and time in UTC as of ISO 8601")
        return value

    def matching(self, name: str, pattern: re.Pattern[str]) -> str:
        """Text of a fixed form."""
        return _matching(name, self.take(name), pattern)

    def optional(self, name: str, pattern: re.Pattern[str]) -> str | None:
        """Text of a fixed form, or ``null``."""
        return None if self.is_null(name) else self.matching(name, pattern)

    def several(self, name: str) -> list[Json]:
        """A list."""
        value = self.take(name)
        if not isinstance(value, list):
            raise ValueError(f"{name} is {_shown(value)}, not a list")
        return value

    def is_null(self, name: str) -> bool:
        """Return true if the field is ``null``, in which case it is taken."""
        if name in self._left and self._left[name] is None:
            del self._left[name]
            return True
        return False

    def refuse_others(self) -> None:
        """Raise if fields are left that are not marked as foreign."""
        if unknown := sorted(name for name in self._left if not name.startswith(_FOREIGN)):
            raise ValueError(f"fields {_shown(unknown)} are unknown")


def _read_version(fields: _FieldReader) -> WeightVersion:
    record = WeightVersion(
        version=fields.version("version"),
        base=None if fields.is_null("base") else fields.version("base"),
        base_digest=fields.optional("base_digest", _STATE_DIGEST),
        digest=fields.matching("digest", _STATE_DIGEST),
        layout=_read_layout(fields),
        packs=_read_packs(fields),
        step=fields.integer("step"),
        recipe=fields.text("recipe"),
        writer=fields.text("writer"),
        created=fields.utc("created"),
    )
    if record.base is not None and record.base >= record.version:
        raise ValueError(f"base is {record.base}, which does not come before version {record.version}")
    _require_both("base", record.base, record.base_digest)
    return record


def _read_link(fields: _FieldReader) -> Link:
    link = Link(
        source=None if fields.is_null("source") else fields.version("source"),
        source_digest=fields.optional("source_digest", _STATE_DIGEST),
        target=fields.version("target"),
        digest=fields.matching("digest", _STATE_DIGEST),
        layout=_read_layout(fields),
        packs=_read_packs(fields),
    )
    _require_both("source", link.source, link.source_digest)
    return link


def _read_start(fields: _FieldReader) -> LogStart:
    return LogStart(created=fields.utc("created"))


def _read_announcement(fields: _FieldReader) -> Announcement:
    return Announcement(
        version=fields.version("version"),
        writer=fields.matching("writer", _NAME),
        sequence=fields.integer("sequence"),
        packs=_read_packs(fields),
    )


def _read_lease(fields: _FieldReader) -> ReaderLease:
    return ReaderLease(
        reader=fields.matching("reader", _NAME),
        version=fields.version("version"),
        sequence=fields.integer("sequence"),
    )


def _read_layout(fields: _FieldReader) -> str:
    layouts = fields.several("layouts")
    if len(layouts) != 1:
        raise ValueError(f"layouts are {len(layouts)}, not one: shares of several ranks are not read")
    return _matching("a layout", layouts[0], _SHA256)


def _read_packs(fields: _FieldReader) -> tuple[WeightPack, ...]:
    return tuple(map(_read_pack, fields.several("packs")))


def _read_pack(pack: Json) -> WeightPack:
    if not isinstance(pack, dict):
        raise ValueError(f"a pack is {_shown(pack)}, not an object")
    fields = _FieldReader(pack)
    fields.integer("rank", _RANK)
    record = WeightPack(
        digest=fields.matching("digest", _SHA256),
        size_bytes=fields.integer("size_bytes"),
        first=fields.integer("first", _MOST_CHUNK),
        last=fields.integer("last", _MOST_CHUNK),
    )
    fields.refuse_others()
    if record.first > record.last:
        raise ValueError(f"a pack's first chunk {record.first} comes after its last, {record.last}")
    return record


def _matching(name: str, value: Json, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{name} is {_shown(value)}, which does not match {pattern.pattern}")
    return value


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


_READERS: Mapping[type[object], Callable[[_FieldReader], Record]] = {
    LogStart: _read_start,
    WeightVersion: _read_version,
    Link: _read_link,
    Announcement: _read_announcement,
    ReaderLease: _read_lease,
}
_KINDS: Mapping[type[object], str] = {
    LogStart: "log",
    WeightVersion: "version",
    Link: "link",
    Announcement: "announcement",
    ReaderLease: "lease",
}
