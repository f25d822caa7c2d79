"""GPUs by name, as their data sheets have them: for plans of machines that are not here.

``h100x8`` is one machine with eight H100. Rates are those of dense bfloat16 products and of the memory.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etude.errors import ConfigError

GB = 1_000_000_000
NAME = re.compile(r"([a-z0-9]+)x([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """One kind of GPU."""

    memory_bytes: int
    flops: float
    """bfloat16 operations per second."""
    bytes_per_s: float
    """Rate of its memory."""


GPUS: Mapping[str, GpuKind] = MappingProxyType(
    {
        "a100": GpuKind(memory_bytes=80 * GB, flops=312e12, bytes_per_s=2.04e12),
        "h100": GpuKind(memory_bytes=80 * GB, flops=989e12, bytes_per_s=3.35e12),
        "h200": GpuKind(memory_bytes=141 * GB, flops=989e12, bytes_per_s=4.8e12),
        "b200": GpuKind(memory_bytes=180 * GB, flops=2250e12, bytes_per_s=8.0e12),
        "b300": GpuKind(memory_bytes=270 * GB, flops=2250e12, bytes_per_s=8.0e12),
    }
)
"""Name → what one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """One machine with equal GPUs."""

    name: str
    gpus: int
    memory_bytes: int
    """One GPU's."""
    kind: GpuKind | None = None
    """``None`` where only numbers were given."""

    @classmethod
    def parse(cls, name: str) -> "GpuMachine":
        """The machine that ``h100x8`` names. Raises :class:`~etude.errors.ConfigError`."""
        match = NAME.fullmatch(name)
        if match is None or match[1] not in GPUS:
            raise ConfigError(
                f"{name!r} is no machine: write a GPU and how many one machine has, such as h100x8; there are "
                f"{', '.join(GPUS)}"
            )
        kind = GPUS[match[1]]
        return cls(name=name, gpus=int(match[2]), memory_bytes=kind.memory_bytes, kind=kind)


def parse_size(text: str) -> int:
    """Bytes of ``80GB`` or ``80``, which are gigabytes. Raises :class:`~etude.errors.ConfigError`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?(?:GB)?", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is no size of a GPU's memory: write gigabytes, such as 80GB")
    return int(float(match[1]) * GB)
