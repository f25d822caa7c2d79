"""Which codec gets a version to its readers earliest: a decision from what was measured, and nothing else.

Gap frames cost less to encode, can be merged and taken back; class frames are smaller. Over a slow link bytes are time,
over a fast one the encoder is. Both figures are known after the first upload.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, final

from etude.weights.frames import Codec

CodecWish: TypeAlias = Literal["auto", "gaps", "classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """What a codec costs per changed number, measured by ``bench weights`` on bf16 at 1–2 % changed."""

    size_bytes: float
    """On the wire."""
    seconds: float
    """Encoding and decoding together, on one core, the scan included."""


COSTS: Mapping[Codec, CodecCost] = MappingProxyType(
    {
        Codec.GAPS: CodecCost(size_bytes=1.22, seconds=55e-9),
        Codec.CLASSES: CodecCost(size_bytes=0.84, seconds=165e-9),
    }
)
"""Measured on one core of a 2-core AMD EPYC VM; only their ratio to the link matters."""


def faster_codec(link_bytes_per_s: float, cores: int) -> Codec:
    """The codec with which a change arrives earlier: transfer and coding overlap, so the slower of the two counts.

    Example: at 25 MB/s per publisher bytes decide (classes); at 5 GB/s coding does (gaps).
    """
    seconds = {codec: max(cost.size_bytes / link_bytes_per_s, cost.seconds / cores) for codec, cost in COSTS.items()}
    return min(COSTS, key=lambda codec: (seconds[codec], codec is not Codec.GAPS))


@final
class CodecChoice:
    """Follows the link and says what to encode the next version with."""

    MEMORY = 0.7
    """Weight of what was known before each new measurement: a single slow upload decides nothing."""
    SMALLEST_SAMPLE = 1 << 20
    """Uploads below a megabyte measure the round trip, not the link."""

    def __init__(self, wish: CodecWish, cores: int) -> None:
        self._wish = wish
        self._cores = cores
        self._link_bytes_per_s: float | None = None

    @property
    def current(self) -> Codec:
        """What to use now; before anything is known about the link, what can do everything."""
        if self._wish != "auto":
            return Codec.GAPS if self._wish == "gaps" else Codec.CLASSES
        if self._link_bytes_per_s is None:
            return Codec.GAPS
        return faster_codec(self._link_bytes_per_s, self._cores)

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Take note of an upload."""
        if size_bytes < self.SMALLEST_SAMPLE or seconds <= 0:
            return
        speed = size_bytes / seconds
        before = self._link_bytes_per_s
        self._link_bytes_per_s = speed if before is None else self.MEMORY * before + (1 - self.MEMORY) * speed
