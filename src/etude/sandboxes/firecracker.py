"""Sandboxes in Firecracker, where its binary and ``/dev/kvm`` are. Written against its public API, never run by us.

    PUT /boot-source  /machine-config  /drives/…  /vsock  /actions     over the process's own Unix socket

The image, the initial RAM disk and the agent are those of :mod:`etude.sandboxes.qemu`; the agent is reached over vsock
rather than a virtio port. None of this could be tested where étude is developed: nested virtualisation there does not
boot Debian's kernel. So the provider refuses, with what is missing, and claims nothing. What is here is what can be
checked without a machine: the requests, in their order. Source: github.com/firecracker-microvm/firecracker, docs and
``firecracker.yaml`` of version 1.x.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import Unsupported
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, SandboxSpec

PROGRAM = "firecracker"
BOOT_ARGUMENTS = "console=ttyS0 reboot=k panic=-1 pci=off quiet cgroup_no_v1=all psi=0"
GUEST_CID = 3
"""Address of the machine for its agent; the host's is 2."""
AGENT_PORT = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of Firecracker's API, whose bodies are JSON."""

    method: str
    path: str
    body: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroVm:
    """What a machine is made from."""

    kernel: Path
    """An uncompressed ELF kernel: Firecracker takes no bzImage."""
    initramfs: Path
    disks: tuple[Path, ...]
    """The machine's root, the disk that is written to, and layers, as :mod:`etude.sandboxes.qemu.hardware` has them."""
    vsock: Path
    """The Unix socket under which the machine's ports are found."""
    memory_mib: int
    cpus: int


def boot_requests(machine: MicroVm) -> Sequence[Request]:
    """The calls that start a machine, in order."""
    drives = [
        Request(
            method="PUT",
            path=f"/drives/disk{number}",
            body={
                "drive_id": f"disk{number}",
                "path_on_host": str(disk),
                "is_root_device": False,  # the initial RAM disk mounts it
                "is_read_only": number != 1,
            },
        )
        for number, disk in enumerate(machine.disks)
    ]
    source = {
        "kernel_image_path": str(machine.kernel),
        "initrd_path": str(machine.initramfs),
        "boot_args": BOOT_ARGUMENTS,
    }
    sizes = {"vcpu_count": machine.cpus, "mem_size_mib": machine.memory_mib}
    return (
        Request(method="PUT", path="/boot-source", body=source),
        Request(method="PUT", path="/machine-config", body=sizes),
        *drives,
        Request(method="PUT", path="/vsock", body={"guest_cid": GUEST_CID, "uds_path": str(machine.vsock)}),
        Request(method="PUT", path="/actions", body={"action_type": "InstanceStart"}),
    )


def freeze_requests(memory: Path, devices: Path) -> Sequence[Request]:
    """The calls that write a machine down; it stands still afterwards."""
    body = {"snapshot_type": "Full", "snapshot_path": str(devices), "mem_file_path": str(memory)}
    return (
        Request(method="PATCH", path="/vm", body={"state": "Paused"}),
        Request(method="PUT", path="/snapshot/create", body=body),
    )


def copy_requests(memory: Path, devices: Path) -> Sequence[Request]:
    """The call that starts a copy, which maps the memory privately."""
    backend = {"backend_type": "File", "backend_path": str(memory)}
    body = {"snapshot_path": str(devices), "mem_backend": backend, "resume_vm": True}
    return (Request(method="PUT", path="/snapshot/load", body=body),)


def why_not() -> str:
    """Why no sandbox can be had from Firecracker on this machine."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM!r} is not installed"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm cannot be opened"
    return "étude's agent speaks virtio ports only, which Firecracker lacks; nobody has tried vsock"


class FirecrackerSandboxes:
    """Refuses to make sandboxes, and says why."""

    async def capabilities(self) -> frozenset[Capability]:
        """None: what has not been tried is not claimed."""
        return frozenset()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        """Raises :class:`~etude.errors.Unsupported`."""
        raise Unsupported(f"Firecracker sandboxes are not available: {why_not()}; use qemu, which runs the same image")

    async def close(self) -> None:
        """There is nothing to close."""
