"""Text files: every character is read once an epoch, files are held out whole."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.tasks.corpora.mixture import Side
from etude.tasks.corpora.texts import PlainText, TextFiles, check_text
from etude.tokens.chat import ChatTemplate
from etude.types import Split

CHAT = ChatTemplate.train(["some words to learn from"], 300)
TEXT = PlainText(CHAT)
TRAIN, HELDOUT = Side(seed=0, one_in=4), Side(split=Split.HELDOUT, seed=0, one_in=4)
ALL = Side(seed=0, one_in=10**9)
"""A side that has every file."""


def read(files: TextFiles, epoch: int = 0) -> list[str]:
    places = range(epoch * files.size, (epoch + 1) * files.size)
    return [CHAT.decode(files.document(index).token_ids.tolist()) for index in places]


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=300), chunk_bytes=st.integers(4, 40))
def test_chunks_are_the_file_without_a_character_lost_or_cut(
    tmp_path_factory: pytest.TempPathFactory, text: str, chunk_bytes: int
) -> None:
    file = tmp_path_factory.mktemp("text") / "file.txt"
    file.write_bytes(text.encode())
    if not text:
        return
    chunks = read(TextFiles(file, TEXT, TRAIN, chunk_bytes=chunk_bytes))
    assert sorted("".join(chunks)) == sorted(text)
    assert all(chunk in text for chunk in chunks)


def test_only_the_beginning_of_a_file_is_opened_as_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    files = TextFiles(tmp_path / "a.txt", TEXT, TRAIN, chunk_bytes=64)
    openings = [files.document(index).token_ids[0] == CHAT.document_id for index in range(2)]
    assert sorted(openings) == [False, True]


def test_files_are_held_out_whole(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number:04} " * 30)
    sides = [set(" ".join(read(TextFiles(tmp_path, TEXT, side, chunk_bytes=64))).split()) for side in (TRAIN, HELDOUT)]
    numbers = [{word for word in words if len(word) == 4} for words in sides]
    assert not numbers[0] & numbers[1]
    assert len(numbers[0] | numbers[1]) == 40
    assert numbers[1]


def test_every_epoch_has_another_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number:015}\n" for number in range(64)))
    files = TextFiles(tmp_path / "a.txt", TEXT, TRAIN, chunk_bytes=64)
    assert sorted(read(files)) == sorted(read(files, 1))
    assert read(files) != read(files, 1)


def test_a_file_that_is_no_text_is_refused_with_its_name_and_the_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 150 + "é".encode("latin-1") + b"x" * 9)
    files = TextFiles(tmp_path, TEXT, ALL, chunk_bytes=64)
    with pytest.raises(ConfigError, match=r"a\.txt is not text in UTF-8, from byte 150 on"):
        read(files)
    with pytest.raises(ConfigError, match=r"a\.txt is not text in UTF-8, from byte 150 on: convert it"):
        check_text(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\x80 begins in the middle of a character")
    with pytest.raises(ConfigError, match="from byte 0 on"):
        read(TextFiles(tmp_path, TEXT, ALL, chunk_bytes=64))
    with pytest.raises(ConfigError, match="from byte 0 on"):
        check_text(tmp_path / "a.txt")


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    (tmp_path / ".git" / "objects").mkdir(parents=True)
    (tmp_path / ".git" / "objects" / "pack").write_bytes(b"\xff\xfe")
    (tmp_path / ".DS_Store").write_bytes(b"\xff")
    (tmp_path / "a.txt").write_text("words")
    check_text(tmp_path)
    assert read(TextFiles(tmp_path, TEXT, ALL, chunk_bytes=64)) == ["words"]
    check_text(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        check_text(tmp_path / ".DS_Store")  # named by itself


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        TextFiles(tmp_path / "nothing", TEXT, TRAIN, chunk_bytes=64)
    with pytest.raises(ConfigError, match="no text file to train on"):
        TextFiles(tmp_path, TEXT, TRAIN, chunk_bytes=64)
