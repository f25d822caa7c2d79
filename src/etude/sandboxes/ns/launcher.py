"""The launcher of namespace sandboxes: ``python -m etude.sandboxes.ns.launcher CONTROL``, a connected socket.

    provider ──create──▶ launcher ──calls──▶ first process, which builds its root and becomes init
             ──exec────▶          ──calls──▶ command in the sandbox's namespaces       (etude.sandboxes.ns.child)
             ──job─────▶          ──fork───▶ étude's own work in there                 (etude.sandboxes.ns.child)
             ◀─ended───           ◀─pidfd──

One small process for each provider, so that forks are cheap and hold no secrets. Owns every process, group and mount of
its provider's sandboxes. When the provider disconnects or is killed, it ends all of them and then itself; when the
launcher is killed, the kernel ends them. As root it gives every sandbox its own range of users and shows files through
id-mapped mounts; otherwise it becomes root of a user namespace with its single user, and so do sandboxes.

Single-threaded: waits for messages and for processes, each through a descriptor. Standard library alone, and modules of
étude with the same restriction.
"""

import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from etude.sandboxes.ns import wire
from etude.sandboxes.ns.boxes import RunningCommand, SandboxRecord
from etude.sandboxes.ns.cgroups import Cgroups, close_entries, find_hierarchies, launcher_name, writable
from etude.sandboxes.ns.child import Tools, become_job, command_process, how_it_failed
from etude.sandboxes.ns.forks import held_child
from etude.sandboxes.ns.lifecycle import LifecycleManager, SharedMounts, Unmade
from etude.sandboxes.ns.root import MountBundle, make_bare_root, make_device_tree
from etude.sandboxes.ns.seccomp import filter_program
from etude.sandboxes.ns.syscalls import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_PARENT,
    MACHINE,
    MACHINES,
    MS_PRIVATE,
    MS_REC,
    NOT_MADE,
    CallList,
    Player,
    Result,
    clone,
    enter,
    mount,
    open_init,
    show_process,
    unshare,
)

CLOSE_TIMEOUT_S = 20.0
"""Timeout for all processes to end on shutdown."""
IDLE_S = 0.01
"""Idle time before a uid range is made ahead: after a request for a sandbox, others follow soon and come first."""
PROCESS_NUMBER_BYTES = 32
"""More bytes than any process number has digits."""
ALL_USERS = ["0", "0", "4294967295"]
"""The text of ``/proc/self/uid_map`` in the machine's own user namespace."""


class Launcher:
    """Makes sandboxes, runs commands in them, and removes both."""

    def __init__(self, control: socket.socket, options: Mapping[str, str]) -> None:
        if MACHINE not in MACHINES:
            raise OSError(f"sandboxes with namespaces are written for {' and '.join(MACHINES)}, not {MACHINE}")
        folder = Path(options["folder"])
        self._control = control
        self._receiver = wire.MessageReceiver(control)
        maps_range = enter_namespaces()
        devices = make_device_tree(folder / "dev", is_root=maps_range)
        name = launcher_name(os.getpid())
        hierarchies = find_hierarchies(_text("/proc/self/mountinfo"), _text("/proc/self/cgroup")) if maps_range else []
        self._tools = Tools(
            cgroups=Cgroups(writable(hierarchies, name), name),
            player=Player(MACHINE),
            init=open_init(MACHINE),
            filter=filter_program(MACHINE),
            bare=open_bare_namespace(folder / "bare"),
            maps_range=maps_range,
        )
        self._own_processes = _open("/proc/self/ns/pid")
        self._selector = selectors.DefaultSelector()
        shared_mounts = SharedMounts(options["skeleton"], devices)
        self._lifecycle = LifecycleManager(self._tools, shared_mounts, self._selector, self._send)
        self._lifecycle.prepare()
        self._running: dict[int, RunningCommand] = {}
        self._hung_up = False

    @property
    def grants(self) -> wire.Grants:
        """The grants of the machine."""
        controllers = sorted(self._tools.cgroups.controllers)
        return wire.Grants(error="", maps_range=self._tools.maps_range, controllers=controllers)

    def serve(self) -> None:
        """Serve the provider's requests until it disconnects; then end every process and remove every group."""
        self._selector.register(self._control, selectors.EVENT_READ, self._receive)
        while not self._hung_up:
            if not self._step(IDLE_S if self._lifecycle.wants_uid_range else None):
                self._lifecycle.prepare()
        self._selector.unregister(self._control)
        self._lifecycle.end_all()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while (self._lifecycle or self._running) and time.monotonic() < deadline_s:
            self._step(0.1)
        self._tools.cgroups.close()

    def _step(self, timeout_s: float | None) -> bool:
        """Process pending events; false if there are none."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.fd in self._selector.get_map():  # an earlier event may have ended it
                key.data()
        return bool(events)

    def _receive(self) -> None:
        """Process one request; a sandbox's failure is reported and affects no other."""
        try:
            message = self._receiver.receive()
        except ConnectionResetError:
            message = None
        if message is None:
            self._hung_up = True
            return
        body = message.body
        try:
            self._do(body, message.descriptors)
        except OSError as error:
            refused = isinstance(error, Unmade) and error.refused
            self._send({"kind": "failed", "id": body.get("id", 0), "error": str(error), "refused": refused})
        finally:
            for descriptor in message.descriptors:
                os.close(descriptor)

    def _do(self, body: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        match body["kind"]:
            case "create":
                self._create(body, *descriptors)
            case "exec":
                self._start_command(body, descriptors)
            case "job":
                self._start_job(body, *descriptors)
            case "kill":
                self._kill(body["id"])
            case "stats":
                self._tell_stats(body)
            case "close":
                if not self._lifecycle.end(body["box"]):
                    self._send({"kind": "closed", "box": body["box"], "error": ""})
            case other:
                raise AssertionError(f"a provider sent {other!r}")

    def _create(self, body: Mapping[str, Any], files: int) -> None:
        unsettled, listeners = self._lifecycle.create(body, files)
        try:
            self._send({"kind": "created", "id": body["id"], "unsettled": unsettled}, listeners)
        finally:
            for listener in listeners:
                os.close(listener)

    def _start_command(self, body: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Run a command; if its program cannot be executed, it ends as in a shell."""
        box = self._lifecycle.find(body["box"])
        box.may_run = True
        entries = self._tools.cgroups.open_entries(box.name)
        try:
            calls, new_process = command_process(self._tools, box, body, descriptors, entries)
            process = self._play(box, calls, new_process)
        finally:
            close_entries(entries)
        try:
            failed = how_it_failed(calls, body["argv"][0])
        except OSError:
            if 0 < process < NOT_MADE:
                os.waitpid(process, 0)
            raise
        running = self._watch(body, box, process)
        if failed is not None:
            message, running.code = failed
            os.write(descriptors[2], f"{message}\n".encode("utf-8", "surrogateescape"))

    def _play(self, box: SandboxRecord, calls: CallList, new_process: Result | None) -> int:
        """Make a command's calls in its sandbox's process namespace; return its number."""
        if new_process is not None:
            show_process()  # the previous command hid it; otherwise its files in /proc would belong to root
            os.waitpid(self._tools.player.play(calls), 0)
            return calls.result(new_process)
        enter(box.pidfd, CLONE_NEWPID)
        try:
            return self._tools.player.play(calls)
        finally:
            enter(self._own_processes, CLONE_NEWPID)

    def _start_job(self, body: Mapping[str, Any], source: int, answers: int) -> None:
        """Run a job inside; a copy of the written files goes to the folder ``into``."""
        if body["job"] == "kill":
            self._lifecycle.find(body["box"]).may_run = False
        if body["job"] != "copy":
            self._run(body, lambda box: become_job(box, self._tools, body, (source, -1, answers)))
            return
        box = self._lifecycle.find(body["box"])
        request = {**body, "overlays": box.overlays, "maps_range": self._tools.maps_range}
        users = os.open(f"/proc/{box.process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with MountBundle(users if self._tools.maps_range else None) as bundle:
                bundle.add(body["into"], 0, mapped=True)
                descriptors = (box.upper, bundle.trees[0], answers)
                self._run(request, lambda box: become_job(box, self._tools, request, descriptors))
        finally:
            os.close(users)

    def _kill(self, number: int) -> None:
        """End a command with its session, or a job."""
        running = self._running.get(number)
        if running is None or running.ender is not None:
            return  # it has ended or is about to end
        with suppress(ProcessLookupError):
            if running.is_job:
                running.timed_out, running.was_stopped = True, running.is_stopped()
                signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
                return
            request = {"id": -number, "box": running.box.number, "job": "end", "session": running.number_inside()}
            nothing = os.open(os.devnull, os.O_RDWR)
            try:
                self._start_job(request, nothing, nothing)
            finally:
                os.close(nothing)
            running.ender = self._running[-number]

    def _run(self, body: Mapping[str, Any], become: Callable[[SandboxRecord], NoReturn]) -> None:
        """Fork a process into a sandbox's process namespace; it enters the others by itself."""
        box = self._lifecycle.find(body["box"])
        process = _fork_into(box, self._own_processes) if self._tools.maps_range else _fork_through(box)
        if process == 0:
            self._selector.close()
            become(box)
        self._watch(body, box, process)

    def _watch(self, body: Mapping[str, Any], box: SandboxRecord, process: int) -> RunningCommand:
        running = RunningCommand(body["id"], box, process, is_job="job" in body)
        self._running[running.number] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ, lambda: self._reap(running))
        return running

    def _reap(self, running: RunningCommand) -> None:
        """Handle the end of a command or job; a command is finished once its descendants have ended too."""
        _, status = os.waitpid(running.process, 0)
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        code = os.waitstatus_to_exitcode(status) if running.code is None else running.code
        died = code == -signal.SIGKILL and running.box.is_dying()
        agents = running.is_job and code < 0 and not died and is_agents_doing(running, self._tools)
        running.end = {
            "kind": "ended",
            "id": running.number,
            "status": code,
            "sandbox_died": died,
            "agents_doing": agents,
        }
        for one in [running, *(other for other in self._running.values() if other.ender is running)]:
            if one.end is not None and (one.ender is None or one.ender.end is not None):
                del self._running[one.number]
                if one.number > 0:
                    self._send(one.end)

    def _tell_stats(self, body: Mapping[str, Any]) -> None:
        box = self._lifecycle.find(body["box"])
        disk = os.fstatvfs(box.upper)
        usage = self._tools.cgroups.usage(box.name)
        written = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        self._send({"kind": "stats", "id": body["id"], "disk_bytes": written, **usage._asdict()})

    def _send(self, body: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the reader is gone; the main loop will notice
            wire.send(self._control, body, descriptors)


def is_agents_doing(job: RunningCommand, tools: Tools) -> bool:
    """True if a process in the sandbox, not the machine, killed or delayed a job.

    That requires exhausted memory, or a process inside that may send the job signals: of the same user.
    """
    by_signal = job.box.may_run and (job.box.as_root or not tools.maps_range)
    if job.timed_out:
        return by_signal and job.was_stopped
    return by_signal or tools.cgroups.ran_out(job.box.name)


def _fork_into(box: SandboxRecord, own_processes: int) -> int:
    """Fork into a sandbox's process namespace by entering it briefly; returns twice, like ``fork``."""
    enter(box.pidfd, CLONE_NEWPID)
    process = -1
    try:
        process = os.fork()
    finally:
        if process != 0:
            enter(own_processes, CLONE_NEWPID)
    return process


def _fork_through(box: SandboxRecord) -> int:
    """Fork into a sandbox's process namespace through an intermediate child, with the launcher as the parent of the
    result.

    For launchers without root: they can enter a process namespace, but not return from it.
    """
    ours, theirs = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            enter(box.pidfd, CLONE_NEWPID)
            process = clone(CLONE_PARENT)
        except OSError:
            os._exit(1)
        if process != 0:
            os.write(theirs, str(process).encode())
            os._exit(0)
        return 0
    os.close(theirs)
    try:
        number = os.read(ours, PROCESS_NUMBER_BYTES)
    finally:
        os.close(ours)
        os.waitpid(between, 0)
    if not number:
        raise OSError(f"no process can be started in sandbox {box.number}")
    return int(number)


def enter_namespaces() -> bool:
    """Enter a new mount namespace, and a user namespace unless this is the machine's root; true if it is root.

    The machine's root needs no namespace here, as each sandbox gets a user namespace with other users: no sandbox may
    run as the machine's root, not even without capabilities, since files of the kernel check only the user.
    """
    user, group = os.geteuid(), os.getegid()
    is_root = user == 0 and _text("/proc/self/uid_map").split() == ALL_USERS
    unshare(CLONE_NEWNS | (0 if is_root else CLONE_NEWUSER))
    if not is_root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    return is_root


def open_bare_namespace(folder: Path) -> int:
    """Open a mount namespace without the host's mounts, the starting point of sandboxes."""
    folder.mkdir()

    def prepare() -> None:
        unshare(CLONE_NEWNS)
        make_bare_root(str(folder))

    with held_child(prepare, "no separate mount namespace can be made for sandboxes") as process:
        return _open(f"/proc/{process}/ns/mnt")


def main() -> None:
    """Serve one provider, whose socket's descriptor number is on the command line."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the provider handles a terminal's interrupt
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # three per sandbox
    gc.disable()  # memory that it touches would be copied in every child
    options = wire.MessageReceiver(control).receive()
    assert options is not None, "the provider disconnected before it sent its options"
    try:
        launcher = Launcher(control, options.body)
    except OSError as error:
        wire.send(control, wire.Grants(error=str(error), maps_range=False, controllers=[]))
        return
    gc.freeze()
    wire.send(control, launcher.grants)
    launcher.serve()


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    main()
