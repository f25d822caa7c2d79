"""The environment of commands inside a virtual machine: a layered root, a process 1, limits, users.

    /run/layers/N   the disks of an image, read-only      /run/upper   the disk that is written to
    /run/root      all of them in one overlay            commands     a control group with the limits

Commands are in a process and a mount namespace of their own, so they see neither the agent nor its files. Process 1 is
a program that only waits, with a usual name: it ignores the end of its children, so the kernel reaps orphans itself.
Owns mounts, namespaces and control groups; commands are :mod:`etude.sandboxes.qemu.guest.agent`'s.
"""

import io
import os
import signal
import socket
import stat
import tarfile
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from etude.errors import SandboxError
from etude.sandboxes.folders import Folder, is_full
from etude.sandboxes.images.archives import MTIME_END_S
from etude.sandboxes.qemu.guest import system
from etude.sandboxes.qemu.guest.frames import GuestMessage, Inbox, Outbox

ERRANDS = frozenset({"settle", "read", "write", "export", "load", "pack"})
"""Requests to the file server."""
PART_BYTES = 4 << 20
"""Maximum number of bytes of a packed upper layer in one answer."""
CHUNK_BYTES = 256 << 10
OPAQUE = "user.overlay.opaque"
XATTR_HEADER = "SCHILY.xattr." + OPAQUE
"""The attribute in tars that marks a folder as hiding those below it."""


class FileServer:
    """Answers requests about files, each with a message."""

    def __init__(self) -> None:
        self._folder: Folder | None = None
        self._packing: Iterator[bytes] = iter(())

    def serve(self, channel: socket.socket) -> None:
        """Answer requests until the agent is gone."""
        inbox, outbox = Inbox(), Outbox()
        while data := channel.recv(CHUNK_BYTES):
            for message in inbox.feed(data):
                outbox.add(self.answer(message))
                while outbox:
                    channel.sendall(outbox.next_frame())

    def answer(self, message: GuestMessage) -> GuestMessage:
        """Do one errand. Its errors are answers, of the kind that the host raises."""
        head = message.head
        answer: dict[str, Any] = {"re": head["id"]}
        try:
            more, body = self._do(head, message.body)
        except ValueError as error:
            return GuestMessage({**answer, "error": ["value", str(error)]})
        except (SandboxError, OSError, MemoryError) as error:
            kind = "agent" if is_full(error) else "sandbox"
            return GuestMessage({**answer, "error": [kind, str(error) or type(error).__name__]})
        return GuestMessage({**answer, **more}, body)

    def _do(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if head["do"] == "settle":
            owner, workdir = int(head["owner"]), str(head["workdir"])
            self._folder = Folder(ROOT, owner=owner, inside="/", workdir=workdir)
            return {}, b""
        if self._folder is None:
            raise SandboxError("there is no environment yet")
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
            self._packing = _chunks(UPPER / "files")
        part = bytearray()
        for chunk in self._packing:
            part += chunk
            if len(part) >= PART_BYTES:
                return {"last": False}, bytes(part)
        return {"last": True}, bytes(part)


def _chunks(top: Path) -> Iterator[bytes]:
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


LAYERS, UPPER, ROOT = Path("/run/layers"), Path("/run/upper"), Path("/run/root")
GROUP = Path("/sys/fs/cgroup/commands")
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
"""Devices that commands have, by major and minor number."""
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
READ_ONLY = ("/proc/sys", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sysrq-trigger", "/sys")
"""Folders in which root could change the kernel."""
HIDDEN = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware")
ROOT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31})
"""Capabilities that root keeps inside: files of any user, users, low ports, ``mknod`` and ``chroot``, as in a usual
container.
"""
NAMES = ("hosts", "hostname", "resolv.conf")
"""Files of ``/etc`` that differ between a machine and its copies."""
READY = b"ready"
PERIOD_US = 100_000
"""Period of the processor time limit ``cpus``: a tenth of a second."""


class GuestEnvironment:
    """A root, a process 1 and limits of commands, made once and never undone."""

    def __init__(self, order: dict[str, Any]) -> None:
        """``order`` has: ``disks``, numbers of disks of the image, lowest first; ``system``, whether the machine's own
        root is below them; ``mounts``, lists of disk, path and name in the disk; ``upper``, the disk that is written;
        ``roots``, paths that are roots of services; ``workdir``, ``user`` (name, number, group, home), ``names`` (of
        the loopback), ``environment``, ``memory_bytes``, ``processes``, ``cpus``.
        """
        name, self.owner, self.group, self.home = order["user"]
        self.workdir: str = order["workdir"]
        self._hosts = "".join(f"127.0.0.1 {name}\n" for name in order["names"])
        self.environment = {
            "PATH": SEARCH_PATH,
            "HOME": self.home,
            "USER": name,
            "LOGNAME": name,
            "LANG": "C.UTF-8",
            **order["environment"],
        }
        self._roots: list[str] = order["roots"]
        self._mount_root(order)
        self._set_limits(order)
        self._start_init()

    def stats(self) -> dict[str, float]:
        """Usage now, in bytes, processes and seconds."""
        usage = dict(line.split() for line in (GROUP / "cpu.stat").read_text().splitlines())
        disk = os.statvfs(UPPER)
        return {
            "memory_bytes": int((GROUP / "memory.current").read_text()),
            "disk_bytes": max(0, (self._free_blocks - disk.f_bfree) * disk.f_frsize),
            "processes": int((GROUP / "pids.current").read_text()) - 1,
            "cpu_s": int(usage["usage_usec"]) / 1e6,
        }

    def rename(self, name: str, hosts: str) -> None:
        """Set the machine's name and the lines of ``/etc/hosts``, as commands see them."""
        texts = {"hosts": f"{hosts}127.0.1.1 {name}\n{self._hosts}", "hostname": f"{name}\n"}
        for file, text in texts.items():
            os.ftruncate(self._names[file], 0)
            os.pwrite(self._names[file], text.encode(), 0)

    def freeze(self, *, frozen: bool) -> None:
        """Stop every command, or resume all."""
        system.write(f"{GROUP}/cgroup.freeze", "1" if frozen else "0")

    def enter(self, root: str, user: Sequence[int]) -> None:
        """Make the calling process one of the commands; it must be a fresh child that execs next.

        With a ``root`` it is a service's process, whose ``user`` is a number and a group.
        """
        os.setsid()
        system.join(self.init_handle, system.CLONE_NEWNS)
        if root:
            os.chroot(root)
        try:
            os.chdir("/" if root else self.workdir)
        except OSError:  # a command before this one removed it
            os.chdir("/")
        owner, group = user or (self.owner, self.group)
        if owner:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(owner, owner, owner)
        else:
            system.drop_bounding(ROOT_CAPABILITIES)
        system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)

    def _mount_root(self, order: dict[str, Any]) -> None:
        for folder in (LAYERS, UPPER, ROOT):
            folder.mkdir(exist_ok=True)
        upper = disk_path(order["upper"])
        system.forget_cached(upper)
        system.mount(upper, str(UPPER), "ext4", system.MS_NOSUID | system.MS_NODEV, "noauto_da_alloc,noinit_itable")
        for name in ("files", "work"):
            (UPPER / name).mkdir(exist_ok=True)
        layers = [str(self._mount_disk(number)) for number in order["disks"]]
        lower = ":".join(reversed([*(["/"] if order["system"] else []), *layers]))
        options = f"userxattr,lowerdir={lower},upperdir={UPPER}/files,workdir={UPPER}/work"
        system.mount("overlay", str(ROOT), "overlay", 0, options)
        self._mounts = [(self._mount_disk(number) / name, path) for number, path, name in order["mounts"]]
        self._free_blocks = os.statvfs(UPPER).f_bfree

    def _mount_disk(self, number: int) -> Path:
        folder = LAYERS / str(number)
        if not folder.exists():
            folder.mkdir()
            system.forget_cached(disk_path(number))
            system.mount(disk_path(number), str(folder), "squashfs", system.MS_RDONLY | system.MS_NODEV)
        return folder

    def _set_limits(self, order: dict[str, Any]) -> None:
        GROUP.mkdir()
        (GROUP / "memory.max").write_text(str(order["memory_bytes"]))
        (GROUP / "pids.max").write_text(str(order["processes"] + 1))
        (GROUP / "cpu.max").write_text(f"{max(1000, int(order['cpus'] * PERIOD_US))} {PERIOD_US}")

    def _start_init(self) -> None:
        system.unshare(system.CLONE_NEWPID | system.CLONE_NEWIPC)
        news, ready = os.pipe()
        wait, self._hold = os.pipe()  # process 1 reads the one until the agent is gone, which has the other
        self.init = os.fork()
        if self.init == 0:
            os.close(self._hold)
            os.close(news)
            self._become_init(wait, ready)
        os.close(ready)
        os.close(wait)
        with os.fdopen(news, "rb") as pipe:
            answer = pipe.read()
        if answer != READY:
            raise OSError(f"the environment could not be made: {answer.decode(errors='replace')}")
        self.init_handle = os.pidfd_open(self.init)
        root = f"/proc/{self.init}/root"
        self._names = {name: os.open(f"{root}/etc/{name}", os.O_WRONLY | os.O_CLOEXEC) for name in NAMES}
        Path(f"{root}/dev/init").unlink()

    def _become_init(self, wait: int, ready: int) -> NoReturn:
        try:
            group = GROUP / "init"
            group.mkdir()
            (group / "cgroup.procs").write_text("0")
            self._prepare()
            os.dup2(wait, 0)
            null = os.open("/dev/null", os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            Path("/dev/init").symlink_to("/bin/cat")
            os.write(ready, READY)
            os.chdir("/")
            name = "/sbin/init" if Path("/bin/cat").resolve().name == "cat" else "cat"  # busybox asks
            os.execve("/dev/init", [name], {})
        except (OSError, ValueError) as error:
            os.write(ready, repr(error).encode())
        finally:
            os._exit(1)

    def _prepare(self) -> None:
        """Enter the new root and set it up; after ``pivot_root`` all paths are those inside."""
        system.unshare(system.CLONE_NEWNS)
        system.mount("none", "/", "", system.MS_REC | system.MS_PRIVATE)
        for source, path in self._mounts:
            _show(source, ROOT / path.lstrip("/"))
        os.chdir(ROOT)
        system.pivot_root()
        os.chdir("/")
        _make_devices()
        _mount_kernel()
        _make_user(self.owner, self.group, self.home)
        _make_names()
        for folder in (self.home, self.workdir):
            _make_folder(folder, self.owner, self.group, {path for _, path in self._mounts})
        Path("/tmp").mkdir(exist_ok=True)
        Path("/tmp").chmod(0o1777)
        for path in (f"{root}{folder}" for root in self._roots for folder in ("/proc", "/dev")):
            Path(path).mkdir(exist_ok=True)
            system.mount("/" + path.rpartition("/")[2], path, "", system.MS_BIND | system.MS_REC)


def disk_path(number: int) -> str:
    """The device path of a disk: 0 is the machine's own root."""
    return f"/dev/vd{chr(ord('a') + number)}"


def _mount_kernel() -> None:
    """Mount processes and kernel information; settings are read-only or hidden."""
    for folder in ("/proc", "/sys", "/run"):
        Path(folder).mkdir(exist_ok=True)
    quiet = system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC
    system.mount("proc", "/proc", "proc", quiet)
    system.mount("sysfs", "/sys", "sysfs", quiet | system.MS_RDONLY)
    for path in READ_ONLY:
        if Path(path).exists():
            system.mount(path, path, "", system.MS_BIND)
            system.mount(path, path, "", system.MS_BIND | system.MS_REMOUNT | system.MS_RDONLY | quiet)
    for path in HIDDEN:
        if Path(path).is_dir():
            system.mount("tmpfs", path, "tmpfs", system.MS_RDONLY)
        elif Path(path).exists():
            system.mount("/dev/null", path, "", system.MS_BIND)


def _make_devices() -> None:
    Path("/dev").mkdir(exist_ok=True)
    system.mount("tmpfs", "/dev", "tmpfs", system.MS_NOSUID | system.MS_NOEXEC, "mode=755,size=64k")
    for name, numbers in NODES.items():
        os.mknod(f"/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(*numbers))
        Path(f"/dev/{name}").chmod(0o666)
    for name, target in DEVICE_LINKS.items():
        Path(f"/dev/{name}").symlink_to(target)
    for name, kind, options in (("pts", "devpts", "newinstance,ptmxmode=0666,mode=620"), ("shm", "tmpfs", "mode=1777")):
        Path(f"/dev/{name}").mkdir()
        system.mount(kind, f"/dev/{name}", kind, system.MS_NOSUID | system.MS_NODEV, options)


def _make_user(user: int, group: int, home: str) -> None:
    """Name the agent in the base system's lists of users and groups, if they do not."""
    Path("/etc").mkdir(exist_ok=True)
    lists = {"passwd": f"agent:x:{user}:{group}:agent:{home}:/bin/bash\n", "group": f"agent:x:{group}:\n"}
    for name, line in lists.items():
        path = Path("/etc") / name
        text = path.read_text() if path.exists() else "root:x:0:0:root:/root:/bin/sh\n"
        if f":{group}:" not in text:
            path.write_text(text + line)


def _make_names() -> None:
    """Put the files with host names in memory, because a copy rewrites them."""
    Path("/run/names").mkdir()
    system.mount("tmpfs", "/run/names", "tmpfs", system.MS_NOSUID | system.MS_NODEV, "mode=755,size=64k")
    for name in NAMES:
        for path in (Path("/run/names") / name, Path("/etc") / name):
            path.unlink(missing_ok=True)
            path.touch()
        system.mount(f"/run/names/{name}", f"/etc/{name}", "", system.MS_BIND)
    system.unmount("/run/names")
    Path("/run/names").rmdir()


def _make_folder(path: str, owner: int, group: int, shown: Container[str]) -> None:
    """Create a folder, and give it with its content to ``owner``, where necessary; except for paths in ``shown``,
    which are read-only mounts.
    """
    Path(path).mkdir(parents=True, exist_ok=True)
    waiting = [path]
    while waiting and owner:
        place = waiting.pop()
        if place in shown:
            continue
        status = os.lstat(place)
        if status.st_uid != owner:
            os.chown(place, owner, group, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            waiting += [entry.path for entry in os.scandir(place)]


def _show(source: Path, target: Path) -> None:
    """Bind a file or folder of a read-only disk to the path at which commands see it."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    system.mount(str(source), str(target), "", system.MS_BIND)
