"""Probes: what an environment says of itself when asked, as a list of questions, the same for production and
simulation.

    probe(sandbox) ──▶ name → answer ──▶ diff with the answers of production ──▶ what to repair

The audit (:mod:`etude.taskgen.fidelity.audit`) tells sides apart by what agents happened to see; this asks for what
they could see. Each question is a line of POSIX shell that needs nothing but coreutils, so that production can be asked
with the same list (:data:`PROBES`). Answers that differ from one start to the next (process numbers, free memory, the
time) are not asked for, or only how far they are off.

Owns the questions. A question that fails or hangs has the answer that it does.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etude.protocols import Sandbox

TIMEOUT_S = 10.0
"""For one question."""
ANSWER_LETTERS = 2_000
CLOCK_TOLERANCE_S = 120
"""By how much a clock may be off and still be right."""
NO_ANSWER, TIMED_OUT = "(none)", "(timed out)"

PROBES: Mapping[str, str] = MappingProxyType(
    {
        "kernel": "uname -srm",
        "hostname": "cat /proc/sys/kernel/hostname",
        "distribution": "sed -n 's/^PRETTY_NAME=//p' /etc/os-release",
        "user": "id",
        "home": 'echo "$HOME"; ls -A "$HOME" | sort',
        "first process": "tr '\\0' ' ' < /proc/1/cmdline",
        "process names": 'names=$(cat /proc/[0-9]*/comm); echo "$names" | sort -u',
        "processor": "sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | sort -u",
        "processors": "nproc",
        "hypervisor": "grep -c hypervisor /proc/cpuinfo; cat /sys/class/dmi/id/product_name",
        "file systems": "cut -d' ' -f2,3 /proc/self/mounts | sort -u",
        "root": "ls -A / | sort",
        "control group": "cut -d: -f2,3 /proc/self/cgroup | sort -u",
        "variables": "env | cut -d= -f1 | sort",
        "search path": 'echo "$PATH"',
        "locale": 'echo "$LANG $LC_ALL"; locale -a | sort | head -20',
        "time zone": "date +%Z%z",
        "name servers": "grep -v '^#' /etc/resolv.conf; cat /etc/hosts",
        "interfaces": "cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' ' | sort",
        "name lookup": "getent hosts example.com",
        "terminal": "tty; umask; ulimit -n",
        "working folder": "pwd; stat -c '%U %a' .",
        "python": "command -v python3; python3 --version",
        "python packages": "python3 -c 'import importlib.metadata as m; "
        'print(*sorted({f"{d.name}=={d.version}" for d in m.distributions()}), sep=chr(10))\'',
        "tools": 'for t in bash git gcc make node cargo go java curl rg; do command -v $t || echo "no $t"; done',
        "tool versions": "git --version; bash --version | head -1; gcc --version | head -1; node --version",
        "git": "git rev-parse --abbrev-ref HEAD; git log -1 --format='%an %ae'; git config --get remote.origin.url; "
        "git rev-list --count HEAD",
        "kernel messages": "dmesg | head -3",
    }
)
"""Name → what is run."""
ASK = f"""\
mark=$1; shift
for script; do
    echo "$mark"
    told=$(timeout {TIMEOUT_S:.0f} sh -c "$script" </dev/null 2>/dev/null)
    test $? = 124 && told='{TIMED_OUT}'
    printf '%s\\n' "$told" | head -c {ANSWER_LETTERS}
    echo
done
"""
"""Arguments: what stands before each answer, and the questions."""
CLOCK = "clock"
"""A question of its own: how far from the machine that asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A probe that two environments answer differently."""

    name: str
    production: str
    simulated: str


async def probe(sandbox: Sandbox) -> dict[str, str]:
    """Run all probes in a sandbox, in one command. Raises :class:`~etude.errors.SandboxError` when it dies."""
    mark = f"-- {secrets.token_hex(8)} --"
    scripts = (*PROBES.values(), "date -u +%s")
    done = await sandbox.exec(["sh", "-c", ASK, "sh", mark, *scripts], timeout_s=TIMEOUT_S * len(scripts))
    message = [part.strip()[:ANSWER_LETTERS] or NO_ANSWER for part in done.stdout.split(mark)[1:]]
    message += [TIMED_OUT] * (len(scripts) - len(message))
    answers = dict(zip((*PROBES, CLOCK), message, strict=True))
    answers[CLOCK] = describe_clock(answers[CLOCK], time.time())
    return answers


def describe_clock(message: str, now_s: float) -> str:
    """Describe how far a clock that says ``message`` (Unix seconds) is off."""
    if not message.isdigit():
        return NO_ANSWER
    off_s = int(message) - now_s
    return "right" if abs(off_s) <= CLOCK_TOLERANCE_S else f"off by {off_s / 3600:+.0f} h"


def diff(production: Mapping[str, str], simulated: Mapping[str, str]) -> tuple[Difference, ...]:
    """The probes that two environments answer differently, in the order of the list."""
    names = dict.fromkeys((*PROBES, CLOCK, *production, *simulated))
    pairs = ((name, production.get(name, NO_ANSWER), simulated.get(name, NO_ANSWER)) for name in names)
    return tuple(Difference(name=name, production=real, simulated=ours) for name, real, ours in pairs if real != ours)


def render_diff(differences: tuple[Difference, ...]) -> str:
    """Differences for people: what only one side says, line by line."""
    if not differences:
        return "both environments answer every question alike"
    lines: list[str] = []
    for one in differences:
        real, ours = one.production.splitlines(), one.simulated.splitlines()
        lines.append(f"{one.name}:")
        lines += [f"    - {line}" for line in real if line not in ours]
        lines += [f"    + {line}" for line in ours if line not in real]
    return "\n".join(("- production, + simulated", *lines))
