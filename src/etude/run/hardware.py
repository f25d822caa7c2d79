"""GPUs by name: memory, speed and price, each figure with its source.

Used for plans of other machines. ``hardware.toml`` next to this file has the built-in GPUs; a user's file adds to them
or replaces them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias

from pydantic import Field

from etude.config.section import Section
from etude.errors import ConfigError

SHIPPED = "hardware.toml"
GB = 1_000_000_000
Market: TypeAlias = Literal["on_demand", "spot"]


class Figure(Section):
    """A figure and its source."""

    value: float = Field(gt=0)
    source: str = Field(min_length=1)
    """URL, or words such as ``our contract``."""
    read: str = Field(pattern=r"\d{4}-\d{2}-\d{2}")
    """Date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """The rates of one kind of GPU, as plans take them."""

    memory_bytes: int
    flops: float
    """Dense bfloat16 operations per second."""
    bytes_per_s: float
    """Rate of its memory."""


class GpuSheet(Section):
    """One kind of GPU. What has no source is ``None``."""

    memory_gb: Figure
    bandwidth_tb_s: Figure
    bf16_tflops: Figure
    """Dense."""
    fp8_tflops: Figure | None = None
    """Dense."""
    link_gb_s: Figure | None = None
    """To the other GPUs of its machine, both directions."""
    on_demand_usd_h: Figure | None = None
    spot_usd_h: Figure | None = None

    @property
    def kind(self) -> GpuKind:
        """Its rates, as the roofline takes them."""
        return GpuKind(
            memory_bytes=round(self.memory_gb.value * GB),
            flops=self.bf16_tflops.value * 1e12,
            bytes_per_s=self.bandwidth_tb_s.value * 1e12,
        )

    def price(self, market: Market) -> Figure | None:
        """Dollars for an hour."""
        return self.spot_usd_h if market == "spot" else self.on_demand_usd_h


class Hardware(Section):
    """GPUs by name."""

    gpus: dict[str, GpuSheet] = Field(default_factory=dict)


def load_gpus(own: Mapping[str, GpuSheet] | None = None) -> dict[str, GpuSheet]:
    """The GPUs that ship, and ``own`` over them."""
    return {**_shipped(), **(own or {})}


@cache
def _shipped() -> Mapping[str, GpuSheet]:
    text = files("etude.run").joinpath(SHIPPED).read_text(encoding="utf-8")
    return Hardware.model_validate(tomllib.loads(text)).gpus


def gpu_sheet(gpus: Mapping[str, GpuSheet], name: str) -> GpuSheet:
    """The GPU of a name. Raises :class:`~etude.errors.ConfigError`."""
    if name not in gpus:
        raise ConfigError(f"{name!r} is not a known GPU: there are {', '.join(gpus)}; describe it under [gpus.{name}]")
    return gpus[name]
