"""Routing tables as objects of a run, and what gateways tell of a shadow.

    releases/routing/000000000012       SIGNATURE, the table as JSON        the highest number counts
    releases/shadow/DIGEST/…            a ShadowCall as JSON

A table is written under its generation if there is none: of two writers who go on from the same table one wins, and the
other one looks again (compare and set). It is signed by a key of the run (HMAC-SHA256), so that who may write to a
bucket but has no key can route no user anywhere; he can delete tables, and those who have one keep it.

Owns these objects. What is in them is decided in :mod:`etude.releases`.
"""

import asyncio
import hashlib
import hmac
import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, final

from etude.errors import InfrastructureError
from etude.gateway.routing.shadow import ShadowCall
from etude.objects import Objects, ObjectStore
from etude.routing_table import RoutingTable
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole

RELEASES = "releases"
"""The place of all this, in the run folder or below its URL."""
ROUTING, SHADOWS = "routing", "shadow"
"""Folders below the place of releases."""
MOST_TABLES = 8
"""Tables that are kept: who follows them reads the next number, and lists where it is missing for long."""
FOLLOW_S = 0.1
"""Pause between two looks for the next table: a part of the time in which a rollback reaches users."""
LIST_LOOKS = 50
"""Looks for the next number, after which it is seen if there are later ones: a reader may have slept through many."""


@final
@dataclass(slots=True)
class RoutingTables:
    """The routing tables of one run."""

    objects: Objects
    key: str = field(repr=False)
    """The run's key for tables."""
    _looks: int = 0

    @classmethod
    def open(cls, folder: RunFolder) -> "RoutingTables":
        """The tables of a run."""
        return cls(ObjectStore(f"{folder.url or folder.path.absolute()}/{RELEASES}"), folder.key(KeyRole.ROUTING))

    def newest(self) -> RoutingTable | None:
        """The table that counts; ``None`` before the first."""
        for key in reversed(self.objects.list(ROUTING)):
            if (table := self._read(key)) is not None:
                return table
        return None

    def after(self, before: RoutingTable | None) -> RoutingTable | None:
        """A table that came after ``before``, if there is one."""
        self._looks += 1
        if before is None or self._looks % LIST_LOOKS == 0:
            newest = self.newest()
            return newest if newest is not None and newest.generation > (before.generation if before else 0) else None
        return self._read(_key(before.generation + 1))

    def write(self, table: RoutingTable) -> bool:
        """Make ``table`` the newest; false, and nothing changes, where another one has its generation."""
        key, content = _key(table.generation), table.to_json()
        data = self._signature(key, content).encode() + b"\n" + content
        # On a cloud a retry may find the object that it created itself.
        if not self.objects.put_if_absent(key, data) and self.objects.get(key) != data:
            return False
        self.objects.delete(*self.objects.list(ROUTING)[:-MOST_TABLES])
        return True

    async def follow(self, receive: Callable[[RoutingTable], object]) -> None:
        """Hand out each new table, for ever; while the store is away, nothing.

        consumes: tables; produces: calls of ``receive``; waits for: the next one; woken by: its own polling; on
        shutdown: cancelled between two polls.
        """
        table: RoutingTable | None = None
        while True:
            try:
                newer = await asyncio.to_thread(self.after, table)
            except InfrastructureError:
                newer = None
            if newer is None:
                await asyncio.sleep(FOLLOW_S)
            else:
                table = newer
                receive(table)

    def add_shadow(self, call: ShadowCall) -> None:
        """Keep what came of a shadow's call."""
        key = f"{SHADOWS}/{call.digest}/{uuid.uuid4().hex}"
        self.objects.put_if_absent(key, json.dumps(asdict(call)).encode())

    def shadow_calls(self, digest: str, seen: dict[str, ShadowCall]) -> None:
        """Add to ``seen``, by their keys, the shadow calls of these weights that are not there yet."""
        for key in self.objects.list(f"{SHADOWS}/{digest}"):
            if key not in seen and (data := self.objects.get(key)) is not None:
                fields: dict[str, Any] = json.loads(data)
                seen[key] = ShadowCall(**fields)

    def _read(self, key: str) -> RoutingTable | None:
        """The table under a key; ``None`` where there is none that a process of the run wrote."""
        signature, _, content = (self.objects.get(key) or b"").partition(b"\n")
        if not hmac.compare_digest(signature, self._signature(key, content).encode()):
            return None
        try:
            return RoutingTable.from_json(content)
        except ValueError:
            return None

    def _signature(self, key: str, content: bytes) -> str:
        return hmac.new(self.key.encode(), key.encode() + b" " + content, hashlib.sha256).hexdigest()


def _key(generation: int) -> str:
    return f"{ROUTING}/{generation:012d}"
