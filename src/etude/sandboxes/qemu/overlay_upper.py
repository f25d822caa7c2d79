"""What was written in a virtual machine as a layer of an image: unpacked on this machine, with nothing trusted.

The tar comes from a machine in which hostile code may run. It is unpacked into a new folder; whatever is not below a
folder that the same tar has made is refused, so no link is ever followed. Owns that; not the layer's place.
"""

import os
import stat
import tarfile
from pathlib import Path, PurePosixPath

from etude.errors import SandboxError
from etude.sandboxes.images.archives import check_date
from etude.sandboxes.images.layers import AGENT, PATH_LIMIT_BYTES, WHITEOUT_XATTRS
from etude.sandboxes.qemu.guest.file_server import XATTR_HEADER

COPY_BYTES = 1 << 20
MODE = 0o7777


def unpack_upper(tar: Path, target: Path) -> None:
    """Unpack an upper layer into the new folder ``target``. Raises :class:`~etude.errors.SandboxError`."""
    target.mkdir(mode=0o755)
    folders: dict[str, tarfile.TarInfo | None] = {".": None}
    try:
        with tarfile.open(tar, mode="r:") as archive:
            for member in archive:
                _check(member, folders)
                _make(archive, member, target / member.name)
                if member.isdir():
                    folders[member.name] = member
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SandboxError(f"what a virtual machine wrote cannot be made a layer: {error}") from error
    for name, folder in reversed(folders.items()):  # last, since to fill a folder changes its time
        if folder is not None:
            _finish(folder, target / name)


def _check(member: tarfile.TarInfo, folders: dict[str, tarfile.TarInfo | None]) -> None:
    path = PurePosixPath(member.name)
    is_plain = str(path) == member.name and not path.is_absolute() and ".." not in path.parts and path.parts
    if not is_plain or str(path.parent) not in folders or member.name in folders:
        raise ValueError(f"{member.name!r} is not below a folder of the layer")
    if len(os.fsencode(member.name)) > PATH_LIMIT_BYTES:
        raise ValueError(f"{member.name[:60]}… is longer than {PATH_LIMIT_BYTES} bytes")
    check_date(member)


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    if member.isdir():
        path.mkdir(mode=0o700)
        if member.pax_headers.get(XATTR_HEADER) == "y":
            os.setxattr(path, WHITEOUT_XATTRS[0], b"y")
        return
    if member.issym():
        path.symlink_to(member.linkname)
    elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
        os.mknod(path, stat.S_IFCHR | 0o600, 0)
    elif member.isreg():
        _write(archive, member, path)
    else:
        raise ValueError(f"{member.name!r} is of a kind that no layer holds (tar type {member.type!r})")
    _finish(member, path)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    with path.open("xb") as file:
        while chunk := source.read(COPY_BYTES):
            file.write(chunk)


def _finish(member: tarfile.TarInfo, path: Path) -> None:
    """Give it its owner, mode and time."""
    if os.geteuid() == 0:
        owner = AGENT if member.uid == AGENT else 0
        os.chown(path, owner, owner, follow_symlinks=False)
    if member.isreg() or member.isdir():
        path.chmod(member.mode & MODE)
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)
