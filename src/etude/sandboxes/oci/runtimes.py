"""Table of the OCI runtimes that can run sandboxes, with the capabilities of each.

A row has the command of its program, the capabilities that it enforces, and what its containers need from a base
system. :mod:`etude.sandboxes.oci.provider` does the rest for all of them.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from etude.sandbox_spec import Capability

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OciRuntime:
    """One program that follows the runtime specification of the Open Container Initiative."""

    kind: str
    """Name of the provider in recipes and messages."""
    program: str
    package: str
    """Debian's name of it."""
    flags: tuple[str, ...]
    """Options before every command."""
    capabilities: frozenset[Capability]
    """Capabilities on a machine on which a container can be started; without control groups it lacks ``LIMIT_WALL``."""
    command_pid_flag: str
    """Option of ``exec`` that names a file for the process id of a command, as its own kernel counts."""

    @property
    def shares_kernel(self) -> bool:
        """True if containers run on the machine's kernel: then they need its filters and masks, and their processes
        are also processes of the namespaces around them, with other ids there.
        """
        return Capability.OWN_KERNEL not in self.capabilities


GVISOR: Final = OciRuntime(
    kind="gvisor",
    program="runsc",
    package="runsc",
    # It needs no hardware support, and written files go to étude's own overlay, whose size is limited.
    flags=("--platform=ptrace", "--network=none", "--ignore-cgroups", "--overlay2=none", "--file-access=exclusive"),
    capabilities=frozenset(Capability) - {Capability.ALLOW_LIST, Capability.MEMORY_LIMIT, Capability.PROCESS_LIMIT},
    command_pid_flag="-internal-pid-file",
)
"""A kernel in user space, whose sentry can be checkpointed and restored: forks have memory and processes. It does not
enforce limits of memory and processes in a way that keeps the sandbox alive, but control groups with higher limits
surround it; and its network is always off.
"""
CRUN: Final = OciRuntime(
    kind="crun",
    program="crun",
    package="crun",
    flags=("--cgroup-manager=disabled",),  # the namespaces around have the control groups
    capabilities=GVISOR.capabilities - {Capability.OWN_KERNEL, Capability.COUNTERS_APART, Capability.LIVE_FORK},
    command_pid_flag="--pid-file",
)
"""The machine's own kernel behind the masks and filters that Docker has; podman's containers are this program's, too.
Agents of all sandboxes are one user to that kernel, which counts some things for each user.
"""
RUNTIMES: Final[Mapping[str, OciRuntime]] = MappingProxyType({runtime.kind: runtime for runtime in (CRUN, GVISOR)})
"""By kind."""


def build_statx_shim(layer: Path) -> bool:
    """Build a layer, in an empty folder, that makes ``ls`` and ``stat`` work on a runtime that is older than they are.

    GNU coreutils 9 passes ``AT_NO_AUTOMOUNT`` to ``statx``, which the ``runsc`` of 2022 in Debian 12 rejects as an
    invalid argument. There are no automounts in a sandbox, so a library that every program preloads removes the flag.
    False, with an empty folder, if there is no C compiler.
    """
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
