"""What each kind of fault does to a run: signals, links, locks, the machine, bytes on disk.

A fault is a context: what is wrong is wrong while it is open. Entering it raises :class:`NoVictim` while there is
nobody for it. When faults come and go is decided by :mod:`bench.faults.chaos_run`.
"""

import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, final

from bench.faults.database import Database
from bench.faults.evidence import locked_ledger
from bench.faults.link import Link, Weather
from bench.faults.machine import Machine
from bench.faults.schedule import Fault, Kind
from bench.faults.supervisor import Supervisor
from bench.usage import age_s, command_line, descendants
from etude.errors import RunFolderError
from etude.run.folder import RunFolder
from etude.run.process_name import ProcessName

SUPERVISOR, ROLLOUTS = "run", "rollouts"
"""Commands of processes."""
SIGNALS: Mapping[Kind, tuple[str, signal.Signals]] = MappingProxyType(
    {
        Kind.KILL_ENGINE: ("serve", signal.SIGKILL),
        Kind.KILL_GATEWAY: ("gateway", signal.SIGKILL),
        Kind.KILL_ROLLOUTS: (ROLLOUTS, signal.SIGKILL),
        Kind.KILL_TRAINER: ("train", signal.SIGKILL),
        Kind.HANG_SUPERVISOR: (SUPERVISOR, signal.SIGSTOP),
        Kind.HANG_ENGINE: ("serve", signal.SIGSTOP),
        Kind.HANG_GATEWAY: ("gateway", signal.SIGSTOP),
        Kind.HANG_ROLLOUTS: (ROLLOUTS, signal.SIGSTOP),
        Kind.HANG_TRAINER: ("train", signal.SIGSTOP),
    }
)
"""Kind → the command of the process it happens to, and the signal."""
PROCESSES = ("serve", "gateway", ROLLOUTS, "train")
"""Commands of the processes that a supervisor looks after."""
SANDBOX_SIGNALS: Mapping[Kind, signal.Signals] = MappingProxyType(
    {Kind.KILL_SANDBOX: signal.SIGKILL, Kind.HANG_SANDBOX: signal.SIGSTOP}
)
WEATHERS: Mapping[Kind, tuple[str, Weather]] = MappingProxyType(
    {
        Kind.GATEWAY_5XX: ("gateway", Weather.REFUSING),
        Kind.GATEWAY_RESET: ("gateway", Weather.BREAKING),
        Kind.GATEWAY_STALL: ("gateway", Weather.STALLING),
        Kind.ENGINE_5XX: ("serve", Weather.REFUSING),
        Kind.ENGINE_RESET: ("serve", Weather.BREAKING),
        Kind.ENGINE_STALL: ("serve", Weather.STALLING),
    }
)
"""Kind → the link it happens to, named after the process behind it, and how that is."""
SANDBOX = "etude.sandboxes"
"""Stands in the command line of a sandbox's worker and of what it forks commands from."""
ROOM_BYTES = 20_000
"""Most bytes that still fit on a disk that is about to be full."""
SLOW_S = (0.02, 0.2)
"""Duration of each access to slow storage."""
JUMP_S = (1.0, 2 * 86_400.0)
"""Jump of the clocks, forward or back."""
STORED = ("commits", "packs", "layouts", "links")
"""Folders of the weight store with objects that count."""
LAUNCH_S = 0.1
"""Longest time from the making of a process's heartbeat file to its start."""
GARBAGE_BYTES = 500
"""Bytes after a log's last whole frame, as left by a machine that lost power."""

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The parts around the processes of one run that can fail."""

    machine: Machine
    links: Mapping[str, Link]
    """By the process behind each."""
    database: Database | None
    """The server of its ledger; ``None`` where that is a file."""


class NoVictim(Exception):
    """There is nothing that the fault could happen to, at the moment."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that was changed behind everyone's back, and how it was before."""

    path: Path
    sound: bytes
    damaged: bytes

    def undo(self) -> None:
        """Restore the sound bytes; data appended after a change stays.

        A file that was cut and has grown since is left alone: a run at a URL has fetched the part that it had sent, and
        another process has continued after the cut.
        """
        with suppress(FileNotFoundError):
            result = self.path.read_bytes()
            was_cut = self.sound.startswith(self.damaged)
            if result == self.damaged or (not was_cut and result.startswith(self.damaged)):
                self.path.write_bytes(self.sound + result[len(self.damaged) :])

    def is_named(self, message: str) -> bool:
        """True if an error names its file."""
        return self.path.name[:12] in message or self.path.parent.name in message


@final
class Injector:
    """Lets faults happen to one run."""

    def __init__(self, folder: RunFolder, site: Site, supervisor: Supervisor) -> None:
        self._folder = folder
        self._site = site
        self._supervisor = supervisor

    def begin(self, fault: Fault) -> AbstractContextManager[None]:
        """A fault of a run that is up; what happens to files of one that is down is :meth:`damage`'s."""
        kind, pick = fault.kind, fault.pick
        if kind in SIGNALS:
            command, number = SIGNALS[kind]
            return self._signalled(lambda: self._pid(command), number)
        if kind in SANDBOX_SIGNALS:
            return self._signalled(lambda: picked(self._sandbox_pids(), pick), SANDBOX_SIGNALS[kind])
        if kind in WEATHERS:
            link, weather = WEATHERS[kind]
            return self._site.links[link].disturbed(weather, pick)
        match kind:
            case Kind.FREEZE:
                return self._signalled(lambda: self._beating_pid(picked(PROCESSES, pick)), signal.SIGSTOP)
            case Kind.STORE_ERROR:
                return self._site.machine.ill_store()
            case Kind.STORE_SLOW:
                return self._site.machine.slow_store(SLOW_S[0] + pick * (SLOW_S[1] - SLOW_S[0]))
            case Kind.DISK_FULL:
                return self._site.machine.full_disk(int(pick * ROOM_BYTES))
            case Kind.CLOCK_JUMP:
                return self._site.machine.jumped_clock(jump_s(pick))
            case Kind.LEDGER_LOCK:
                return locked_ledger(self._folder)
            case Kind.LEDGER_CUT:
                return self._server().cut()
            case Kind.LEDGER_DOWN:
                return self._server().down()
        raise AssertionError(f"{kind} does not happen to a run that is up")

    def keep_up(self) -> None:
        """Let connections go through the links, wherever the run listens since it was resumed."""
        with suppress(RunFolderError, OSError, ValueError, KeyError):
            for number, (name, link) in enumerate(self._site.links.items()):
                port = self._folder.endpoints.port(ProcessName.parse(name))
                if port != link.target:
                    link.target = port
                    self._site.machine.lead(number, port, link.port)

    def damage(self, fault: Fault) -> Damage | None:
        """Change a file of a run that is down, or remove all that it has on this machine, which is not undone.

        Raises :class:`NoVictim`.
        """
        draw = random.Random(fault.pick)
        path = picked(damageable(self._folder, fault.kind), fault.pick)
        if fault.kind is Kind.LOSE_DISK:
            shutil.rmtree(self._folder.path)
            return None
        sound = path.read_bytes()
        if fault.kind is Kind.DAMAGE_SIDECAR and path.name.endswith("-wal"):
            damaged = sound + draw.randbytes(GARBAGE_BYTES)
        elif draw.random() < 0.5:
            place = draw.randrange(len(sound))
            damaged = sound[:place] + bytes([sound[place] ^ 1 << draw.randrange(8)]) + sound[place + 1 :]
        else:
            damaged = sound[: draw.randrange(1, len(sound))]
        path.write_bytes(damaged)
        return Damage(path, sound, damaged)

    @contextmanager
    def _signalled(self, victim: Callable[[], int], number: signal.Signals) -> Iterator[None]:
        """Send a signal; a stopped process continues afterwards if it is still alive."""
        pid = victim()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise NoVictim from None
        yield
        if number is signal.SIGSTOP:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _server(self) -> Database:
        assert self._site.database is not None, "planned for a run whose ledger is in a file"
        return self._site.database

    def _pid(self, command: str) -> int:
        """The process of the run that runs ``command``."""
        if command == SUPERVISOR:
            return self._supervisor.pid
        words = ["-m", "etude", command]
        result = [pid for pid in descendants(self._supervisor.pid) if command_line(pid)[1:4] == words]
        return picked(result, 0.0)

    def _beating_pid(self, command: str) -> int:
        """The same, after its first heartbeat: a starting process may be silent for much longer."""
        pid, beat = self._pid(command), self._folder.path / f".{command}.beat"
        with suppress(FileNotFoundError, ProcessLookupError):
            if time.time() - beat.stat().st_mtime < age_s(pid) - LAUNCH_S:
                return pid
        raise NoVictim

    def _sandbox_pids(self) -> list[int]:
        return [pid for pid in descendants(self._pid(ROLLOUTS)) if any(SANDBOX in word for word in command_line(pid))]


def damageable(folder: RunFolder, kind: Kind) -> list[Path]:
    """The files that this could happen to, were the run down now, in an order that a seed can rely on."""
    match kind:
        case Kind.DAMAGE_CHECKPOINT:
            newest = max(folder.checkpoints.glob("step-*"), default=folder.checkpoints)
            result = list(newest.rglob("*"))
        case Kind.DAMAGE_EVENTS:
            result = list(folder.events.glob("*.jsonl"))
        case Kind.LOSE_DISK:
            result = [folder.config_file]
        case Kind.DAMAGE_SIDECAR:
            result = list(folder.path.glob("ledger.db-*"))
        case _:
            store = Path(folder.store)
            result = [path for name in STORED for path in (store / name).rglob("*")]
    return sorted(path for path in result if _size_bytes(path) > 1)


def jump_s(pick: float) -> float:
    """Jump of the clock: seconds to days, uniform in the logarithm, forward or back."""
    back, far = (pick < 0.5), (pick * 2) % 1.0
    seconds = JUMP_S[0] * math.exp(far * math.log(JUMP_S[1] / JUMP_S[0]))
    return -seconds if back else seconds


def _size_bytes(path: Path) -> int:
    """Size of a file; 0 if it does not exist."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def picked(victims: Sequence[Choice], pick: float) -> Choice:
    """The victim that a ``pick`` in [0, 1) names. Raises :class:`NoVictim` for none."""
    if not victims:
        raise NoVictim
    return victims[int(pick * len(victims))]
