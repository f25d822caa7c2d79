"""The desired and the observed state of a run's fleet, as objects in its stores, so that placement needs no calls
between processes.

    HOME'S STORE/fleet/desired/00000003           the processes of all regions; the newest generation is valid
    REGION'S STORE/fleet/desired/00000003         the region's copy, used while home is unreachable
    REGION'S STORE/fleet/observed/000000000042    its supervisor's last observation
    REGION'S STORE/fleet/drained/serve-1@eu       a process that must not run

Desired state names programs, so it is valid only if signed with a key of the run (HMAC-SHA256 over number and data):
someone with write access to the bucket but no key can drain processes, but not start any.

- consumes: home's desired state and the region's drained names, every ``FOLLOW_S``, on separate threads: an
  unavailable store does not block the supervisor
- produces: observed state, on a change and every ``OBSERVE_S``
- on shutdown: nothing to do
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event as Signal
from threading import Thread
from typing import final

from etude.closing import Closing
from etude.errors import EtudeError, InfrastructureError, RunFolderError
from etude.fleet.specs import ProcessStatus
from etude.fleet.state import Desired, Observed
from etude.objects import Objects
from etude.run.machine_info import versions

FLEET_FOLDER = "fleet"
"""Folder in a store for the state of the fleet."""
DESIRED, OBSERVED, DRAINED = "desired", "observed", "drained"
FOLLOW_S = 2.0
OBSERVE_S = 10.0
"""Longest time between two observations: an older one means that no supervisor is running."""
TRIES = 20
"""Attempts to declare a generation, each with the next number."""

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class FleetObjects:
    """The state of a fleet in one store."""

    objects: Objects
    key: str = field(repr=False)
    """The run's key for desired state."""

    def generation(self) -> int:
        """The newest generation of desired state; 0 for none."""
        return max(map(_number, self.objects.list(DESIRED)), default=0)

    def desired(self, generation: int) -> Desired:
        """The desired state of a generation. Raises :class:`~etude.errors.RunFolderError` if it is not valid."""
        name = f"{DESIRED}/{generation:08d}"
        signature, _, data = (self.objects.get(name) or b"").partition(b"\n")
        if not hmac.compare_digest(signature, self._signature(generation, data)):
            raise RunFolderError(f"{self.objects.url}/{name} is not signed with the key of this run: remove it")
        try:
            return Desired.parse(data)
        except ValueError as error:
            raise RunFolderError(f"{self.objects.url}/{name} is from another version of étude: {error}") from error

    def declare(self, desired: Desired) -> int:
        """Make ``desired`` the newest generation, unless it is; returns its number."""
        for _ in range(TRIES):
            newest = self.generation()
            if newest and self.desired(newest) == desired:
                return newest
            self.copy(newest + 1, desired)
        raise InfrastructureError(f"{self.objects.url}: other processes keep changing the desired state")

    def copy(self, generation: int, desired: Desired) -> None:
        """Store a desired state under its generation, unless that exists."""
        data = desired.dump()
        signed = self._signature(generation, data) + b"\n" + data
        self.objects.put_if_absent(f"{DESIRED}/{generation:08d}", signed)

    def drain(self, name: str) -> None:
        """Mark a process to end and not to be placed again."""
        self.objects.put_if_absent(f"{DRAINED}/{name}", b"")

    def undrain(self, name: str) -> None:
        """Allow a process to be placed again."""
        self.objects.delete(f"{DRAINED}/{name}")

    def drained(self) -> frozenset[str]:
        """Names of all drained processes."""
        return frozenset(key.removeprefix(f"{DRAINED}/") for key in self.objects.list(DRAINED))

    def observe(self, observed: Observed) -> None:
        """Store an observation and delete older ones."""
        older = [key for key in self.objects.list(OBSERVED) if _number(key)]
        number = 1 + max(map(_number, older), default=0)
        if self.objects.put_if_absent(f"{OBSERVED}/{number:012d}", observed.dump()):
            self.objects.delete(*older)

    def observed(self) -> tuple[Observed, float] | None:
        """The newest observation, and its age in seconds by the storage's clock; ``None`` if there is none yet."""
        entries = [entry for entry in self.objects.entries(OBSERVED) if _number(entry.key)]
        data = self.objects.get(entries[-1].key) if entries else None
        if data is None:
            return None
        try:
            return Observed.parse(data), self.objects.now() - entries[-1].modified_s
        except ValueError as error:
            raise RunFolderError(f"{self.objects.url}/{entries[-1].key}, of another étude version: {error}") from error

    def _signature(self, generation: int, data: bytes) -> bytes:
        signed = b"%d\n%s" % (generation, data)
        return hmac.new(self.key.encode(), signed, hashlib.sha256).hexdigest().encode()


@final
class FleetState(Closing):
    """The state of a fleet, as one supervisor follows it and adds to it."""

    def __init__(self, own: FleetObjects, home: FleetObjects | None = None) -> None:
        """``own`` is in the store of the supervisor's region; ``home`` is in home's store, if that is a different
        region.
        """
        self.own = own
        self._home = home
        self.drained: frozenset[str] = frozenset()
        """Processes that must not run."""
        self.generation = 0
        self.desired: Desired | None = None
        """The newest desired state read so far."""
        self._taken = 0
        self._seen: Observed | None = None
        self._written: Observed | None = None
        self._versions = versions()
        self._age_s = 0.0
        self._closed = Signal()
        self._threads = [self._thread("near", self.follow_near), self._thread("desired", self.follow_desired)]

    def start(self) -> None:
        """Start to follow the state, until closed; drained processes are read at once, if the store answers."""
        with suppress(InfrastructureError):
            self.follow_near()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop following, without waiting for a store that does not answer."""
        self._closed.set()

    def changed(self) -> Desired | None:
        """The newest desired state, returned once; ``None`` if there is no new one."""
        if self.desired is None or self.generation == self._taken:
            return None
        self._taken = self.generation
        return self.desired

    def report(self, statuses: Mapping[str, ProcessStatus]) -> None:
        """Publish the observed statuses."""
        host = os.uname().nodename
        self._seen = Observed(generation=self._taken, host=host, statuses=statuses, versions=self._versions)

    def follow_near(self) -> None:
        """Read and write the region's own store once. Raises as the store does."""
        self.drained = self.own.drained()
        self._age_s += FOLLOW_S
        seen = self._seen
        if seen is not None and (
            self._written is None or seen.shape != self._written.shape or self._age_s >= OBSERVE_S
        ):
            self.own.observe(seen)
            self._written, self._age_s = seen, 0.0

    def follow_desired(self) -> None:
        """Look once for a newer desired state at home or, if home is unavailable, among the region's copies."""
        if self._home is None:
            self._take(self.own)
            return
        try:
            if self._take(self._home) and self.desired is not None:
                self.own.copy(self.generation, self.desired)
        except InfrastructureError:
            if self.desired is None:
                self._take(self.own)
            raise

    def _take(self, source: FleetObjects) -> bool:
        """Load the newest desired state of a store; true if it is newer than the current one."""
        generation = source.generation()
        if generation <= self.generation:
            return False
        self.desired, self.generation = source.desired(generation), generation
        return True

    def _thread(self, name: str, turn: Callable[[], None]) -> Thread:
        return Thread(target=self._work, args=(turn,), name=f"fleet state: {name}", daemon=True)

    def _work(self, turn: Callable[[], None]) -> None:
        """Run ``turn`` repeatedly; a failure is reported once and retried."""
        has_failed = False
        while not self._closed.wait(FOLLOW_S):
            try:
                turn()
                has_failed = False
            except Exception as error:  # the thread must go on: without it no change reaches the fleet
                if not has_failed:
                    is_known = isinstance(error, EtudeError)
                    logger.warning("the state of the fleet cannot be read: %s", error, exc_info=not is_known)
                has_failed = True


def _number(key: str) -> int:
    """The number in the name of an object; 0 for another object, which somebody else put there."""
    name = key.rpartition("/")[2]
    return int(name) if name.isdecimal() else 0
