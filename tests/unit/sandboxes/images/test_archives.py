"""Archives contain the given files, and none that would leave the folder in which they are unpacked."""

import io
import tarfile
from collections.abc import Sequence
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.images.archives import Entry, EntryKind, plain_name, read_archive, write_archive

parts = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20)
file_names = st.lists(parts.filter(lambda part: part not in (".", "..")), min_size=1, max_size=4).map("/".join)


@st.composite
def contents(draw: st.DrawFn) -> Sequence[Entry]:
    """Entries that can be unpacked together: no name is above another one, but a folder's."""
    read: dict[str, Entry] = {}
    for name in draw(st.lists(file_names, max_size=6)):
        above = {str(parent) for parent in PurePosixPath(name).parents}
        if name in read or any(other in above for other in read) or any(other.startswith(name) for other in read):
            continue
        kind = draw(st.sampled_from(EntryKind))
        read[name] = Entry(
            name=name,
            kind=kind,
            mode=0o777 if kind is EntryKind.LINK else draw(st.integers(0, 0o777)),
            data=draw(st.binary(max_size=2000)) if kind is EntryKind.FILE else b"",
            target=draw(parts) if kind is EntryKind.LINK else "",
            mtime_s=draw(st.integers(0, (1 << 33) - 1)),
        )
    return list(read.values())


@given(contents())
def test_what_was_written_is_read(entries: Sequence[Entry]) -> None:
    read = read_archive(write_archive(entries))
    assert [(entry.name, entry.kind, entry.data, entry.target, entry.mtime_s) for entry in read] == [
        (entry.name, entry.kind, entry.data, entry.target, entry.mtime_s) for entry in entries
    ]
    assert all(a.mode == b.mode for a, b in zip(read, entries, strict=True) if a.kind is not EntryKind.LINK)


@given(contents(), st.data())
def test_damage_is_noticed_or_does_no_harm(entries: Sequence[Entry], data: st.DataObject) -> None:
    tar = bytearray(write_archive(entries))
    for _ in range(data.draw(st.integers(1, 3))):
        tar[data.draw(st.integers(0, len(tar) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(tar)))
    for damaged in (bytes(tar), bytes(tar[:cut])):
        try:
            read = read_archive(damaged)
        except ValueError:
            continue
        for entry in read:
            assert entry.name == plain_name(entry.name) != ""


@given(st.binary(max_size=3000))
def test_noise_is_no_archive(noise: bytes) -> None:
    try:
        assert read_archive(noise) == ()
    except ValueError:
        return
    assert not noise.strip(b"\0")


@given(st.text(max_size=30))
def test_a_plain_name_stays_below(path: str) -> None:
    try:
        name = plain_name(path)
    except ValueError:
        return
    assert not name.startswith("/")
    assert ".." not in name.split("/")
    assert "." not in name.split("/")
    assert plain_name(name) == name


@pytest.mark.parametrize("path", ["/a", "..", "a/../b", "a\0", "x" * 256, "a/" * 2100])
def test_a_name_that_does_not_stay_below_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"sandbox"):
        plain_name(path)


def tar_of(*infos: tarfile.TarInfo) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for info in infos:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return file.getvalue()


def info(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0, mode: int = 0o644
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.mode = kind, target, size, mode
    return made


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ((info("a"), info("a")), "twice"),
        ((info("a", tarfile.SYMTYPE, "b"), info("a")), "twice"),
        ((info("a/b"), info("a", tarfile.SYMTYPE, "/tmp")), "through the link"),
        ((info("a"), info("a/b/c")), "through the file"),
        ((info("a", tarfile.SYMTYPE, ""),), "leads nowhere"),
        ((info("./"),), "not a valid file name"),
        ((info("a", tarfile.LNKTYPE, "b"),), "not a file, folder or symbolic link"),
        ((info("a", tarfile.CONTTYPE, "b"), info("../a")), "stay inside"),
    ],
)
def test_what_could_be_written_through_is_refused(members: Sequence[tarfile.TarInfo], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_archive(tar_of(*members))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE])
@pytest.mark.parametrize("date", ["1e30", "inf", "8589934592", "-1", "-0.5", "nan"])
def test_a_date_that_no_file_has_is_refused(kind: bytes, date: str) -> None:
    dated = info("a", kind, "b")
    dated.pax_headers = {"mtime": date}
    with pytest.raises(
        ValueError, match=r"'a' in the archive has the date .* s, no file's: use one from 0 to 8589934591"
    ):
        read_archive(tar_of(dated))


def test_the_rights_of_others_are_not_lent() -> None:
    (entry,) = read_archive(tar_of(info("tool", mode=0o6755)))
    assert entry.mode == 0o755


def test_a_folder_may_be_there_twice_and_the_top_is_left_out() -> None:
    folder = info("a", tarfile.DIRTYPE, mode=0o755)
    assert [entry.name for entry in read_archive(tar_of(info("./", tarfile.DIRTYPE), folder, folder))] == ["a"]


def test_the_first_of_each_name_is_written() -> None:
    entries = [Entry(name="a", kind=EntryKind.FILE, data=data) for data in (b"1", b"2")]
    assert [entry.data for entry in read_archive(write_archive(entries))] == [b"1"]


def test_more_than_the_limit_is_refused() -> None:
    big = Entry(name="big", kind=EntryKind.FILE, data=bytes(4000))
    assert len(write_archive([big], 6000)) > 4000
    with pytest.raises(ValueError, match="more than 3000 bytes, at 'big'"):
        write_archive([big], 3000)


def test_a_sparse_file_is_refused() -> None:
    with pytest.raises(ValueError, match="tar"):
        read_archive(tar_of(info("a", tarfile.GNUTYPE_SPARSE, size=512)))
