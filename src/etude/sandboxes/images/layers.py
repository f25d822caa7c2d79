"""Directory trees as layers: their content, their digest, and how they are copied and removed.

A layer holds folders, regular files, symbolic links and overlayfs whiteouts (character devices 0:0, and folders with
the attribute ``user.overlay.opaque``); sockets, pipes and devices are rejected. Everything in a layer made on this
machine belongs to root or to the agent; a layer of a container image keeps its owners. Owns the digest;
:mod:`etude.sandboxes.images.store` stores layers.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.sandbox_spec import WORKDIR, ImageUser

AGENT = 1000
"""User and group that commands run as inside a sandbox."""
HOME = "/home/agent"
"""The agent's home, inside."""
OWNED = (WORKDIR, HOME)
"""Paths that belong to the agent with their content, whatever the tree's owner on this machine."""
WHITEOUT_XATTRS = ("user.overlay.opaque",)
"""Extended attributes that are part of a layer; all others are dropped."""
PATH_LIMIT_BYTES = 3500
"""Longest path inside a layer; Linux allows 4,096 bytes including the store's own folders."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One file, folder or link in a layer."""

    path: str
    """Path from ``/``, without a leading slash; undecodable bytes as surrogates."""
    status: os.stat_result
    user: int
    group: int

    @property
    def mode(self) -> int:
        """Permission bits with set-user, set-group and sticky bits."""
        return stat.S_IMODE(self.status.st_mode)


def entries(tree: Path, owned: Sequence[str] | None = OWNED) -> Iterator[TreeEntry]:
    """All entries below ``tree``, folders before their content, ordered by the bytes of their paths.

    Entries below the paths ``owned`` and those of this machine's user 1000 belong to the agent, others to root; with
    ``None`` owners are unchanged. Raises ``ValueError`` for an entry that a layer cannot contain, with its path.
    """
    places = None if owned is None else tuple(place.strip("/") for place in owned)
    waiting = [""]
    while waiting:
        path = waiting.pop()
        if path:
            yield _entry(tree, path, places)
        folder = tree / path
        if not path or (folder.is_dir() and not folder.is_symlink()):
            with os.scandir(folder) as scan:
                names = sorted((entry.name for entry in scan), key=os.fsencode, reverse=True)
            waiting.extend(f"{path}/{name}" if path else name for name in names)


def digest_tree(tree: Path, owned: Sequence[str] | None = OWNED) -> str:
    """SHA-256 over the paths, kinds, modes, owners, contents and links in a tree; times are ignored.

    Raises ``ValueError`` for entries that a layer cannot contain.
    """
    digest = hashlib.sha256()
    for entry in entries(tree, owned):
        _update(digest, entry, tree / entry.path)
    return digest.hexdigest()


def copy_tree(source: Path, target: Path, owned: Sequence[str] | None = OWNED) -> str:
    """Copy the content of ``source`` into the new folder ``target`` and return the digest of the copy.

    Modes and times are preserved. Root sets the layer's owners; any other user owns the copies. Raises ``ValueError``
    for entries that a layer cannot contain.
    """
    target.mkdir(mode=0o755)
    digest = hashlib.sha256()
    folders: list[tuple[Path, TreeEntry]] = []
    for entry in entries(source, owned):
        copy = target / entry.path
        _copy(source / entry.path, copy, entry)
        _update(digest, entry, copy)  # of the copy, so that the digest is right even if the source changes meanwhile
        if stat.S_ISDIR(entry.status.st_mode):
            folders.append((copy, entry))
    for copy, entry in reversed(folders):  # last: filling a folder changes its time
        copy.chmod(entry.mode)
        os.utime(copy, ns=(entry.status.st_mtime_ns, entry.status.st_mtime_ns))
    return digest.hexdigest()


def first_link(tree: Path, place: str) -> str | None:
    """The first link on the path to ``place`` in a tree, including itself, by its path inside; else ``None``."""
    parts = PurePosixPath(place.lstrip("/")).parts
    ways = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((f"/{way}" for way in ways if (tree / way).is_symlink()), None)


def paths_below(place: Path) -> Iterator[Path]:
    """A path and everything below it, folders before their content; links are not followed."""
    yield place
    if place.is_dir() and not place.is_symlink():
        for parent, folders, files in os.walk(place):
            yield from (Path(parent, name) for name in (*folders, *files))


def places_in(tree: Path, places: Sequence[str]) -> list[str]:
    """The ``places`` that exist in a tree, except its root and paths behind a link."""
    there = [place for place in places if place.strip("/") and os.path.lexists(tree / place.lstrip("/"))]
    return [place for place in there if first_link(tree, place) is None]


def give_away(tree: Path, places: Sequence[str], user: ImageUser) -> None:
    """Give places in a tree, with their content, to a user."""
    for place in places_in(tree, places):
        for path in paths_below(tree / place.lstrip("/")):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)


def remove_tree(tree: Path) -> None:
    """Remove a folder with its content, whatever the modes; a missing one is accepted."""
    waiting = [tree]
    folders: list[Path] = []
    while waiting:
        folder = waiting.pop()
        try:
            folder.chmod(0o700)
            inner = list(os.scandir(folder))
        except FileNotFoundError:
            continue
        folders.append(folder)
        for entry in inner:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            else:
                Path(entry.path).unlink(missing_ok=True)
    for folder in reversed(folders):
        with suppress(FileNotFoundError):
            folder.rmdir()


def size_of(tree: Path) -> int:
    """Bytes in the regular files below ``tree``."""
    return sum(entry.status.st_size for entry in entries(tree) if stat.S_ISREG(entry.status.st_mode))


def _entry(tree: Path, path: str, places: Sequence[str] | None) -> TreeEntry:
    if len(os.fsencode(path)) > PATH_LIMIT_BYTES:
        raise ValueError(f"{path[:60]}… is longer than {PATH_LIMIT_BYTES} bytes: no layer holds such paths")
    status = os.lstat(tree / path)
    kind = stat.S_IFMT(status.st_mode)
    is_whiteout = kind == stat.S_IFCHR and status.st_rdev == 0
    if kind not in (stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK) and not is_whiteout:
        raise ValueError(f"{path!r} is a socket, pipe or device, which a layer cannot hold: remove it")
    if places is None:
        return TreeEntry(path=path, status=status, user=status.st_uid, group=status.st_gid)
    is_owned = any(path == place or path.startswith(place + "/") for place in places)
    is_agents = is_owned or (os.geteuid() == 0 and status.st_uid == AGENT)
    owner = AGENT if is_agents else 0
    return TreeEntry(path=path, status=status, user=owner, group=owner)


def _copy(source: Path, copy: Path, entry: TreeEntry) -> None:
    kind = stat.S_IFMT(entry.status.st_mode)
    if kind == stat.S_IFDIR:
        copy.mkdir(mode=0o700)
        _keep_opaque(source, copy)
    elif kind == stat.S_IFREG:
        shutil.copyfile(source, copy, follow_symlinks=False)
    elif kind == stat.S_IFLNK:
        copy.symlink_to(source.readlink())
    else:
        os.mknod(copy, stat.S_IFCHR | 0o600, 0)
    if os.geteuid() == 0:
        os.chown(copy, entry.user, entry.group, follow_symlinks=False)
    if kind == stat.S_IFREG:  # a change of owner clears the set-user bit
        copy.chmod(entry.mode)
    os.utime(copy, ns=(entry.status.st_mtime_ns, entry.status.st_mtime_ns), follow_symlinks=False)


def _keep_opaque(source: Path, copy: Path) -> None:
    for name in WHITEOUT_XATTRS:
        with suppress(OSError):  # the attribute is missing, or its file system supports none
            os.setxattr(copy, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)


def _update(digest: "hashlib._Hash", entry: TreeEntry, path: Path) -> None:
    """Add one entry; every field ends with a zero byte, which no field can contain."""
    kind = stat.S_IFMT(entry.status.st_mode)
    content = b""
    if kind == stat.S_IFREG:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
    elif kind == stat.S_IFLNK:
        content = os.fsencode(path.readlink())
    elif kind == stat.S_IFDIR and _is_opaque(path):
        content = b"opaque"
    mode = 0 if kind in (stat.S_IFLNK, stat.S_IFCHR) else entry.mode
    owner = f"{entry.user}" if entry.user == entry.group else f"{entry.user}:{entry.group}"
    head = f"{kind:o} {mode:o} {owner} {len(content)}"
    digest.update(os.fsencode(entry.path) + b"\0" + head.encode() + b"\0" + content)


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, WHITEOUT_XATTRS[0], follow_symlinks=False) == b"y"
    except OSError:
        return False
