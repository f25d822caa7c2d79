"""Runs of pip for a third-party project's requirements: names and versions from indexes, wheels only, none executed.

Owns which requirements are taken, what pip is told of this machine, and what is refused of what it brought. Of a
direct reference (``NAME @ URL``, a path) pip runs the build program, here, with all that it was told; see
:mod:`~etude.taskgen.isolated_pip` for those that only pip comes to see.
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
"""pip that starts no program; ``-P``: nothing is imported from the folder it is run in."""
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
"""Variables of this machine that pip is told, beside its own: how to run, where its settings are, how to reach out."""
OWN = "PIP_"
TAKEN = re.compile(r"^(?:Collecting|Processing) (.+)$", re.MULTILINE)
"""Messages with which pip names the requirement it works on."""
FIX = (
    "write NAME or NAME==VERSION of an index in a copy of the project, or let a model install it in a sandbox "
    "(--installer URL --model NAME)"
)


def pip_environment() -> dict[str, str]:
    """The environment variables of pip: no keys but those of its indexes."""
    message = {name: value for name, value in os.environ.items() if name in MESSAGES or name.startswith(OWN)}
    return {**message, "PYTHONDONTWRITEBYTECODE": "1"}


def run_pip(
    argv: Sequence[str], *, timeout_s: float, folder: Path | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run pip to its end, in ``folder`` if one is given. Raises :class:`subprocess.TimeoutExpired`."""
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
    """The requirements in a spelling that pip can only read as names on an index.

    Raises :class:`~etude.taskgen.failures.InstallError` for one that is no name with versions.
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
    """Install wheels from indexes with pip; one of the options says where.

    Raises :class:`~etude.taskgen.failures.InstallError`, with the end of what pip said. What a wheel
    brought that is of no index may be unpacked by then; it has not been run.
    """
    requested = index_requirements(requirements)
    with tempfile.TemporaryDirectory(prefix="etude-pip-") as scratch:
        report = Path(scratch) / "report.json"
        empty = Path(scratch) / "empty"  # to pip, a name may be a file of the folder that it runs in
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
    """Look in pip's report for what came by a direct reference of some wheel."""
    for item in json.loads(report)["install"]:
        if item["is_direct"] or "archive_info" not in item["download_info"]:
            raise InstallError(
                f"of what {list(requested)} need, {item['metadata']['name']!r} comes from "
                f"{item['download_info']['url']}, "
                f"no index: {FIX}"
            )
