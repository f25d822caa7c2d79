"""Runs pip in a process that can start no other program; a script with pip's own arguments.

``--only-binary`` applies to packages from an index, but not to ``NAME @ URL``: pip runs such a package's own build
program as soon as it needs the metadata, and any wheel may have such a requirement. pip starts builds and git as
separate processes, so a process that cannot start another cannot build anything, whatever a package requires. A Python
audit hook cannot be removed. Imports nothing from étude.
"""

import runpy
import sys

STARTS = frozenset(
    {
        *("subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.forkpty"),
        "pty.spawn",
    }
)
"""Python's audit events for the start of a program."""
REFUSED = "no other program may be started beside pip"


def refuse(event: str, details: tuple[object, ...]) -> None:
    """Prevent the start of a program: raise the ``OSError`` class that a missing program raises."""
    if event in STARTS:
        raise OSError(f"{REFUSED}: {details[0] if details else event}")


if __name__ == "__main__":
    sys.addaudithook(refuse)
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
