"""What the parts of the command line share: exit codes, argparse's name for subcommands, our own, lists with commas."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import TypeAlias

from etude.errors import ConfigError

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""A set of subcommands; argparse has no public name for it."""
SANDBOXES = ("local", "ns", "gvisor", "qemu", "remote")
"""Kinds of sandboxes."""
USER_ERROR, FAILED, NOTHING_LEARNT, DISK_FULL, INTERRUPTED = 2, 1, 3, 4, 130
"""Exit codes: the user can fix it; a process of the run failed; a run was finished and learnt nothing; a disk is full;
interrupted.
"""


def own_name() -> str:
    """What to type to start this program again: it may lie in a virtual environment that is not active."""
    if shutil.which("etude"):
        return "etude"
    return sys.argv[0] if Path(sys.argv[0]).name == "etude" else f"{sys.executable} -m etude"


def names(listed: str | None) -> tuple[str, ...] | None:
    """The names in a list with commas; ``None`` for all there are."""
    return None if listed is None else tuple(listed.split(","))


def numbers(option: str, listed: str) -> list[int]:
    """The whole numbers in a list with commas. Raises :class:`~etude.errors.ConfigError` naming the option."""
    try:
        return [int(number) for number in listed.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {listed!r}: expected whole numbers with commas, such as 1,4") from error
