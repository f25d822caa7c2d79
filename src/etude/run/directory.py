"""The URLs of a fleet's processes: each process announces its URL in the store of its region.

    processes/serve-1@eu/000000000003      http://10.9.1.2:40731 SIGNATURE     by its third start; the newest is valid

So the location of a process need not be decided beforehand, and a caller reads the store nearby, or that of the
process's region. An entry has the URL of the last start, but does not show that the process is alive: the caller finds
out. A process that leaves for good announces that it has no URL.

Calls carry the run's keys, so an entry counts only if it was signed by a key of the run (HMAC-SHA256 over name, number
and URL): someone with write access to the bucket but no key can hide a process, but cannot redirect its calls.

This module owns these objects. On one machine a file does the same (:mod:`etude.run.endpoints`).
"""

import hashlib
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from etude.errors import InfrastructureError
from etude.objects import Objects
from etude.run.process_name import ProcessName

PROCESSES = "processes"
"""Folder of a region's store."""
KEY_FORM = re.compile(r"(?P<name>[^/]+)/(?P<number>[0-9]{12})")
TRIES = 20
"""Attempts to announce with the next number: two starts of one process only collide by mistake."""


@final
@dataclass(frozen=True, slots=True)
class Directory:
    """The processes of one region."""

    objects: Objects
    key: str = field(repr=False)
    """The run's key for entries."""
    _cache: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    """Key of an entry → its URL, ``None`` for an invalid one; entries never change."""

    def announce(self, name: ProcessName, url: str) -> None:
        """Announce the URL of a process and delete its older entries."""
        for _ in range(TRIES):
            entries = self.objects.list(str(name))
            newest = next((form for key in reversed(entries) if (form := KEY_FORM.fullmatch(key))), None)
            key = f"{name}/{int(newest['number']) + 1 if newest else 1:012d}"
            data = f"{url} {self._signature(key, url)}".encode()
            # On cloud storage a retry may find the object that it created itself.
            if self.objects.put_if_absent(key, data) or self.objects.get(key) == data:
                self.objects.delete(*entries)
                return
        raise InfrastructureError(f"{self.objects.url}: {name} keeps being announced by other processes")

    def withdraw(self, name: ProcessName, url: str) -> None:
        """Announce that a process has left, unless another start of it has announced another URL."""
        if self.urls(name.command).get(name) == url:
            self.announce(name, "")  # not deleted: numbers only increase, as readers remember entries

    def urls(self, command: str) -> dict[ProcessName, str]:
        """The newest URL of each process of one command; entries without a valid signature are ignored."""
        entries, newest = [*self._entries(command)], dict[ProcessName, str]()
        for key in self._cache.keys() - {key for _, key in entries}:
            del self._cache[key]
        for name, key in entries:
            if key not in self._cache:
                self._cache[key] = self._read(key)
            if (url := self._cache[key]) is not None:
                newest[name] = url
        return {name: url for name, url in sorted(newest.items()) if url}

    def _entries(self, command: str) -> Iterator[tuple[ProcessName, str]]:
        """The entries of one command, ascending."""
        for key in self.objects.list(""):
            form = KEY_FORM.fullmatch(key)
            try:
                name = ProcessName.parse(form["name"]) if form else None
            except ValueError:
                continue
            if name is not None and name.command == command:
                yield name, key

    def _read(self, key: str) -> str | None:
        url, _, signature = (self.objects.get(key) or b"").decode(errors="replace").partition(" ")
        return url if hmac.compare_digest(signature.encode(), self._signature(key, url).encode()) else None

    def _signature(self, key: str, url: str) -> str:
        return hmac.new(self.key.encode(), f"{key} {url}".encode(), hashlib.sha256).hexdigest()
