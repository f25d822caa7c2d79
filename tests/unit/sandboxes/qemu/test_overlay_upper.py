"""Files written in a virtual machine become a layer with nothing else in it."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandboxes.images.layers import digest_tree
from etude.sandboxes.qemu.guest.filesystem import _chunks
from etude.sandboxes.qemu.sandbox import unpack_upper


def plant(folder: Path) -> Path:
    (folder / "work/inner").mkdir(parents=True)
    (folder / "work/inner/a").write_bytes(b"a" * 100_000)
    (folder / "work/inner").chmod(0o555)
    (folder / "work/tool").write_text("x")
    (folder / "work/tool").chmod(0o4755)
    (folder / "work/link").symlink_to("/etc/passwd")
    (folder / "naïve 漢字").write_text("")
    os.link(folder / "work/tool", folder / "second")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_layer_arrives_as_it_was_but_for_what_no_layer_holds(tmp_path: Path) -> None:
    source = plant(tmp_path / "source")
    (tmp_path / "tar").write_bytes(b"".join(_chunks(source)))
    unpack_upper(tmp_path / "tar", tmp_path / "layer")
    (source / "pipe").unlink()
    assert digest_tree(tmp_path / "layer") == digest_tree(source)
    assert (tmp_path / "layer/work/inner/a").stat().st_mtime_ns // 10**9 == int(
        (source / "work/inner/a").stat().st_mtime
    )


def test_whiteouts_and_folders_that_hide_others_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "hidden").mkdir(parents=True)
    try:
        os.mknod(source / "gone", 0o20600, 0)
        os.setxattr(source / "hidden", "user.overlay.opaque", b"y")
    except OSError as error:
        pytest.skip(f"this machine has no whiteouts: {error}")
    (tmp_path / "tar").write_bytes(b"".join(_chunks(source)))
    unpack_upper(tmp_path / "tar", tmp_path / "layer")
    assert digest_tree(tmp_path / "layer") == digest_tree(source)
    assert (tmp_path / "layer/gone").is_char_device()


def test_dates_that_no_archive_has_become_the_next_that_one_has(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "old").mkdir(parents=True)
    (source / "young").touch()
    os.utime(source / "old", (-1000, -1000))
    os.utime(source / "young", (1 << 33, 1 << 33))
    (tmp_path / "tar").write_bytes(b"".join(_chunks(source)))
    unpack_upper(tmp_path / "tar", tmp_path / "layer")
    dates = [(tmp_path / "layer" / name).stat().st_mtime for name in ("old", "young")]
    assert dates == [0, min((1 << 33) - 1, (source / "young").stat().st_mtime)]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", headers: dict[str, str] | None = None
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.devmajor, info.devminor = kind, target, 1, 3
    info.pax_headers = headers or {}
    return info


BAD = {
    "absolute": [member("/x")],
    "above": [member("../x")],
    "through a link": [member("a", tarfile.SYMTYPE, "/tmp"), member("a/x")],
    "below nothing": [member("a/x")],
    "twice": [member("a", tarfile.DIRTYPE), member("a", tarfile.DIRTYPE)],
    "a file, then through it": [member("a"), member("a/x")],
    "a hard link": [member("a", tarfile.LNKTYPE, "/etc/passwd")],
    "a device": [member("a", tarfile.CHRTYPE)],
    "a disk": [member("a", tarfile.BLKTYPE)],
    "a pipe": [member("a", tarfile.FIFOTYPE)],
    "itself": [member(".", tarfile.DIRTYPE)],
    "long": [member("a" * 4000)],
    "a date that is too large": [member("a", headers={"mtime": "1e30"})],
    "a folder with such a date": [member("a", tarfile.DIRTYPE, headers={"mtime": "8589934592"})],
    "a link with a date before all": [member("a", tarfile.SYMTYPE, "b", headers={"mtime": "-1"})],
    "a date that is none": [member("a", headers={"mtime": "nan"})],
}


@pytest.mark.parametrize("members", BAD.values(), ids=BAD.keys())
def test_what_would_leave_the_layer_is_refused(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for info in members:
            tar.addfile(info)
    (tmp_path / "tar").write_bytes(file.getvalue())
    with pytest.raises(SandboxError, match="cannot be made a layer"):
        unpack_upper(tmp_path / "tar", tmp_path / "layer")


def test_noise_is_no_layer(tmp_path: Path) -> None:
    (tmp_path / "tar").write_bytes(b"x" * 2000)
    with pytest.raises(SandboxError, match="cannot be made a layer"):
        unpack_upper(tmp_path / "tar", tmp_path / "layer")
