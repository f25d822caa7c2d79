"""Files are replaced whole, also by several writers at once."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.fsync import write_whole

WRITES = 300


def test_a_reader_sees_one_writers_content_or_another_s_and_never_a_part(tmp_path: Path) -> None:
    file, contents = tmp_path / "file", [bytes([65 + writer]) * 50_000 for writer in range(4)]
    write_whole(file, contents[0])

    def write(content: bytes) -> None:
        for _ in range(WRITES):
            write_whole(file, content)

    with ThreadPoolExecutor(len(contents)) as pool:
        writers = [pool.submit(write, content) for content in contents]
        while not all(writer.done() for writer in writers):
            assert file.read_bytes() in contents
        for writer in writers:
            writer.result()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_has_its_permissions_and_its_content_when_it_appears(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", b"content", mode=0o604, syncs=True)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o604


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
