"""Files of the world inside of a virtual machine: read, written and packed by a process of their own.

The agent must answer while a large archive is packed, and threads do not go with forks, so a second process, made
before the world, does what may take long, one thing after the other. It follows no link (:mod:`..folders`). Owns the
answers about files; which bytes carry them is :mod:`etude.sandboxes.qemu.guest.frames`'s.
"""

import io
import os
import socket
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import SandboxError
from etude.sandboxes.folders import Folder, is_full
from etude.sandboxes.images.archives import MTIME_END_S
from etude.sandboxes.qemu.guest.filesystem import UPPER, WORLD
from etude.sandboxes.qemu.guest.frames import Inbox, Message, Outbox

ERRANDS = frozenset({"settle", "read", "write", "export", "load", "pack"})
"""What the clerk does."""
PART_BYTES = 4 << 20
"""Of a packed upper layer, in one answer."""
CHUNK_BYTES = 256 << 10
OPAQUE = "user.overlay.opaque"
XATTR_HEADER = "SCHILY.xattr." + OPAQUE
"""How tars say that a folder hides those below it."""


class Clerk:
    """Answers requests about files, each with a message."""

    def __init__(self) -> None:
        self._folder: Folder | None = None
        self._packing: Iterator[bytes] = iter(())

    def serve(self, channel: socket.socket) -> None:
        """Answer until the agent is gone."""
        inbox, outbox = Inbox(), Outbox()
        while data := channel.recv(CHUNK_BYTES):
            for message in inbox.feed(data):
                outbox.add(self.answer(message))
                while outbox:
                    channel.sendall(outbox.next_frame())

    def answer(self, message: Message) -> Message:
        """Do one errand. Its errors are answers, of the kind that the host raises."""
        head = message.head
        answer: dict[str, Any] = {"re": head["id"]}
        try:
            more, body = self._do(head, message.body)
        except ValueError as error:
            return Message({**answer, "error": ["value", str(error)]})
        except (SandboxError, OSError, MemoryError) as error:
            kind = "agent" if is_full(error) else "sandbox"
            return Message({**answer, "error": [kind, str(error) or type(error).__name__]})
        return Message({**answer, **more}, body)

    def _do(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if head["do"] == "settle":
            owner, workdir = int(head["owner"]), str(head["workdir"])
            self._folder = Folder(WORLD, owner=owner, inside="/", workdir=workdir)
            return {}, b""
        if self._folder is None:
            raise SandboxError("there is no world yet")
        match head["do"]:
            case "read":
                text = self._folder.read(head["path"])
                return {"found": text is not None}, (text or "").encode()
            case "write":
                start = 0
                for path, size in head["files"]:
                    self._folder.write(path, body[start : start + size].decode())
                    start += size
            case "export":
                return {}, self._folder.pack(head["paths"], int(head["limit_bytes"]))
            case "load":
                self._folder.unpack(body)
            case "pack":
                return self._pack(is_first=bool(head["first"]))
            case other:
                raise ValueError(f"{other!r} is no errand")
        return {}, b""

    def _pack(self, *, is_first: bool) -> tuple[dict[str, Any], bytes]:
        """The next part of the layer that was written, as a tar."""
        if is_first:
            self._packing = _pieces(UPPER / "files")
        part = bytearray()
        for piece in self._packing:
            part += piece
            if len(part) >= PART_BYTES:
                return {"last": False}, bytes(part)
        return {"last": True}, bytes(part)


def _pieces(top: Path) -> Iterator[bytes]:
    """A tar of all below ``top``, whiteouts and owners included; what cannot be in a layer is left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w|", format=tarfile.PAX_FORMAT, bufsize=tarfile.BLOCKSIZE) as tar:
        waiting = sorted((path.name for path in top.iterdir()), reverse=True)
        while waiting:
            name = waiting.pop()
            info = _header(tar, top / name, name)
            if info is None:
                continue
            if info.isdir():
                waiting += sorted((f"{name}/{path.name}" for path in (top / name).iterdir()), reverse=True)
            if info.isreg():
                with (top / name).open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
            yield _taken(buffer)
    yield _taken(buffer)


def _header(tar: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo | None:
    status = os.lstat(path)
    is_whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
    if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) and not is_whiteout:
        return None
    info = tar.gettarinfo(str(path), arcname=name)
    if info.islnk():  # the same file under a second name: a layer has it twice
        info.type, info.linkname, info.size = tarfile.REGTYPE, "", status.st_size
    info.mtime = min(max(0, info.mtime), MTIME_END_S - 1)  # what its reader takes
    if info.isdir() and OPAQUE in os.listxattr(path):
        info.pax_headers = {XATTR_HEADER: "y"}
    return info


def _taken(buffer: io.BytesIO) -> bytes:
    data = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return data
