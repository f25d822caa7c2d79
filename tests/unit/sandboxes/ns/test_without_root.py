"""Namespaces made by a user who is not root: the guarantees that remain."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import etude

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="we have no root to give up")

UNPRIVILEGED = """
import asyncio, sys
from pathlib import Path
from etude.sandboxes.ns.provider import NamespaceSandboxes
async def main():
    provider = NamespaceSandboxes(scratch=Path(sys.argv[1]))
    print(sorted(await provider.capabilities()))
    sandbox = await provider.create({"a": "given"})
    result = await sandbox.exec(["sh", "-c", "id -u; cat a; echo x > /etc/x; echo y > b; cat /proc/self/uid_map"])
    print(result.stdout, result.stderr.count("Read-only"))
    (fork,) = await sandbox.fork()
    print((await fork.exec(["cat", "b"])).stdout)
    await provider.close()
asyncio.run(main())
"""


SPYING = """
import asyncio, sys
from pathlib import Path
from etude.sandboxes.ns.provider import NamespaceSandboxes
SPY = '''
import os
with open("seen", "a", buffering=1) as seen:
    print("watching", file=seen)
    while True:
        for process in filter(str.isdecimal, os.listdir("/proc")):
            if process == str(os.getpid()):
                continue
            try:
                with open(f"/proc/{process}/mem", "rb"), open(f"/proc/{process}/cmdline", "rb") as line:
                    if b"etude" in line.read():
                        print(process, file=seen)
            except OSError:
                pass
'''
async def main():
    provider = NamespaceSandboxes(scratch=Path(sys.argv[1]))
    sandbox = await provider.create({"seen": ""})
    spying = asyncio.ensure_future(sandbox.exec(["python3", "-c", SPY], timeout_s=100))
    while not await sandbox.read_file("seen"):
        await asyncio.sleep(0.01)
    for _ in range(int(sys.argv[2])):
        await sandbox.exec(["true"])
        await sandbox.write_file("a", "b")
    print(await sandbox.read_file("seen"))
    spying.cancel()
    await provider.close()
asyncio.run(main())
"""
"""A command that looks for processes of étude's own whose memory it may open, while many are made beside it."""
GLIMPSES = 300
"""Commands and jobs that it may look at; of a hundred it opened one or more."""


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder that every user may write to; pytest's folders belong to their own user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_it_works_and_says_what_is_missing(common: Path) -> None:
    claims, user, *rest = run_without_root(UNPRIVILEGED, common).splitlines()
    assert "memory_limit" not in claims
    assert "images" not in claims
    assert "'process_limit'" in claims
    assert user == "1000"
    assert rest[0].startswith("given")
    assert rest[-3:] == [" 1", "y", ""] or "y" in rest
    assert list(common.iterdir()) == []


def test_no_command_opens_the_memory_of_a_process_that_will_be_one(common: Path) -> None:
    assert run_without_root(SPYING, common, str(GLIMPSES)).split() == ["watching"]


def run_without_root(script: str, scratch: Path, *arguments: str) -> str:
    """Output of a script that runs as a user who is not root."""
    python = interpreter_for_anybody()
    if python is None:
        pytest.skip("no interpreter with our packages can be reached by another user")
    argv = [*python, "-c", script, str(scratch), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, user=65534, group=65534)
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreter_for_anybody() -> list[str] | None:
    """The command by which another user runs a Python with étude, or ``None``."""
    places = [str(Path(etude.__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        argv = ["env", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={':'.join(places)}", python]
        try:
            done = subprocess.run(
                [*argv, "-c", "import etude.sandboxes.ns.provider"],
                user=65534,
                group=65534,
                check=False,
                capture_output=True,
            )
        except OSError:
            continue
        if done.returncode == 0:
            return argv
    return None
