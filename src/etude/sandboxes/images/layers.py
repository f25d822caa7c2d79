"""Directory trees as layers: what one consists of, its digest, and how it is copied and removed.

A layer holds folders, plain files, symbolic links and overlayfs whiteouts (character devices 0:0, and folders with the
attribute ``user.overlay.opaque``); sockets, pipes and devices are refused. Everything in one that was made on this
machine belongs to root or to the agent; one of a container's image keeps its owners. Owns the digest; where layers are
kept is :mod:`etude.sandboxes.images.store`'s.
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
"""User and group that commands run as, inside."""
HOME = "/home/agent"
"""The agent's home, inside."""
OWNED = (WORKDIR, HOME)
"""Places that belong to the agent with all that is in them, whatever the tree's owner on this machine."""
WHITEOUT_XATTRS = ("user.overlay.opaque",)
"""Attributes that say something about a layer; all others are dropped."""
PATH_LIMIT_BYTES = 3500
"""Longest path inside of a layer; Linux takes 4,096 bytes together with the folders of the store above it."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """One thing in a layer."""

    path: str
    """From ``/``, without a leading slash; undecodable bytes as surrogates."""
    status: os.stat_result
    user: int
    group: int

    @property
    def mode(self) -> int:
        """Permission bits with set-user, set-group and sticky."""
        return stat.S_IMODE(self.status.st_mode)


def entries(tree: Path, owned: Sequence[str] | None = OWNED) -> Iterator[TreeEntry]:
    """All that is below ``tree``, folders before their contents, in the order of their paths' bytes.

    What is below the places ``owned`` is the agent's, and so is what belongs to user 1000 of this machine, else root's;
    with ``None`` owners are as they are. Raises ``ValueError`` for what no layer may hold, with its path.
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
    """SHA-256 over the paths, kinds, modes, owners, contents and links in a tree; times do not count.

    Raises ``ValueError`` for what no layer may hold.
    """
    digest = hashlib.sha256()
    for entry in entries(tree, owned):
        _update(digest, entry, tree / entry.path)
    return digest.hexdigest()


def copy_tree(source: Path, target: Path, owned: Sequence[str] | None = OWNED) -> str:
    """Copy what is in ``source`` into the new folder ``target`` and return the digest of the copy.

    Modes and times are kept. As root, owners become those of the layer; any other user owns what it copies.
    Raises ``ValueError`` for what no layer may hold.
    """
    target.mkdir(mode=0o755)
    digest = hashlib.sha256()
    folders: list[tuple[Path, TreeEntry]] = []
    for entry in entries(source, owned):
        copy = target / entry.path
        _copy(source / entry.path, copy, entry)
        _update(digest, entry, copy)  # of what was written: a tree that changes meanwhile is still stored truly
        if stat.S_ISDIR(entry.status.st_mode):
            folders.append((copy, entry))
    for copy, entry in reversed(folders):  # last, because filling a folder changes its time and may need its rights
        copy.chmod(entry.mode)
        os.utime(copy, ns=(entry.status.st_mtime_ns, entry.status.st_mtime_ns))
    return digest.hexdigest()


def first_link(tree: Path, place: str) -> str | None:
    """The first link on the way down to ``place`` in a tree, itself included, by its path inside; else ``None``."""
    parts = PurePosixPath(place.lstrip("/")).parts
    ways = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((f"/{way}" for way in ways if (tree / way).is_symlink()), None)


def paths_below(place: Path) -> Iterator[Path]:
    """A path and all that is below it, folders before their contents; no link is followed."""
    yield place
    if place.is_dir() and not place.is_symlink():
        for parent, folders, files in os.walk(place):
            yield from (Path(parent, name) for name in (*folders, *files))


def places_in(tree: Path, places: Sequence[str]) -> list[str]:
    """The ``places`` that are in a tree, except its root and what is behind a link."""
    there = [place for place in places if place.strip("/") and os.path.lexists(tree / place.lstrip("/"))]
    return [place for place in there if first_link(tree, place) is None]


def give_away(tree: Path, places: Sequence[str], user: ImageUser) -> None:
    """Make a user the owner of places in a tree, with all that is in them."""
    for place in places_in(tree, places):
        for path in paths_below(tree / place.lstrip("/")):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)


def remove_tree(tree: Path) -> None:
    """Remove a folder and all in it, whatever the modes; one that is not there is fine."""
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
    """Bytes in the plain files below ``tree``."""
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
        with suppress(OSError):  # it has none, or its file system has no attributes at all
            os.setxattr(copy, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)


def _update(digest: "hashlib._Hash", entry: TreeEntry, path: Path) -> None:
    """Add one entry; every field ends with a zero byte, which none can hold."""
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
