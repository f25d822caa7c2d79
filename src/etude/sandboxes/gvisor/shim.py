"""A layer that makes ``ls`` and ``stat`` work on a runtime that is older than they are.

Those of GNU coreutils 9 pass ``AT_NO_AUTOMOUNT`` to ``statx``; the ``runsc`` of 2022 that Debian 12 has calls that an
invalid argument. There are no automounts in a sandbox, so a library that every program loads first takes the flag out.
Owns that library and nothing else; whether it is needed is found out by trying
(:mod:`etude.sandboxes.gvisor.provider`).
"""

import subprocess
from pathlib import Path

LIBRARY = "etc/statx.so"
SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

struct statx;

int statx(int folder, const char *restrict path, int flags, unsigned int mask, struct statx *restrict found) {
    return (int)syscall(SYS_statx, folder, path, flags & ~AT_NO_AUTOMOUNT, mask, found);
}
"""
COMPILE_TIMEOUT_S = 60.0


def build_shim(layer: Path) -> bool:
    """Make the layer, which must be an empty folder. False, and it stays empty, if there is no C compiler."""
    library = layer / LIBRARY
    library.parent.mkdir()
    line = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(library), "-"]
    try:
        subprocess.run(line, input=SOURCE, text=True, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        library.unlink(missing_ok=True)
        library.parent.rmdir()
        return False
    library.chmod(0o755)
    preload = layer / "etc" / "ld.so.preload"
    preload.write_text(f"/{LIBRARY}\n", encoding="utf-8")
    preload.chmod(0o644)
    library.parent.chmod(0o755)
    return True
