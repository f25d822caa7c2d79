"""Files in every provider's sandboxes: single files, archives, and files that a cheating agent manipulates."""

import asyncio
import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from etude.errors import SandboxError, Unsupported
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, SandboxSpec
from providers import TIMEOUT_S, Stage, output, python


def test_files_are_written_read_and_replaced(stage: Stage) -> None:
    async def edit(sandbox: Sandbox) -> list[str | None]:
        await sandbox.write_file("a/b/c.txt", "one, long")
        first = await sandbox.read_file("a/b/c.txt")
        await sandbox.write_file("a/b/c.txt", "twö")
        await output(sandbox, "open('a/b/c.txt', 'a').write('!')\nopen('a/b/d', 'w')")
        return [first, await sandbox.read_file("a/b/c.txt"), await sandbox.read_file("./a//b/d"), await none(sandbox)]

    async def none(sandbox: Sandbox) -> str | None:
        return await sandbox.read_file("a/none") or await sandbox.read_file("none/none")

    assert stage.play(edit) == ["one, long", "twö!", "", None]


def test_a_path_may_be_absolute_where_commands_have_a_root_of_their_own(stage: Stage) -> None:
    async def use(sandbox: Sandbox) -> None:
        if Capability.CONFINED not in stage.claims:
            with pytest.raises(ValueError, match="inside"):
                await sandbox.read_file("/work/a")
            return
        await sandbox.write_file("/work/sub/a", "x")
        assert await sandbox.read_file("sub/a") == await sandbox.read_file("/work/sub/a") == "x"
        assert await output(sandbox, "print(open('/work/sub/a').read())") == "x\n"

    stage.play(use)


PLANT = """
import os
os.symlink('/etc/passwd', 'link')
os.symlink({outside!r}, 'folder')
os.mkfifo('pipe')
os.mkdir('f')
"""
NO_FILE = ["../x", "a/../../x", "../../../../etc/passwd", "link", "pipe", "f", "", ".", "a\0b", "x" * 300]


def test_no_path_leads_out_of_the_sandbox_or_to_what_is_no_file(stage: Stage, tmp_path: Path) -> None:
    async def escape(sandbox: Sandbox) -> None:
        await output(sandbox, PLANT.format(outside=str(tmp_path)))
        for path in NO_FILE:
            with pytest.raises(ValueError, match=r"."):
                await sandbox.read_file(path)
            with pytest.raises(ValueError, match=r"."):
                await sandbox.write_file(path, "x")

    stage.play(escape)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_folder_of_the_machine_leads_nowhere(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    tmp_path.chmod(0o777)

    async def escape(sandbox: Sandbox) -> None:
        await output(sandbox, PLANT.format(outside=str(tmp_path)))
        for use in (sandbox.read_file("folder/secret"), sandbox.write_file("folder/new", "x")):
            try:
                assert await use is None
            except (ValueError, SandboxError):
                continue
        exported = await sandbox.export(["folder"])
        assert b"secret" not in exported

    stage.play(escape)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_sandbox_with_a_bad_path_is_not_made(stage: Stage) -> None:
    async def nothing(sandbox: Sandbox) -> None:
        raise AssertionError("made")

    with pytest.raises(ValueError, match=r"bad\.py"):
        stage.play(nothing, {"good.py": "", "../bad.py": ""})


def test_close_removes_everything_however_deep_and_locked(stage: Stage) -> None:
    dig = "import os\nfor _ in range(300):\n    os.mkdir('d'); os.chdir('d')\nopen('x', 'w'); os.chmod('.', 0)\n"

    async def leave(sandbox: Sandbox) -> None:
        await output(sandbox, dig)

    stage.play(leave)  # what is left of it fails the end of the stage


# --- Archives -----------------------------------------------------------------------------------------------------

MAKE = """
import os
os.makedirs('src/empty/inner'); os.mkdir('other')
open('src/tool', 'w').write('#!/bin/sh\\n'); os.chmod('src/tool', 0o755)
open('src/bytes', 'wb').write(bytes(range(256))); os.chmod('src/bytes', 0o640)
open('src/naïve 漢字', 'w').write('é')
os.symlink('bytes', 'src/link'); os.symlink('/etc/passwd', 'src/away'); os.mkfifo('src/pipe')
open('other/file', 'w').write('o'); open('not', 'w').write('asked for')
"""
DESCRIBE = """
import os
for folder, folders, names in sorted(os.walk('.')):
    for name in sorted(folders + names):
        path = os.path.join(folder, name)
        if os.path.islink(path):
            print(path, '->', os.readlink(path))
        elif os.path.isdir(path):
            print(path + '/')
        else:
            print(path, oct(os.stat(path).st_mode & 0o777), open(path, 'rb').read()[-2:], os.access(path, os.W_OK))
"""
MADE = """./other/
./src/
./other/file 0o644 b'o' True
./src/away -> /etc/passwd
./src/bytes 0o640 b'\\xfe\\xff' True
./src/empty/
./src/link -> bytes
./src/naïve 漢字 0o644 b'\\xc3\\xa9' True
./src/tool 0o755 b'h\\n' True
./src/empty/inner/
"""


def test_files_are_carried_from_one_sandbox_to_another(stage: Stage) -> None:
    async def carry(sandbox: Sandbox) -> tuple[bytes, str]:
        await output(sandbox, MAKE)
        tar = await sandbox.export(["src", "./other/", "src/tool", "missing", "missing/too"])
        other = await stage.provider.create({})
        try:
            await other.load(tar)
            await other.load(tar)  # what is there is replaced
            return tar, await output(other, DESCRIBE)
        finally:
            await other.close()

    tar, described = stage.play(carry)
    assert sorted(described.splitlines()) == sorted(MADE.splitlines())
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
        members = archive.getmembers()
    assert {member.type for member in members} == {tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE}
    assert sorted(member.name for member in members if not member.isdir()) == [
        "other/file", "src/away", "src/bytes", "src/link", "src/naïve 漢字", "src/tool"
    ]  # fmt: skip


def test_the_whole_working_folder_can_be_carried(stage: Stage) -> None:
    async def carry(sandbox: Sandbox) -> str:
        tar = await sandbox.export(["."])
        other = await stage.provider.create({"b/old": "kept"})
        try:
            await other.load(tar)
            return await output(other, "import os\nprint(sorted(os.listdir('.')), os.listdir('b'), open('a').read())")
        finally:
            await other.close()

    assert stage.play(carry, {"a": "1", "b/c": "2"}) in (
        "['a', 'b'] ['old', 'c'] 1\n", "['a', 'b'] ['c', 'old'] 1\n"
    )  # fmt: skip


def test_what_is_mounted_below_the_working_folder_is_not_carried(stage: Stage, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "program").write_text("not the agent's")
    tmp_path.chmod(0o755)

    async def names(sandbox: Sandbox) -> list[str]:
        shown = await sandbox.exec(["cat", "tool/program"], timeout_s=TIMEOUT_S)
        with tarfile.open(fileobj=io.BytesIO(await sandbox.export(["."]))) as tar:
            return [shown.stdout, *sorted(member.name for member in tar if member.isreg())]

    try:
        carried = stage.play(names, {"a": "1", "b/c": "2"}, SandboxSpec(mounts={"/work/tool": tool}))
    except Unsupported:
        assert Capability.IMAGES not in stage.claims
        return
    assert carried == ["not the agent's", "a", "b/c"]


def test_an_export_has_its_limit(stage: Stage) -> None:
    async def ask(sandbox: Sandbox) -> None:
        await output(sandbox, "open('big', 'wb').write(bytes(3_000_000))\nopen('sparse', 'wb').truncate(5_000_000)")
        with pytest.raises(ValueError, match="1000000"):
            await sandbox.export(["big"], limit_bytes=1_000_000)
        with pytest.raises(ValueError, match="4000000"):
            await sandbox.export(["sparse"], limit_bytes=4_000_000)
        assert 3_000_000 < len(await sandbox.export(["big"], limit_bytes=4_000_000)) < 4_000_000
        for path in ("../x", "a/../../x"):
            with pytest.raises(ValueError, match="inside"):
                await sandbox.export([path])

    stage.play(ask)


def archive(*members: tuple[str, bytes, str]) -> bytes:
    """A tar of names, types and where links lead; a file holds its own name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind, target in (("good", tarfile.REGTYPE, ""), *members):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.devmajor, info.devminor = kind, target, 1, 3
            data = name.encode() if kind == tarfile.REGTYPE else b""
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
BAD_ARCHIVES: dict[str, Callable[[str], bytes]] = {
    "absolute": lambda outside: archive((f"{outside}/x", FILE, "")),
    "above": lambda outside: archive(("../x", FILE, "")),
    "above, hidden": lambda outside: archive(("a/b/../../../x", FILE, "")),
    "through a link": lambda outside: archive(("a", LINK, outside), ("a/x", FILE, "")),
    "through a link in a link": lambda outside: archive(("a", LINK, "."), ("a/b", LINK, outside), ("a/b/x", FILE, "")),
    "a link, then a file": lambda outside: archive(("a", LINK, f"{outside}/x"), ("a", FILE, "")),
    "a hard link": lambda outside: archive(("a", HARD, "/etc/passwd")),
    "a hard link above": lambda outside: archive(("a", HARD, "../../../etc/passwd")),
    "a device": lambda outside: archive(("a", tarfile.CHRTYPE, "")),
    "a disk": lambda outside: archive(("a", tarfile.BLKTYPE, "")),
    "a pipe": lambda outside: archive(("a", tarfile.FIFOTYPE, "")),
    "cut short": lambda outside: archive(("a", FILE, ""))[:700],
    "cut in a file": lambda outside: archive(("a", FILE, ""))[:1026],
    "no tar": lambda outside: b"x" * 2048,
    "compressed": lambda outside: gzip.compress(archive()),
    "nothing": lambda outside: b"",
}


def test_of_a_bad_archive_nothing_is_unpacked(stage: Stage, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)

    async def load(sandbox: Sandbox) -> dict[str, str | None]:
        for make in BAD_ARCHIVES.values():
            with pytest.raises(ValueError, match=r"."):
                await sandbox.load(make(str(tmp_path)))
        return {"x": await sandbox.read_file("x"), "good": await sandbox.read_file("good")}

    assert stage.play(load) == {"x": None, "good": None}
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_not_unpacked_through_what_is_there(stage: Stage, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("kept")
    plant = f"import os\nos.symlink({str(tmp_path)!r}, 'a')\nos.symlink({str(tmp_path / 'kept')!r}, 'leaf')"

    async def load(sandbox: Sandbox) -> str | None:
        await output(sandbox, plant)
        with pytest.raises(ValueError, match=r"."):
            await sandbox.load(archive(("a/x", FILE, "")))
        assert await sandbox.read_file("good") is None
        await sandbox.load(archive(("leaf", FILE, "")))
        return await sandbox.read_file("leaf")

    assert stage.play(load) == "leaf"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "kept")]


def names(tar: bytes) -> Sequence[str]:
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
        return archive.getnames()


def test_files_that_change_while_they_are_exported_do_no_harm(stage: Stage) -> None:
    swap = (
        "import os, time\nend = time.time() + 1.5\nos.mkdir('t')\n"
        "while time.time() < end:\n"
        "    os.rename('t', 'u'); os.symlink('/etc', 't'); os.unlink('t'); os.rename('u', 't')\n"
        "    open('t/file', 'w').write('x' * 1000)\n"
    )

    async def race(sandbox: Sandbox) -> set[str]:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(python(sandbox, swap))
            seen: set[str] = set()
            while not running.done():
                seen |= set(names(await sandbox.export(["t"])))
                await asyncio.sleep(0.01)
        assert running.result().exit_code == 0
        return seen

    assert stage.play(race) <= {"t", "t/file"}
