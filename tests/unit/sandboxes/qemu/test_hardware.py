"""QEMU's command line: the same devices for every machine, nothing written but one disk, no network."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.qemu.hardware import (
    KERNEL_MIB,
    LAYER_DISKS,
    Boot,
    Disks,
    Shape,
    Wires,
    command_line,
    memory_mib,
)  # fmt: skip

SHAPE = Shape(accelerator="tcg", memory_mib=512, cpus=1)
BOOT = Boot(kernel=Path("/k"), initramfs=Path("/i"), console=Path("/c"))
BLANK = Disks(system=Path("/s"), upper=(Path("/u"),), is_blank=True, layers=(), empty=Path("/e"))


def command(disks: Disks, boot: Boot | None = None) -> list[str]:
    return command_line("qemu", SHAPE, Path("/ram"), disks, Wires(control=3, port=4, state=5), boot)


def options(argv: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(argv) if option == name]


def nodes(argv: list[str]) -> list[dict[str, Any]]:
    return [orjson.loads(value) for value in options(argv, "-blockdev")]


@given(st.integers(0, 4), st.integers(0, LAYER_DISKS))
def test_copies_find_the_devices_of_their_original(heights: int, layers: int) -> None:
    upper = tuple(Path(f"/u{height}") for height in range(heights + 2))
    disks = replace(BLANK, upper=upper, is_blank=False, layers=tuple(Path(f"/l{place}") for place in range(layers)))
    booted, copied = command(BLANK, BOOT), command(disks)
    assert options(booted, "-device") == options(copied, "-device")
    for name in ("-m", "-smp", "-cpu", "-machine", "-global"):
        assert options(booted, name) == options(copied, name)


@given(st.integers(0, 4), st.integers(0, LAYER_DISKS))
def test_only_the_top_is_written_and_everything_lies_over_what_is_named_before(heights: int, layers: int) -> None:
    upper = tuple(Path(f"/u{height}") for height in range(heights + 2))
    disks = replace(BLANK, upper=upper, is_blank=False, layers=tuple(Path(f"/l{place}") for place in range(layers)))
    named = set[str]()
    for node in nodes(command(disks)):
        assert node.get("backing") is None or node["backing"] in named
        assert node["read-only"] == node["file"]["read-only"] == (node["file"]["filename"] != str(upper[-1]))
        named.add(node["node-name"])
    assert {f"disk{number}" for number in range(2 + LAYER_DISKS)} <= named


def test_a_booted_machine_shares_its_memory_and_a_copy_does_not() -> None:
    assert options(command(BLANK, BOOT), "-object") == ["memory-backend-file,id=ram,size=512M,mem-path=/ram,share=on"]
    assert options(command(BLANK), "-object") == ["memory-backend-file,id=ram,size=512M,mem-path=/ram,share=off"]
    assert options(command(BLANK), "-incoming") == ["fd:5"]


def test_there_is_no_network_device() -> None:
    argv = command(BLANK, BOOT)
    assert "-nodefaults" in argv
    assert not [word for word in argv if "net" in word]


def test_hardware_virtualisation_has_the_machines_own_processor_and_clock() -> None:
    shape = replace(SHAPE, accelerator="kvm")
    argv = command_line("qemu", shape, Path("/ram"), BLANK, Wires(control=3, port=4, state=None), BOOT)
    assert options(argv, "-cpu") == ["host"]
    assert "clocksource" not in options(argv, "-append")[0]
    assert "clocksource=hpet" in options(command(BLANK, BOOT), "-append")[0]


@given(st.integers(1, 1 << 36))
def test_the_kernels_memory_is_beside_that_of_commands(memory_bytes: int) -> None:
    mib = memory_mib(memory_bytes)
    assert 0 <= ((mib - KERNEL_MIB) << 20) - memory_bytes < 64 << 20
