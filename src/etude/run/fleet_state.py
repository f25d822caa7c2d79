"""The desired and the observed state of a run's fleet, as objects in its stores: nobody calls anybody to place things.

    HOME'S STORE/fleet/desired/00000003           what is to run, in all regions; the newest generation counts
    REGION'S STORE/fleet/desired/00000003         the region's copy, for as long as home is out of reach
    REGION'S STORE/fleet/observed/000000000042    what its supervisor saw last
    REGION'S STORE/fleet/drained/serve-1@eu       a process that is not to run

Desired state names programs, so it counts only if it was signed by a key of the run (HMAC-SHA256 over number and data):
who may write to a bucket but has no key can have processes drained, and none started.

- consumes: home's desired state and the region's drained names, every ``FOLLOW_S``, on threads of their own: a store
  that is away holds up no supervisor
- produces: observed state, when something changed and every ``OBSERVE_S``
- on shutdown: nothing is left to do
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
from etude.errors import InfrastructureError, RunFolderError
from etude.fleet.specs import ProcessStatus
from etude.fleet.state import Desired, Observed
from etude.objects import Objects
from etude.run.machine_info import versions

FLEET_FOLDER = "fleet"
"""Folder of a store with the state of the fleet."""
DESIRED, OBSERVED, DRAINED = "desired", "observed", "drained"
FOLLOW_S = 2.0
OBSERVE_S = 10.0
"""Longest time between two observations: an older one says that nobody looks."""
TRIES = 20
"""Times that a generation is tried with the next number."""

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class FleetObjects:
    """The state of a fleet in one store."""

    objects: Objects
    key: str = field(repr=False)
    """The run's key for desired state."""

    def generation(self) -> int:
        """The newest number of a desired state; 0 for none."""
        return max((int(key.rpartition("/")[2]) for key in self.objects.list(DESIRED)), default=0)

    def desired(self, generation: int) -> Desired:
        """The desired state of a number. Raises :class:`~etude.errors.RunFolderError` for one that does not count."""
        name = f"{DESIRED}/{generation:08d}"
        signature, _, data = (self.objects.get(name) or b"").partition(b"\n")
        if not hmac.compare_digest(signature, self._signature(generation, data)):
            raise RunFolderError(f"{self.objects.url}/{name} is not signed with the key of this run: remove it")
        try:
            return Desired.parse(data)
        except ValueError as error:
            raise RunFolderError(f"{self.objects.url}/{name} is of another étude: {error}") from error

    def declare(self, desired: Desired) -> int:
        """Make a desired state the newest one, if it is not; returns its generation."""
        for _ in range(TRIES):
            newest = self.generation()
            if newest and self.desired(newest) == desired:
                return newest
            self.copy(newest + 1, desired)
        raise InfrastructureError(f"{self.objects.url}: the desired state is changed by others all the time")

    def copy(self, generation: int, desired: Desired) -> None:
        """Put a desired state under its number, unless there is one."""
        data = desired.dump()
        signed = self._signature(generation, data) + b"\n" + data
        self.objects.put_if_absent(f"{DESIRED}/{generation:08d}", signed)

    def drain(self, name: str) -> None:
        """Let a process end, and not be placed again."""
        self.objects.put_if_absent(f"{DRAINED}/{name}", b"")

    def undrain(self, name: str) -> None:
        """Let it be placed again."""
        self.objects.delete(f"{DRAINED}/{name}")

    def drained(self) -> frozenset[str]:
        """All that are drained."""
        return frozenset(key.removeprefix(f"{DRAINED}/") for key in self.objects.list(DRAINED))

    def observe(self, observed: Observed) -> None:
        """Say what is seen; older observations go."""
        older = self.objects.list(OBSERVED)
        number = int(older[-1].rpartition("/")[2]) + 1 if older else 1
        if self.objects.put_if_absent(f"{OBSERVED}/{number:012d}", observed.dump()):
            self.objects.delete(*older)

    def observed(self) -> tuple[Observed, float] | None:
        """The newest observation, and its age in seconds by the storage's clock; ``None`` before there is any."""
        entries = self.objects.entries(OBSERVED)
        data = self.objects.get(entries[-1].key) if entries else None
        if data is None:
            return None
        try:
            return Observed.parse(data), self.objects.now() - entries[-1].modified_s
        except ValueError as error:
            raise RunFolderError(f"{self.objects.url}/{entries[-1].key} is of another étude: {error}") from error

    def _signature(self, generation: int, data: bytes) -> bytes:
        signed = b"%d\n%s" % (generation, data)
        return hmac.new(self.key.encode(), signed, hashlib.sha256).hexdigest().encode()


@final
class FleetState(Closing):
    """The state of a fleet, as one supervisor follows it and adds to it."""

    def __init__(self, own: FleetObjects, home: FleetObjects | None = None) -> None:
        """``own`` is in the store of the supervisor's region; ``home`` in home's, where that is another one."""
        self.own = own
        self._home = home
        self.drained: frozenset[str] = frozenset()
        """Processes that are not to run."""
        self.generation = 0
        self.desired: Desired | None = None
        """The newest desired state that was found."""
        self._taken = 0
        self._seen: Observed | None = None
        self._written: Observed | None = None
        self._versions = versions()
        self._age_s = 0.0
        self._closed = Signal()
        self._threads = [self._thread("near", self.follow_near), self._thread("desired", self.follow_desired)]

    def start(self) -> None:
        """Follow from now on, until closed; what is drained is known at once, if its store answers."""
        with suppress(InfrastructureError):
            self.follow_near()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Follow no longer; a store that does not answer is not waited for."""
        self._closed.set()

    def changed(self) -> Desired | None:
        """The newest desired state, once."""
        if self.desired is None or self.generation == self._taken:
            return None
        self._taken = self.generation
        return self.desired

    def report(self, statuses: Mapping[str, ProcessStatus]) -> None:
        """Let people know what is seen."""
        host = os.uname().nodename
        self._seen = Observed(generation=self._taken, host=host, statuses=statuses, versions=self._versions)

    def follow_near(self) -> None:
        """Read and write what lies in the region's own store, once. Raises as that does."""
        self.drained = self.own.drained()
        self._age_s += FOLLOW_S
        seen = self._seen
        if seen is not None and (
            self._written is None or seen.shape != self._written.shape or self._age_s >= OBSERVE_S
        ):
            self.own.observe(seen)
            self._written, self._age_s = seen, 0.0

    def follow_desired(self) -> None:
        """Look for a newer desired state at home, or, where that is away, among the region's copies, once."""
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
        """Take over the newest desired state of a store; true if it is a newer one."""
        generation = source.generation()
        if generation <= self.generation:
            return False
        self.desired, self.generation = source.desired(generation), generation
        return True

    def _thread(self, name: str, turn: Callable[[], None]) -> Thread:
        return Thread(target=self._work, args=(turn,), name=f"fleet state: {name}", daemon=True)

    def _work(self, turn: Callable[[], None]) -> None:
        """Take turns; what fails is told once, and tried again."""
        has_failed = False
        while not self._closed.wait(FOLLOW_S):
            try:
                turn()
                has_failed = False
            except (InfrastructureError, RunFolderError) as error:
                if not has_failed:
                    logger.warning("the state of the fleet is not followed: %s", error)
                has_failed = True
