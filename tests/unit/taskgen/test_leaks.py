"""Every kind of leaked answer is found, and a clean image passes."""

import bz2
import compileall
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.taskgen.leaks import Leak, RemovedIdentifiers, removed_identifiers, search, without_repeated
from etude.taskgen.scrubbing import commit_all, git

RIGHT = '''def rotate(values, places):
    """Turn round."""
    offset = places % len(values)
    rotated_part = values[offset:]
    remaining_part = values[:offset]
    return rotated_part + remaining_part


def other(values):
    return sorted(values)
'''
WRONG = RIGHT[: RIGHT.index("    offset")] + "    raise NotImplementedError\n" + RIGHT[RIGHT.index("\n\ndef other") :]
BODY = RIGHT[RIGHT.index("    offset") : RIGHT.index("\n\ndef other")]


def sandbox(tmp_path: Path) -> Path:
    work = tmp_path / "layer" / "work"
    work.mkdir(parents=True)
    (work / "turns.py").write_text(WRONG)
    (work / "README.md").write_text("rotate turns values round.\n")
    return work


def leaks(work: Path, gone: str = "") -> list[Leak]:
    removed_names = removed_identifiers(
        {"turns.py": RIGHT}, {"turns.py": WRONG}, ["rotate turns values round."], gone=gone
    )
    return list(search(work.parent, removed_names, prefix="/"))


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner/a.py", data)
    return buffer.getvalue()


def tarred(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("inner/a.py")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def compiled(data: bytes) -> bytes:
    return (
        bytes(compile(data, "x", "exec").co_consts[0].co_code)
        + repr(compile(data, "x", "exec").co_consts[0].co_varnames).encode()
    )


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "a copy": lambda data: data,
    "other blanks": lambda data: data.replace(b"    ", b"\t\t").replace(b"\n", b"\r\n\r\n"),
    "quoted in a text": lambda data: b"Old code:\n" + b"".join(b"> \n" + line + b"\n" for line in data.splitlines()),
    "only the body": lambda data: BODY.encode(),
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zip": zipped,
    "tar.gz": tarred,
    "zip in tar in gzip": lambda data: gzip.compress(tarred(zipped(data))[:]),
    "names of compiled code": compiled,
    "zstandard, which is not opened": lambda data: b"\x28\xb5\x2f\xfd" + data[::-1],
}


def test_a_clean_sandbox_passes(tmp_path: Path) -> None:
    work = sandbox(tmp_path)
    (work / "data.bin").write_bytes(b"\x78\x9c" + bytes(range(256)) * 10)
    (work / "broken.zip").write_bytes(b"PK\x03\x04 no zip at all")
    (work / "other.gz").write_bytes(gzip.compress(b"nothing to see"))
    commit_all(work)
    assert leaks(work) == []


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_answer_is_found_however_it_is_packed(tmp_path: Path, packing: str) -> None:
    work = sandbox(tmp_path)
    (work / "left.dat").write_bytes(PACKINGS[packing](RIGHT.encode()))
    assert any(leak.place.startswith("/work/left.dat") for leak in leaks(work))


def test_a_compiled_file_is_found(tmp_path: Path) -> None:
    work = sandbox(tmp_path)
    (work / "turns.py").write_text(RIGHT)
    compileall.compile_file(work / "turns.py", quiet=1)
    (work / "turns.py").write_text(WRONG)
    (cache,) = (work / "__pycache__").iterdir()
    assert {leak.place for leak in leaks(work)} == {f"/work/__pycache__/{cache.name}"}
    cache.rename(work / "something.else")
    assert {leak.place for leak in leaks(work)} == {"/work/something.else"}


def test_history_is_found_loose_and_packed(tmp_path: Path) -> None:
    work = sandbox(tmp_path)
    (work / "turns.py").write_text(RIGHT)
    commit_all(work)
    (work / "turns.py").write_text(WRONG)
    git(work, "commit", "--quiet", "--all", "--message", "Mend")
    assert any("/.git/objects/" in leak.place for leak in leaks(work))
    git(work, "gc", "--quiet", "--aggressive", "--prune=now")
    assert any(leak.place.endswith(".pack") for leak in leaks(work))


def test_a_name_that_is_gone_is_found_in_texts_and_names(tmp_path: Path) -> None:
    work = sandbox(tmp_path)
    assert {leak.place for leak in leaks(work, gone="rotate")} == {"/work/turns.py", "/work/README.md"}
    (work / "turns.py").write_text("x = 1\n")
    (work / "README.md").write_text("rotated, unrotate and rotates are other words")
    (work / "rotate").mkdir()
    assert [leak.place for leak in leaks(work, gone="rotate")] == ["/work/rotate"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    work = sandbox(tmp_path)
    (tmp_path / "outside.py").write_text(RIGHT)
    (work / "link").symlink_to(tmp_path / "outside.py")
    assert leaks(work) == []


def test_a_bomb_is_a_leak_and_not_an_endless_search(tmp_path: Path) -> None:
    work = sandbox(tmp_path)
    (work / "bomb.gz").write_bytes(gzip.compress(b"\0" * (80 << 20)))
    assert ["too much to search" in leak.what for leak in leaks(work)] == [True]


def test_a_planted_bug_looks_for_the_line_in_its_place() -> None:
    bug = RIGHT.replace("places % len", "places // len")
    removed_names = removed_identifiers({"turns.py": RIGHT}, {"turns.py": bug}, [])
    assert any("offset = places % len(values)" in window for window in removed_names.windows)
    assert not any(window in "\n" + bug for window in removed_names.windows)


def test_documents_that_changed_are_no_python() -> None:
    removed_names = removed_identifiers(
        {"turns.py": RIGHT, "README.md": "it's (rotate"}, {"turns.py": WRONG, "README.md": ""}, []
    )
    assert removed_names.words


def test_idioms_that_a_project_repeats_are_no_answer(tmp_path: Path) -> None:
    """Regression: one repeated guard at the head of a function rejected whole releases."""
    guard = (
        "    if not isinstance(value, (int, float)):\n        raise TypeError(f'no number: {value!r}')\n"
        "    value = float(value)\n"
    )
    before = {"sums.py": f"def half(value):\n{guard}    return value / 2\n"}
    answer = f"def third(value):\n{guard}    return value / 3 if value > 0 else -value / 3\n"
    after = {"sums.py": before["sums.py"] + "\n\n" + answer}
    removed = removed_identifiers(after, before, ())
    new = without_repeated(removed, before.values())
    assert 0 < len(new.windows) < len(removed.windows)
    (tmp_path / "sums.py").write_text(before["sums.py"])
    lines = RemovedIdentifiers(windows=removed.windows), RemovedIdentifiers(windows=new.windows)
    assert [bool(list(search(tmp_path, each))) for each in lines] == [True, False]
    (tmp_path / "notes.txt").write_text(answer)
    assert list(search(tmp_path, lines[1]))
