"""Machines with GPUs by name, for plans of other machines: ``h100x8`` has eight H100."""

import re
from dataclasses import dataclass

from etude.errors import ConfigError
from etude.run.hardware import GB, GpuKind, load_gpus

NAME = re.compile(r"([a-z0-9]+)x([1-9][0-9]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """One machine with equal GPUs."""

    name: str
    gpus: int
    memory_bytes: int
    """Memory of one GPU."""
    kind: GpuKind | None = None
    """``None`` if only numbers were given."""

    @classmethod
    def parse(cls, name: str) -> "GpuMachine":
        """The machine named like ``h100x8``. Raises :class:`~etude.errors.ConfigError`."""
        match = NAME.fullmatch(name)
        if match is None or match[1] not in load_gpus():
            raise ConfigError(
                f"{name!r} is not a machine: write a GPU and how many one machine has, such as h100x8; there are "
                f"{', '.join(load_gpus())}"
            )
        kind = load_gpus()[match[1]].kind
        return cls(name=name, gpus=int(match[2]), memory_bytes=kind.memory_bytes, kind=kind)


def parse_size(text: str) -> int:
    """Bytes of ``80GB`` or ``80``, which are gigabytes. Raises :class:`~etude.errors.ConfigError`."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?(?:GB)?", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"{text!r} is not a size of a GPU's memory: write gigabytes, such as 80GB")
    return int(float(match[1]) * GB)
