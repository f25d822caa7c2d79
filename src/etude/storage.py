"""Storage failures of a machine, recognised in any library's exception.

Owns telling such an error from a bug of ours. What to do about it is the command line's and the supervisor's.
"""

import errno
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

FIXES: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "make room on that disk and run again",
        errno.EDQUOT: "make room within your quota and run again",
        errno.EIO: "its disk does not read or write; look into the system's log",
        errno.EROFS: "its disk is read-only; mount it to be written to",
    }
)
"""System error → what helps; any other one is a bug of ours."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""There is no room: what waits for it goes on."""

_RUST = re.compile(r"\(os error (\d+)\)")
"""The system's number, as safetensors and obstore quote it."""
_FULL_DATABASES = ("database or disk is full", "could not extend file", "No space left on device")
"""A full disk in the words of SQLite, of PostgreSQL and of libraries that quote the system without its number."""


def storage_errno(error: BaseException | None) -> int | None:
    """The errno of a storage failure, a key of :data:`FIXES`; ``None`` for any other error.

    Libraries say it in their own types: safetensors, obstore and SQLite raise no ``OSError``. So do we, of whatever
    made us raise: causes are looked at as well.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        number = error.errno if isinstance(error, OSError) else None
        quoted = _RUST.search(str(error))
        for code in (number, int(quoted[1]) if quoted else None):
            if code in FIXES:
                return code
        if any(words in str(error) for words in _FULL_DATABASES):
            return errno.ENOSPC
        error = error.__cause__ or error.__context__
    return None


def fullest(folders: Iterable[Path]) -> tuple[Path, int]:
    """The folder, of these and the one for temporary files, whose disk has the least free space, and that space.

    A path that is not there yet counts as the folder that it will be made in.
    """
    there = [_existing(folder) for folder in (*folders, Path(tempfile.gettempdir()))]
    return min(((folder, free_bytes(folder)) for folder in there), key=lambda pair: pair[1])


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
