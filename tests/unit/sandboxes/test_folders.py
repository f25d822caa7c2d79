"""A folder's files, with links, pipes and locked folders made by another process."""

import os
from pathlib import Path

import pytest

from etude.sandboxes.folders import MAX_DEPTH, READ_LIMIT_BYTES, Folder, is_whole, tree_bytes
from etude.sandboxes.images.archives import Entry, EntryKind, read_archive, write_archive


def folder(path: Path, *, inside: str | None = "/", workdir: str = "/work") -> Folder:
    made = Folder(path, owner=None, inside=inside, workdir=workdir)
    made.make(".")
    return made


@pytest.mark.parametrize(
    ("inside", "path", "place"),
    [
        ("/", "a", "work/a"),
        ("/", "/a", "a"),
        ("/", "/work/./a//b", "work/a/b"),
        ("/work", "a", "a"),
        ("/work", "/work/a", "a"),
        (None, "a", "work/a"),
    ],
)
def test_a_path_is_found_where_commands_would_find_it(
    tmp_path: Path, inside: str | None, path: str, place: str
) -> None:
    assert folder(tmp_path, inside=inside).place(path) == place


@pytest.mark.parametrize(("inside", "path"), [("/", ".."), ("/work", "/etc/passwd"), ("/work", "/"), (None, "/work/a")])
def test_a_path_that_is_not_in_the_folder_is_refused(tmp_path: Path, inside: str | None, path: str) -> None:
    with pytest.raises(ValueError, match="inside the sandbox"):
        folder(tmp_path, inside=inside).place(path)


def test_a_copy_has_all_that_can_be_carried(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = folder(tmp_path / "one"), folder(tmp_path / "two")
    one.write("deep/er/file", "text")
    (one.work / "deep/er/file").chmod(0o751)
    (one.work / "link").symlink_to("/etc/passwd")
    os.mkfifo(one.work / "pipe")
    (one.work / "deep").chmod(0o750)
    one.copy_to(two)
    assert (two.work / "deep/er/file").read_text(encoding="utf-8") == "text"
    assert (two.work / "deep/er/file").stat().st_mode & 0o777 == 0o751
    assert (two.work / "deep").stat().st_mode & 0o777 == 0o750
    assert (two.work / "link").readlink() == Path("/etc/passwd")
    assert not (two.work / "pipe").exists()


def test_what_is_replaced_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept", encoding="utf-8")
    (tmp_path / "root").mkdir()
    there = folder(tmp_path / "root")
    (there.work / "link").symlink_to(precious)
    (there.work / "hard").hardlink_to(precious)
    entries = [Entry(name=name, kind=EntryKind.FILE, data=b"new") for name in ("link", "hard")]
    there.unpack(write_archive(entries))
    assert [there.read("link"), there.read("hard"), precious.read_text(encoding="utf-8")] == ["new", "new", "kept"]


@pytest.mark.parametrize("kind", EntryKind)
def test_what_is_in_the_way_stops_all_of_it(tmp_path: Path, kind: EntryKind) -> None:
    there = folder(tmp_path)
    if kind is EntryKind.FOLDER:
        there.write("a", "kept")
    else:
        there.write("a/b", "kept")
    tar = write_archive([Entry(name="first", kind=EntryKind.FILE), Entry(name="a", kind=kind, target="x")])
    with pytest.raises(ValueError, match="something else in the sandbox"):
        there.unpack(tar)
    assert there.read("first") is None


@pytest.mark.parametrize("date_s", [-1000, 1 << 33])
def test_what_is_exported_can_be_unpacked_whatever_its_date(tmp_path: Path, date_s: int) -> None:
    there = folder(tmp_path)
    there.write("a", "text")
    os.utime(there.work / "a", (date_s, date_s))
    there.unpack(there.pack(["."], 1 << 20))
    assert 0 <= (there.work / "a").stat().st_mtime < 1 << 33


def test_a_date_that_no_file_has_leaves_nothing_behind(tmp_path: Path) -> None:
    there = folder(tmp_path)
    first = Entry(name="first", kind=EntryKind.FILE)
    with pytest.raises(ValueError, match="'a' in the archive has the date"):
        there.unpack(write_archive([first, Entry(name="a", kind=EntryKind.FILE, mtime_s=10**30)]))
    assert there.read("first") is None


def test_an_export_without_end_is_stopped(tmp_path: Path) -> None:
    there = folder(tmp_path)
    deep = there.work
    for _ in range(MAX_DEPTH + 5):
        deep = deep / "d"
        deep.mkdir()
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} folders"):
        there.pack(["."], 1 << 20)
    there.write("big", "x" * 5000)
    with pytest.raises(ValueError, match="more than 4000 bytes"):
        there.pack(["big"], 4000)


def test_an_export_is_by_the_paths_that_were_asked_for(tmp_path: Path) -> None:
    there = folder(tmp_path)
    there.write("a/b", "1")
    there.write("/home/agent/c", "2")
    names = [entry.name for entry in read_archive(there.pack(["./a", "a/b", "/home/agent/c", "none"], 1 << 20))]
    assert names == ["a", "a/b", "home/agent/c"]


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"a\r\nb\n", True),
        ("naïve ☂".encode(), True),
        ("naïve".encode("latin-1"), False),
        (b"x" * READ_LIMIT_BYTES, False),
        (b"x" * (READ_LIMIT_BYTES - 1), True),
    ],
)
def test_what_cannot_be_written_back_is_known(tmp_path: Path, data: bytes, whole: bool) -> None:
    files = folder(tmp_path)
    (files.work / "a").write_bytes(data)
    text = files.read("a")
    assert text is not None
    assert is_whole(text) is whole
    if whole:
        files.write("a", text)
        assert (files.work / "a").read_bytes() == data


def test_size_is_counted_without_following_links(tmp_path: Path) -> None:
    there = folder(tmp_path)
    (there.work / "usr").symlink_to("/usr")
    there.write("file", "x" * 10_000)
    assert 10_000 <= tree_bytes(tmp_path) < 100_000
