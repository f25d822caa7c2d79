"""The URLs at which the processes of a fleet listen: each says so in the store of its region.

    processes/serve-1@eu/000000000003      http://10.9.1.2:40731      by its third start; the newest one counts

So nobody has to decide beforehand where a process runs, and who looks for one asks the store that is near to it, or
that of the region it asks about. An entry says where a process was started last, not that it lives: who calls it finds
out.

Owns these objects. On one machine a file does the same (:mod:`etude.run.endpoints`).
"""

from dataclasses import dataclass
from typing import final

from etude.errors import InfrastructureError
from etude.objects import Objects
from etude.run.process_name import ProcessName

PROCESSES = "processes"
"""Folder of a region's store."""
TRIES = 20
"""Times that an announcement is tried with the next number: two starts of one process can meet only by mistake."""


@final
@dataclass(frozen=True, slots=True)
class Directory:
    """The processes of one region."""

    objects: Objects

    def announce(self, name: ProcessName, url: str) -> None:
        """Say where a process listens from now on; older entries of it go."""
        for _ in range(TRIES):
            entries = self.objects.list(str(name))
            number = int(entries[-1].rpartition("/")[2]) + 1 if entries else 1
            key = f"{name}/{number:012d}"
            # On a cloud a retry may find the object that it created itself.
            if self.objects.put_if_absent(key, url.encode()) or self.objects.get(key) == url.encode():
                self.objects.delete(*entries)
                return
        raise InfrastructureError(f"{self.objects.url}: {name} is announced by other processes all the time")

    def urls(self, command: str) -> dict[ProcessName, str]:
        """The newest URL of each process of one command."""
        newest = {key.partition("/")[0]: key for key in self.objects.list("")}  # ascending: the last one counts
        names = {name: key for text, key in newest.items() if (name := ProcessName.parse(text)).command == command}
        urls = {name: self.objects.get(key) for name, key in sorted(names.items())}
        return {name: url.decode() for name, url in urls.items() if url is not None}
