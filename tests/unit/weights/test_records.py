"""Records are read back as written, and other data is rejected."""

import dataclasses
from typing import cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.types import Json, WeightPack, WeightVersion
from etude.weights.records import (
    MOST_VERSION,
    Announcement,
    Link,
    ReaderLease,
    Record,
    commit_key,
    link_key,
    parse_commit_key,
    parse_link_key,
    parse_record,
    record_bytes,
    record_key,
)

KEY = b"a key of 16 byte"
LOG = "0" * 31 + "1"


def hexadecimal(digits: int) -> st.SearchStrategy[str]:
    return st.integers(0, 16**digits - 1).map(lambda number: f"{number:0{digits}x}")


numbers = st.integers(0, 1000) | st.sampled_from([99_999_999, 100_000_000, MOST_VERSION])
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True)
digests = hexadecimal(32)
layouts = hexadecimal(64)


@st.composite
def packs(draw: st.DrawFn) -> tuple[WeightPack, ...]:
    return tuple(
        WeightPack(
            digest=draw(hexadecimal(64)),
            size_bytes=draw(st.integers(0, 2**53 - 1)),
            first=(first := draw(st.integers(0, 100))),
            last=first + draw(st.integers(0, 100)),
        )
        for _ in range(draw(st.integers(0, 3)))
    )


@st.composite
def versions(draw: st.DrawFn) -> WeightVersion:
    version = draw(numbers)
    return WeightVersion(
        version=version,
        base=(base := draw(st.none() | st.integers(0, version - 1)) if version else None),
        base_digest=None if base is None else draw(digests),
        digest=draw(digests),
        layout=draw(layouts),
        packs=draw(packs()),
        step=draw(numbers),
        recipe=draw(st.sampled_from(["", "quickstart", "two\nlines", "été"])),
        writer=draw(names),
        created=draw(st.datetimes().map(lambda moment: f"{moment.isoformat(timespec='seconds')}+00:00")),
    )


@st.composite
def links(draw: st.DrawFn) -> Link:
    source, target = draw(st.tuples(st.none() | numbers, numbers).filter(lambda pair: pair[0] != pair[1]))
    return Link(
        source=source,
        source_digest=None if source is None else draw(digests),
        target=target,
        digest=draw(digests),
        layout=draw(layouts),
        packs=draw(packs()),
    )


@st.composite
def announcements(draw: st.DrawFn) -> Announcement:
    return Announcement(
        version=draw(numbers),
        writer=draw(names),
        sequence=draw(st.integers(0, 1000)),
        packs=draw(packs()),
    )


leases = st.builds(ReaderLease, reader=names, version=numbers, sequence=numbers)
records: st.SearchStrategy[Record] = versions() | links() | announcements() | leases
keys = st.none() | st.just(KEY)

PACK = WeightPack(digest="a" * 64, size_bytes=10, first=0, last=3)
PACK_FIELDS: dict[str, Json] = {**dataclasses.asdict(PACK), "rank": 0}
VERSION = WeightVersion(
    version=4,
    base=3,
    base_digest="c" * 32,
    digest="d" * 32,
    layout="b" * 64,
    packs=(PACK,),
    step=4,
    recipe="quickstart",
    writer="host-1",
    created="2026-01-01T00:00:00+00:00",
)


def changed(data: bytes, **changes: Json) -> bytes:
    return orjson.dumps({**orjson.loads(data), **changes}, option=orjson.OPT_SORT_KEYS)


@given(records, keys)
def test_a_record_comes_back(record: Record, key: bytes | None) -> None:
    data = record_bytes(record, LOG, key)
    assert parse_record(data, type(record), record_key(record), key) == (record, LOG)
    assert parse_record(data, type(record), record_key(record)) == (record, LOG)


@given(records, st.data())
def test_no_change_of_a_signed_record_goes_unnoticed(record: Record, draw: st.DataObject) -> None:
    data = bytearray(record_bytes(record, LOG, KEY))
    place = draw.draw(st.integers(0, len(data) - 1))
    data[place] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(DamagedError, match="is damaged"):
        parse_record(bytes(data), type(record), record_key(record), KEY)


@given(records, st.data())
def test_a_truncated_record_is_damage(record: Record, draw: st.DataObject) -> None:
    data = record_bytes(record, LOG)
    with pytest.raises(DamagedError):
        parse_record(data[: draw.draw(st.integers(0, len(data) - 1))], type(record), record_key(record))


@given(st.binary(max_size=50))
def test_noise_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedError, match=r"leases/a/00000000\.json is damaged"):
        parse_record(data, ReaderLease, "leases/a/00000000.json")


WRONG: tuple[Json, ...] = (-1, 0.5, 2**60, "\x1b[2J", {}, [{}], [None])


@given(records, st.data())
def test_a_field_of_a_wrong_type_is_damage(record: Record, draw: st.DataObject) -> None:
    data = record_bytes(record, LOG)
    fields = cast(dict[str, Json], orjson.loads(data))
    name = draw.draw(st.sampled_from(sorted(fields)))
    wrong = draw.draw(st.sampled_from(WRONG))
    with pytest.raises(DamagedError):
        parse_record(changed(data, **{name: wrong}), type(record), record_key(record))


@pytest.mark.parametrize(
    "name",
    sorted([*(field.name for field in dataclasses.fields(VERSION) if field.name != "layout"), "layouts", "kind"]),
)
def test_a_missing_field_is_damage(name: str) -> None:
    fields = orjson.loads(record_bytes(VERSION, LOG))
    del fields[name]
    with pytest.raises(DamagedError, match=f"{name} is missing"):
        parse_record(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS), WeightVersion, commit_key(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 5}, "belongs at commits/00000005"),
        ({"version": True}, "version is True"),
        ({"version": 4.0}, "version is 4.0"),
        ({"base": 4}, "base is 4, which does not come before"),
        ({"digest": "D" * 32}, "digest is 'DD"),
        ({"digest": "d" * 64}, "digest is 'dd"),
        ({"layouts": []}, r"layouts is \[\]: .* at least 1 item"),
        ({"layouts": ["b" * 64] * 2}, r"layouts is .*: .* at most 1 item"),
        ({"layouts": ["../../secret"]}, "layouts.0 is '../../secret'"),
        ({"packs": [PACK_FIELDS | {"rank": 1}]}, "packs.0.rank is 1: .* less than or equal to 0"),
        ({"packs": [PACK_FIELDS | {"first": 4}]}, "first chunk 4 comes after its last"),
        ({"packs": [PACK_FIELDS | {"digest": "a" * 63 + "/"}]}, "packs.0.digest is .* should match"),
        ({"packs": [PACK_FIELDS | {"surprise": 1}]}, "packs.0.surprise is unknown"),
        ({"packs": [7]}, "packs.0 is 7"),
        ({"created": "2026-01-01T00:00:00+01:00"}, "expected a date and time in UTC"),
        ({"created": "yesterday"}, "created is 'yesterday': .*isoformat"),
        ({"recipe": "\x1b]0;owned\x07"}, "expected printable"),
        ({"recipe": "a" * 100_000}, r"recipe is 'a{99}…"),
        ({"kind": "link"}, "kind is 'link'"),
        ({"surprise": 1}, "surprise is unknown"),
    ],
)
def test_a_wrong_record_is_damage(change: dict[str, Json], message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        parse_record(changed(record_bytes(VERSION, LOG), **change), WeightVersion, commit_key(4))


def test_only_the_canonical_form_is_read() -> None:
    data = record_bytes(VERSION, LOG)
    fields = orjson.loads(data)
    for other in (
        orjson.dumps(fields, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2),
        orjson.dumps(dict(sorted(fields.items(), reverse=True))),
        data[:-1] + b',"writer":"host-1"}',
        data + b"\n",
        b"[" * 500 + b"]" * 500,
        b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
        b"[]",
    ):
        with pytest.raises(DamagedError):
            parse_record(other, WeightVersion, commit_key(4))


def test_fields_of_others_are_signed_too() -> None:
    plain = changed(record_bytes(VERSION, LOG), x_note="hello")
    assert parse_record(plain, WeightVersion, commit_key(4)) == (VERSION, LOG)
    signed = changed(record_bytes(VERSION, LOG, KEY), x_note="hello")
    with pytest.raises(DamagedError, match="signature is wrong"):
        parse_record(signed, WeightVersion, commit_key(4), KEY)


def test_with_a_key_only_its_signature_counts() -> None:
    for data in (record_bytes(VERSION, LOG), record_bytes(VERSION, LOG, b"another key of ours")):
        with pytest.raises(DamagedError, match=r"commits/00000004\.json is damaged: .*sign"):
            parse_record(data, WeightVersion, commit_key(4), KEY)
    with pytest.raises(DamagedError, match="not signed"):
        parse_record(changed(record_bytes(VERSION, LOG), signature=7), WeightVersion, commit_key(4), KEY)


def test_a_signed_record_is_good_for_one_place_only() -> None:
    data = record_bytes(
        Link(source=0, source_digest="c" * 32, target=4, digest="d" * 32, layout="b" * 64, packs=()), LOG, KEY
    )
    with pytest.raises(DamagedError, match="it belongs at links/00000000-00000004"):
        parse_record(data, Link, link_key(1, 4), KEY)


@pytest.mark.parametrize(
    "record",
    [
        dataclasses.replace(VERSION, version=-1, base=None, base_digest=None),
        dataclasses.replace(VERSION, base_digest=None),
        dataclasses.replace(VERSION, base=4),
        dataclasses.replace(VERSION, digest=""),
        dataclasses.replace(VERSION, recipe="\ud800"),
        dataclasses.replace(VERSION, step=2**70),
        dataclasses.replace(VERSION, packs=(dataclasses.replace(PACK, size_bytes=-1),)),
    ],
)
def test_what_could_not_be_read_is_not_written(record: WeightVersion) -> None:
    with pytest.raises(ValueError, match="must not be written"):
        record_bytes(record, LOG)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a.b", "-a", "é", "a" * 101, "a\n"])
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        ReaderLease(reader=name, version=0, sequence=0)
    with pytest.raises(ValueError, match="letters, digits"):
        Announcement(version=0, writer=name, sequence=0, packs=())


def test_impossible_records_are_refused() -> None:
    with pytest.raises(ValueError, match="to itself"):
        Link(source=3, source_digest="c" * 32, target=3, digest="d" * 32, layout="b" * 64, packs=())


@given(numbers, st.none() | numbers)
def test_keys_are_read_back(target: int, source: int | None) -> None:
    assert parse_commit_key(commit_key(target)) == target
    assert parse_link_key(link_key(source, target)) == (source, target)


@pytest.mark.parametrize(
    "key",
    ["commits/3.json", "commits/00000004.json.bak", "commits/old/00000005.json", "commits/000000012.json", "commits/"],
)
def test_foreign_objects_are_no_records(key: str) -> None:
    assert parse_commit_key(key) is None
    assert parse_link_key(key.replace("commits/", "links/anchor-")) is None
    assert parse_link_key("links/00000001-anchor.json") is None


def test_the_kind_of_a_link_follows_from_its_ends() -> None:
    def kind(source: int | None, target: int) -> str:
        return Link(source=source, source_digest=None, target=target, digest="d" * 32, layout="b" * 64, packs=()).kind

    assert (kind(None, 4), kind(0, 4), kind(4, 0)) == ("anchor", "merged", "inverse")
