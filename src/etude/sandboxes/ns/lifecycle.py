"""The lifecycle of sandboxes in the launcher, from their first process to their last.

    create:          uid range ─▶ control group ─▶ mounts ─▶ first process: make its system calls, take its descriptors
    close, or death: reap ─▶ remove the control group ─▶ report to the provider; the uid range is free again

A uid range is a user namespace with its own users. Making one takes a process, so the next is made in idle time, and
uid ranges are reused: no command can change one. The kernel charges its per-user counts (watches, pending signals,
message queues) also to the creator of a namespace, so the first user of a range creates it: no sandbox uses up
another's counts, nor those of the machine's root. Standard library alone.
"""

import errno
import json
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from etude.sandboxes.ns import wire
from etude.sandboxes.ns.boxes import BoxState, SandboxRecord
from etude.sandboxes.ns.cgroups import CPU, MEMORY, PROCESSES, close_entries
from etude.sandboxes.ns.child import InitPipe, Tools, first_process
from etude.sandboxes.ns.forks import held_child
from etude.sandboxes.ns.root import AGENT, AllowedPlace, MountBundle, RootPlan, is_unsettled, plan_root
from etude.sandboxes.ns.syscalls import (
    CLONE_NEWUSER,
    NOT_MADE,
    CallFailure,
    limit_capabilities,
    show_process,
    unshare,
    write_text,
)

CAP_SYS_ADMIN = 21
FIRST_USER, USERS, SLOTS = 0x70000000, 0x10000, 4096
"""Ranges of users: each sandbox has its own, outside the numbers that systems assign."""
COUNTS = {"max_inotify_instances": 64, "max_inotify_watches": 1 << 14}
"""Limits of one sandbox: a part of a user's limits. Without root, all sandboxes together have one user's limits."""
SPARE_UID_RANGES = 2
"""Number of uid ranges that are made ahead."""
PARTING_BYTES = 64
"""Size of a first process's message besides its descriptors: almost nothing."""
FILE_CALLS = ("openat2", "write")
"""System calls with which a first process writes the first files."""
UNFIT = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.ENAMETOOLONG, errno.ENOENT)
"""Errors of these calls that the path of a file causes, not the machine."""


class SharedMounts(NamedTuple):
    """Mounts that all sandboxes of a launcher share."""

    skeleton: str
    """The tree around the machine's programs that makes them a base system."""
    devices: str
    """Their ``/dev``."""


class UidRange(NamedTuple):
    """A user namespace and its range of ids."""

    slot: int
    """Number of its uid range."""
    users: int
    """Descriptor of the user namespace."""


class Unmade(OSError):
    """Error: a sandbox could not be made."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused
        """True if the caller is at fault: a first file has an invalid path."""


class LifecycleManager:
    """All sandboxes of a launcher."""

    def __init__(
        self,
        tools: Tools,
        shared_mounts: SharedMounts,
        selector: selectors.BaseSelector,
        send: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """``selector`` has callbacks as its data; ``send`` sends a message to the provider."""
        self._tools = tools
        self._shared_mounts = shared_mounts
        self._selector = selector
        self._send = send
        self._boxes: dict[int, SandboxRecord] = {}
        self._free: deque[UidRange] = deque()
        self._used: dict[int, UidRange] = {}
        self._first_slot = int.from_bytes(os.urandom(2), "little") % SLOTS
        self._slots_taken = 0
        self._is_full = False

    def __len__(self) -> int:
        """The number of sandboxes that still exist."""
        return len(self._boxes)

    @property
    def wants_uid_range(self) -> bool:
        """True if another uid range should be made ahead."""
        return len(self._free) < SPARE_UID_RANGES and not self._is_full

    def prepare(self) -> None:
        """Make a uid range ahead. If no more can be made, the existing ones must suffice.

        Raises ``OSError`` if there is none at all.
        """
        try:
            self._free.append(self._make_uid_range())
        except OSError:
            self._is_full = True
            if not self._boxes and not self._free:
                raise

    def create(self, creation: Mapping[str, Any], files: int) -> tuple[bool, list[int]]:
        """Make a sandbox; return whether its files must be settled, and its listeners, which the caller then owns.

        Raises :class:`Unmade`, or ``OSError`` for an error outside the sandbox.
        """
        uid_range = self._free.popleft() if self._free else self._make_uid_range()
        box = SandboxRecord(creation, uid_range.slot)
        try:
            self._tools.cgroups.make(box.name, _limits(creation))
            listeners = self._start_first_process(box, uid_range, files)
        except BaseException:
            box.close()
            self._tools.cgroups.remove(box.name)
            self._free.append(uid_range)
            raise
        self._boxes[box.number], self._used[box.number] = box, uid_range
        self._selector.register(box.pidfd, selectors.EVENT_READ, lambda: self._reap(box))
        return self._tools.maps_range and is_unsettled(creation), listeners

    def find(self, number: int) -> SandboxRecord:
        """A living sandbox. Raises ``OSError`` if it is not alive."""
        box = self._boxes.get(number)
        if box is None or box.state is not BoxState.LIVE:
            raise OSError(f"sandbox {number} is not alive")
        return box

    def end(self, number: int) -> bool:
        """Kill a sandbox's first process, and thereby all others in it; false if it is already gone."""
        box = self._boxes.get(number)
        if box is None:
            return False
        box.close_asked = True
        if box.state is not BoxState.ENDING:
            box.move(BoxState.ENDING)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
        return True

    def end_all(self) -> None:
        """Kill every sandbox."""
        for number in self._boxes:
            self.end(number)

    def _start_first_process(self, box: SandboxRecord, uid_range: UidRange, files: int) -> list[int]:
        """Start a sandbox's first process; return its listeners."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        entries = self._tools.cgroups.open_entries(box.name)
        try:
            with ours, theirs, MountBundle(uid_range.users if self._tools.maps_range else None) as bundle:
                init_pipe = InitPipe(
                    users=uid_range.users,
                    entries=entries,
                    plan=self._plan(box, bundle),
                    places=[AllowedPlace(*fields) for fields in box.creation["places"]],
                    files=_read_files(files),
                    parting=theirs.fileno(),
                    receiving=ours.fileno(),
                    as_root=box.as_root,
                )
                calls, new_process = first_process(self._tools, init_pipe)
                os.waitpid(self._tools.player.play(calls), 0)
                process = calls.result(new_process)
                if (failure := calls.failure) is not None:
                    raise _unmade(failure, process, init_pipe.files)
                box.process, box.pidfd = process, os.pidfd_open(process)
                return self._take_descriptors(box, ours)
        finally:
            close_entries(entries)

    def _plan(self, box: SandboxRecord, bundle: MountBundle) -> RootPlan:
        shared_mounts, maps_range = self._shared_mounts, self._tools.maps_range
        return plan_root(
            box, bundle, skeleton=shared_mounts.skeleton, devices=shared_mounts.devices, maps_range=maps_range
        )

    def _take_descriptors(self, box: SandboxRecord, ours: socket.socket) -> list[int]:
        """Receive the descriptors that the first process sent before it became ``init``."""
        ours.setblocking(False)
        try:
            message = wire.MessageReceiver(ours, PARTING_BYTES).receive()
        except BlockingIOError:
            message = None
        if message is None:
            os.waitpid(box.process, 0)
            raise Unmade("its first process was killed", refused=False)
        box.upper, *listeners = message.descriptors
        return listeners

    def _reap(self, box: SandboxRecord) -> None:
        """Clean up after a sandbox's first process, and thus all its processes, ended."""
        os.waitpid(box.process, 0)
        self._selector.unregister(box.pidfd)
        if box.state is not BoxState.ENDING:
            box.move(BoxState.ENDING)
        box.move(BoxState.GONE)
        box.close()
        del self._boxes[box.number]
        self._free.append(self._used.pop(box.number))
        error = ""
        try:
            self._tools.cgroups.remove(box.name)
        except OSError as failure:
            error = str(failure)
        self._send({"kind": "closed" if box.close_asked else "died", "box": box.number, "error": error})

    def _make_uid_range(self) -> UidRange:
        """Have a child enter a new user namespace, map its users, and keep the namespace."""
        if self._slots_taken >= SLOTS:
            raise OSError(f"{SLOTS} sandboxes are alive, the most for which one provider has uid ranges")
        slot = (self._first_slot + self._slots_taken) % SLOTS
        show_process()  # otherwise its child's maps could not be written
        with held_child(lambda: self._make_namespace(slot), "no user namespace can be made") as process:
            self._map_users(process, slot)
            users = os.open(f"/proc/{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        self._slots_taken += 1
        return UidRange(slot, users)

    def _make_namespace(self, slot: int) -> None:
        """Enter a user namespace created by the first user of a slot's range, if there are such users."""
        self._selector.close()
        if self._tools.maps_range:
            os.seteuid(_first_user(slot))
            limit_capabilities(frozenset({CAP_SYS_ADMIN}))  # some machines refuse namespaces without it
        unshare(CLONE_NEWUSER)
        for name, most in COUNTS.items():
            with suppress(OSError):  # older kernels count differently
                write_text(f"/proc/sys/user/{name}", b"%d" % most)

    def _map_users(self, process: int, slot: int) -> None:
        """Map the users inside to users outside: a range of unused users, or else only this user, who is not root."""
        if self._tools.maps_range:
            line = b"0 %d %d" % (_first_user(slot), USERS)
        else:
            line = b"%d 0 1" % AGENT
            write_text(f"/proc/{process}/setgroups", b"deny")
        for name in ("uid_map", "gid_map"):
            write_text(f"/proc/{process}/{name}", line)


def _first_user(slot: int) -> int:
    return FIRST_USER + slot * USERS


def _unmade(failure: CallFailure, process: int, files: Mapping[str, bytes]) -> Unmade:
    """The reason why a first process failed to start; the process is reaped if there was one."""
    if 0 < process < NOT_MADE:
        os.waitpid(process, 0)
    reason = os.strerror(failure.errno)
    if failure.call in FILE_CALLS and failure.about in files and failure.errno in UNFIT:
        return Unmade(f"{failure.about!r} is not a file in the sandbox: {reason}", refused=True)
    return Unmade(f"no sandbox could be made: {failure.call} {failure.about}: {reason}", refused=False)


def _read_files(files: int) -> Mapping[str, bytes]:
    """The first files, by their path inside, from JSON in memory."""
    if not os.fstat(files).st_size:
        return {}
    with os.fdopen(files, "rb", closefd=False) as source:
        texts: dict[str, str] = json.load(source)
    return {path: text.encode("utf-8", "surrogatepass") for path, text in texts.items()}


def _limits(creation: Mapping[str, Any]) -> dict[str, float]:
    """Limits by controller; init counts as a process too."""
    return {MEMORY: creation["memory_bytes"], PROCESSES: creation["processes"] + 1, CPU: creation["cpus"]}
