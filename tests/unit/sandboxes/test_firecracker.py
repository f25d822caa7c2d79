"""Firecracker: the calls of its API in their order, and a refusal that says why."""

import asyncio
from pathlib import Path

import pytest

from etude.errors import Unsupported
from etude.sandboxes.firecracker import FirecrackerSandboxes, MicroVm, boot_requests, copy_requests, freeze_requests

MACHINE = MicroVm(
    kernel=Path("/k"),
    initramfs=Path("/i"),
    disks=(Path("/root.squashfs"), Path("/upper"), Path("/layer")),
    vsock=Path("/v"),
    memory_mib=512,
    cpus=2,
)


def test_a_machine_is_described_before_it_starts() -> None:
    requests = boot_requests(MACHINE)
    assert [request.path for request in requests] == [
        "/boot-source", "/machine-config", "/drives/disk0", "/drives/disk1", "/drives/disk2", "/vsock", "/actions"
    ]  # fmt: skip
    assert [request.body["is_read_only"] for request in requests if "drives" in request.path] == [True, False, True]
    assert not [request for request in requests if "network" in request.path]


def test_a_machine_stands_still_before_it_is_written_down() -> None:
    pause, write = freeze_requests(Path("/ram"), Path("/devices"))
    assert (pause.method, pause.path, pause.body) == ("PATCH", "/vm", {"state": "Paused"})
    assert write.body["mem_file_path"] == "/ram"
    (load,) = copy_requests(Path("/ram"), Path("/devices"))
    assert load.body["mem_backend"] == {"backend_type": "File", "backend_path": "/ram"}


def test_nothing_is_claimed_and_the_refusal_says_what_to_use() -> None:
    async def ask() -> None:
        provider = FirecrackerSandboxes()
        assert await provider.capabilities() == frozenset()
        with pytest.raises(Unsupported, match="use qemu"):
            await provider.create({})
        await provider.close()

    asyncio.run(ask())
