"""Routing tables as objects of a run, and the shadow calls that gateways report.

    releases/routing/000000000012       SIGNATURE, the table as JSON        the highest number is valid
    releases/shadow/DIGEST/…            a ShadowCall as JSON

A table is written under its generation if there is none: of two writers that continue from the same table one wins, and
the other one reads again (compare and set). Tables are signed with a key of the run (HMAC-SHA256): someone with write
access to the bucket but no key cannot route users. They can delete tables, but processes that have one continue with
it.

This module owns these objects; :mod:`etude.releases` decides on their content.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, final

from etude.errors import InfrastructureError
from etude.gateway.routing.shadow import ShadowCall
from etude.objects import Objects, ObjectStore
from etude.routing_table import RoutingTable
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole

RELEASES = "releases"
"""The place of these objects, in the run folder or below its URL."""
ROUTING, SHADOWS = "routing", "shadow"
"""Folders below the place of releases."""
MOST_TABLES = 8
"""Number of retained tables: a follower reads the next number, and lists the tables if that is missing for long."""
FOLLOW_S = 0.1
"""Pause between two polls for the next table, which is part of the delay of a rollback."""
LIST_LOOKS = 50
"""Number of polls for the next number before all tables are listed: a suspended reader may have missed many."""

logger = logging.getLogger(__name__)


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
        """The valid table; ``None`` before the first."""
        for key in reversed(self.objects.list(ROUTING)):
            if (table := self._read(key)) is not None:
                return table
        return None

    def after(self, before: RoutingTable | None) -> RoutingTable | None:
        """A table newer than ``before``, if there is one."""
        self._looks += 1
        if before is None or self._looks % LIST_LOOKS == 0:
            newest = self.newest()
            return newest if newest is not None and newest.generation > (before.generation if before else 0) else None
        return self._read(_key(before.generation + 1))

    def write(self, table: RoutingTable) -> bool:
        """Make ``table`` the newest; false, without a change, if its generation exists already."""
        key, content = _key(table.generation), table.to_json()
        data = self._signature(key, content).encode() + b"\n" + content
        # On cloud storage a retry may find the object that it created itself.
        if not self.objects.put_if_absent(key, data) and self.objects.get(key) != data:
            return False
        self.objects.delete(*self.objects.list(ROUTING)[:-MOST_TABLES])
        return True

    def numbered_last(self, table: RoutingTable) -> RoutingTable:
        """The same table with the generation after all that exist: the object at its own is no table of this run, which
        is reported.
        """
        logger.error(
            "%s/%s is not a routing table of this run: look who wrote it, and remove it; the next table gets a later "
            "number, which takes seconds longer to reach users",
            self.objects.url,
            _key(table.generation),
        )
        names = (key.rpartition("/")[2] for key in self.objects.list(ROUTING))
        return replace(table, generation=1 + max(int(name) for name in names if name.isdecimal()))

    async def follow(self, receive: Callable[[RoutingTable], object]) -> None:
        """Pass each new table to ``receive``, forever; nothing while the store is unavailable, which is reported.

        consumes: tables; produces: calls of ``receive``; waits for: the next one; woken by: its own polling; on
        shutdown: cancelled between two polls.
        """
        table: RoutingTable | None = None
        is_away = False
        while True:
            try:
                newer = await asyncio.to_thread(self.after, table)
                if is_away:
                    logger.warning("routing tables can be read again")
                is_away = False
            except InfrastructureError as error:
                if not is_away:
                    logger.warning("routing tables cannot be read now, so the last one stays in use: %s", error)
                newer, is_away = None, True
            if newer is None:
                await asyncio.sleep(FOLLOW_S)
            else:
                table = newer
                receive(table)

    def add_shadow(self, call: ShadowCall) -> None:
        """Store a shadow's call."""
        key = f"{SHADOWS}/{call.digest}/{uuid.uuid4().hex}"
        self.objects.put_if_absent(key, json.dumps(asdict(call)).encode())

    def shadow_calls(self, digest: str, seen: dict[str, ShadowCall]) -> None:
        """Add to ``seen``, by their keys, the shadow calls of these weights that are not in it yet."""
        for key in self.objects.list(f"{SHADOWS}/{digest}"):
            if key not in seen and (data := self.objects.get(key)) is not None:
                fields: dict[str, Any] = json.loads(data)
                seen[key] = ShadowCall(**fields)

    def _read(self, key: str) -> RoutingTable | None:
        """The table under a key; ``None`` if there is none with a valid signature."""
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
