"""Runs of pip for a third-party project's requirements: names and versions from indexes, wheels only, none executed.

Owns which requirements are accepted, which environment variables pip receives, and which of its results are rejected.
For a direct reference (``NAME @ URL``, a path) pip would run the build program on this machine, with those variables.
:mod:`~etude.taskgen.isolated_pip` handles the direct references that only pip sees.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from etude.taskgen.failures import InstallError
from etude.taskgen.isolated_pip import REFUSED

PIP = (sys.executable, "-P", str(Path(__file__).with_name("isolated_pip.py")))
"""pip that starts no program; with ``-P``, nothing is imported from its working folder."""
INSTALL_TIMEOUT_S = 900.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ftp_proxy")
MESSAGES = frozenset(
    {
        *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH"),
        *("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "XDG_CACHE_HOME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *PROXIES,
        *(name.upper() for name in PROXIES),
    }
)
"""Variables of this machine that pip receives, besides its own: for execution, settings and network access."""
OWN = "PIP_"
TAKEN = re.compile(r"^(?:Collecting|Processing) (.+)$", re.MULTILINE)
"""Messages in which pip names the requirement that it processes."""
FIX = (
    "write NAME or NAME==VERSION of an index in a copy of the project, or let a model install it in a sandbox "
    "(--installer URL --model NAME)"
)


def pip_environment() -> dict[str, str]:
    """The environment variables of pip: no credentials except those of its indexes."""
    message = {name: value for name, value in os.environ.items() if name in MESSAGES or name.startswith(OWN)}
    return {**message, "PYTHONDONTWRITEBYTECODE": "1"}


def run_pip(
    argv: Sequence[str], *, timeout_s: float, folder: Path | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run pip until it exits, in ``folder`` if given. Raises :class:`subprocess.TimeoutExpired`."""
    return subprocess.run(
        argv,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
        env=pip_environment(),
    )


def index_requirements(lines: Iterable[str]) -> tuple[str, ...]:
    """The requirements in a form that pip can read only as names on an index.

    Raises :class:`~etude.taskgen.failures.InstallError` for one that is not a name with versions.
    """
    return tuple(_index_requirement(line) for line in lines)


def _index_requirement(line: str) -> str:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        raise _rejection(line, "it is not a name with versions") from None
    if requirement.url is not None:
        raise _rejection(line, f"it is a direct reference to {requirement.url}, which would be built on this machine")
    if any(specifier.operator == "===" for specifier in requirement.specifier):
        raise _rejection(line, "what follows === is any text, which pip may take for a path")
    return str(requirement)


def _rejection(line: str, why: str) -> InstallError:
    return InstallError(f"the requirement {line!r} cannot be installed here: {why}; {FIX}")


def install_wheels(requirements: Sequence[str], options: Sequence[str]) -> None:
    """Install wheels from indexes with pip; one of the options names the target.

    Raises :class:`~etude.taskgen.failures.InstallError`, with the end of pip's output. A dependency from outside an
    index may be unpacked by then, but it has not been run.
    """
    requested = index_requirements(requirements)
    with tempfile.TemporaryDirectory(prefix="etude-pip-") as scratch:
        report = Path(scratch) / "report.json"
        empty = Path(scratch) / "empty"  # pip may read a name as a file of its working folder
        empty.mkdir()
        argv = [*PIP, "install", "--no-input", "--progress-bar=off", "--only-binary=:all:", "--no-compile", *options]
        try:
            argv += ["--report", str(report), "--", *requested]
            done = run_pip(argv, timeout_s=INSTALL_TIMEOUT_S, folder=empty)
        except subprocess.TimeoutExpired:
            raise InstallError(f"pip did not install {list(requested)} within {INSTALL_TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            raise _failure(
                requested, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace").strip()
            )
        _refuse_direct(report.read_bytes(), requested)


def _failure(requested: Sequence[str], message: str, output: str) -> InstallError:
    """The reason for pip's failure, from its messages and its errors."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    if REFUSED in output:
        taken = TAKEN.findall(message)
        what = taken[-1] if taken else "something"
        why = f"{what} is not a wheel of an index and would be built on this machine: {FIX}"
    else:
        why = errors[-1] if errors else output[-200:]
    return InstallError(
        f"pip cannot install {list(requested)} from wheels: {why}", log=f"{message[-2000:]}\n{output[-4000:]}"
    )


def _refuse_direct(report: bytes, requested: Sequence[str]) -> None:
    """Raise an error if pip's report has a package that came by a direct reference, not from an index."""
    for item in json.loads(report)["install"]:
        if item["is_direct"] or "archive_info" not in item["download_info"]:
            raise InstallError(
                f"of what {list(requested)} need, {item['metadata']['name']!r} comes from "
                f"{item['download_info']['url']}, "
                f"no index: {FIX}"
            )
