"""Runs pip in a process that can start no other program; a script with pip's own arguments.

``--only-binary`` holds for what pip finds in an index, and not for ``NAME @ URL``: what such a line names is built,
by a program of its own, as soon as its metadata are wanted, and any wheel may have such a line. pip starts whatever it
does not do itself, builds and git alike, as another process. So a process that can start none can build nothing,
whatever a package says. A hook of Python's audit cannot be taken away again. Imports nothing of étude.
"""

import runpy
import sys

STARTS = frozenset(
    {
        *("subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "os.forkpty"),
        "pty.spawn",
    }
)
"""Names of Python's audit events for starting a program."""
REFUSED = "no other program may be started beside pip"


def refuse(event: str, details: tuple[object, ...]) -> None:
    """Refuse to start a program, with the ``OSError`` of one that does not exist."""
    if event in STARTS:
        raise OSError(f"{REFUSED}: {details[0] if details else event}")


if __name__ == "__main__":
    sys.addaudithook(refuse)
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
