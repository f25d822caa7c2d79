"""Description of machine and package versions, for reports and benches."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from etude.types import Json


def describe_machine() -> dict[str, Json]:
    """Processor, usable cores, memory and package versions."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "etude": _installed("etude"),
    }


def versions() -> dict[str, str]:
    """Versions that should be equal for all processes of a run; étude's version includes its commit, if any."""
    machine, commit = describe_machine(), source_commit()
    etude = f"{machine['etude']}{'' if commit == 'unknown' else f' at {commit}'}"
    return {"étude": etude, "Python": str(machine["python"]), "torch": str(machine["torch"])}


def source_commit() -> str:
    """The git commit of étude's source, marked ``+changes`` if edited; ``unknown`` outside a checkout."""
    source = Path(__file__).parent
    commit = _git(source, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return commit + ("+changes" if _git(source, "status", "--porcelain", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
