"""The ways to send new weights to someone who has the old ones that `bench weights` compares.

Ours are called through :mod:`etude.weights.frames`, chunk by chunk; Fireworks' through the package they publish
(``fireworks-delta-compression``, the ``bench`` extra), tensor by tensor; the two plain ones are what training libraries
do: changed places with their values, and XOR with zstd. All but ``arc_v3`` run on the caller's thread alone. This file
owns how each is called; timing them and judging the figures is ``weights.py``'s.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, TypeAlias, final

import numpy as np
import torch
import zstandard
from torch import Tensor

from etude.weights import frames
from etude.weights.chunks import Layout
from etude.weights.codecs.classes import CLASSES
from etude.weights.codecs.codec import Codec, Segments
from etude.weights.codecs.dense import DENSE
from etude.weights.codecs.full import FULL
from etude.weights.codecs.gaps import GAPS
from etude.weights.digest import Digest
from etude.weights.state import Element, State, StoredTensor

Packets: TypeAlias = Sequence[bytes | memoryview]
"""Encoded bytes."""

ZSTD_LEVEL = 1
_LATENESS_NAME = "_CANDIDATE_WAIT_MULTIPLIER"


class DeltaContestant(Protocol):
    """One way to encode a change."""

    @property
    def name(self) -> str:
        """Name in rows and goals."""
        ...

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, with the remedy; ``None`` when it can."""
        ...

    def encode(self, old: State, new: State) -> Packets:
        """Bytes that a receiver with ``old`` needs for ``new``."""
        ...

    def decode(self, packets: Packets, current: State) -> State:
        """The new state from the packets and the old one, in whose memory the result may lie."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FrameContestant:
    """One of our codecs. Digests are excluded: their cost is part of the all-in figure. So is the layout, which is
    equal for all versions: it is computed once per state.
    """

    codec: Codec
    layouts: dict[int, Layout] = field(default_factory=dict)
    """Number of tensors → their layout: no two cases have as many."""

    @property
    def name(self) -> str:
        """``etude-gaps`` and so on."""
        return f"etude-{self.codec.name}"

    @property
    def missing(self) -> None:
        """Always there."""

    def encode(self, old: State, new: State) -> Packets:
        """A frame per chunk."""
        chunks = self._layout(new).chunks
        return [self._frame(chunk.numbers(old), chunk.numbers(new), chunk.element) for chunk in chunks]

    def decode(self, packets: Packets, current: State) -> State:
        """In place."""
        for chunk, packet in zip(self._layout(current).chunks, packets, strict=True):
            frames.apply(frames.parse(packet), chunk.numbers(current))
        return current

    def _layout(self, state: State) -> Layout:
        if len(state) not in self.layouts:
            self.layouts[len(state)] = Layout.of(state)
        return self.layouts[len(state)]

    def _frame(self, old: Segments, new: Segments, element: Element) -> bytes:
        if self.codec is FULL:
            return frames.encode_full(new, element, after=Digest.ZERO)
        return frames.encode(self.codec, old, new, element, digests=(Digest.ZERO, Digest.ZERO))


@final
@dataclass(frozen=True, slots=True)
class IndexValueContestant:
    """Changed places as int32 and the values there, uncompressed: TRL, prime-rl, vLLM."""

    name: str = "index-value"
    missing: None = None

    def encode(self, old: State, new: State) -> Packets:
        """Two packets per tensor."""
        packets: list[bytes] = []
        for name in sorted(new):
            numbers = new[name].numbers
            places = np.flatnonzero(old[name].numbers != numbers)
            packets += [places.astype(np.int32).tobytes(), numbers[places].tobytes()]
        return packets

    def decode(self, packets: Packets, current: State) -> State:
        """In place."""
        for name, places, values in zip(sorted(current), packets[::2], packets[1::2], strict=True):
            numbers = current[name].numbers
            numbers[np.frombuffer(places, np.int32)] = np.frombuffer(values, numbers.dtype)
        return current


@final
@dataclass(frozen=True, slots=True)
class XorContestant:
    """XOR of the bits through zstd, per tensor: slime, miles, SkyRL."""

    name: str = "xor-zstd-1"
    missing: None = None

    def encode(self, old: State, new: State) -> Packets:
        """A packet per tensor."""
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        return [compressor.compress((old[name].data ^ new[name].data).data) for name in sorted(new)]

    def decode(self, packets: Packets, current: State) -> State:
        """In place."""
        decompressor = zstandard.ZstdDecompressor()
        for name, packet in zip(sorted(current), packets, strict=True):
            data = current[name].data
            np.bitwise_xor(data, np.frombuffer(decompressor.decompress(packet), np.uint8), out=data)
        return current


@final
@dataclass(frozen=True, slots=True)
class FireworksContestant:
    """A format of the codec that Fireworks publishes; adds an Adler-32 per tensor, as it comes.

    ``arc_v3`` tries several encodings on threads of its own and takes the smallest of those that are done 1.5 times as
    late as the first. So its bytes depend on how busy the machine is; with a large ``lateness`` they are its smallest.
    """

    name: str
    format: str
    """``arc_v2`` or ``arc_v3``."""
    lateness: float = 1.5
    """Time limit of the other encodings, as a multiple of the first one's time."""
    package: str = "fireworks_delta_compression"

    @property
    def missing(self) -> str | None:
        """The reason if the package is not installed, else ``None``."""
        if find_spec(self.package) is None:
            install = "in étude's checkout, pip install -e '.[bench]'"
            return f"{self.name} was not measured: {self.package} is not installed; {install}"
        return None

    def encode(self, old: State, new: State) -> Packets:
        """The compressed difference and the checksum of each tensor."""
        package = import_module(self.package)
        packets: list[bytes | memoryview] = []
        with self._waiting():
            for name in sorted(new):
                source, target = _as_torch(old[name]), _as_torch(new[name])
                difference, checksum = package.delta_compress(src=source, dst=target, compression_format=self.format)
                packets += [memoryview(difference.numpy()), checksum.encode()]
        return packets

    def decode(self, packets: Packets, current: State) -> State:
        """In new memory; raises the package's own errors on a wrong checksum."""
        package = import_module(self.package)
        decoded: dict[str, StoredTensor] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # of the package, harmless
            for name, difference, checksum in zip(sorted(current), packets[::2], packets[1::2], strict=True):
                tensor = package.delta_decompress(
                    src=_as_torch(current[name]),
                    compressed_diff=torch.frombuffer(difference, dtype=torch.uint8),
                    checksum=bytes(checksum).decode(),
                    compression_format=self.format,
                )
                bits = tensor.flatten().view(torch.uint8).numpy()
                decoded[name] = StoredTensor(spec=current[name].spec, data=bits)
        return decoded

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """With our lateness where the package keeps its own, which it reads from the environment only when imported."""
        settings = vars(import_module(f"{self.package}.backends.arc3"))
        usual = settings[_LATENESS_NAME]
        settings[_LATENESS_NAME] = self.lateness
        try:
            yield
        finally:
            settings[_LATENESS_NAME] = usual


CONTESTANTS: tuple[DeltaContestant, ...] = (
    FrameContestant(GAPS),
    FrameContestant(CLASSES),
    FrameContestant(DENSE),
    FrameContestant(FULL),
    XorContestant(),
    IndexValueContestant(),
    FireworksContestant("arc_v2", "arc_v2"),
    FireworksContestant("arc_v3", "arc_v3"),
    FireworksContestant("arc_v3-patient", "arc_v3", lateness=1000.0),
)
"""Everyone, ours first."""


def _as_torch(tensor: StoredTensor) -> Tensor:
    """The same memory as a bfloat16 tensor, which is what typed formats look at."""
    shape = tensor.spec.shape
    return torch.from_numpy(tensor.data).view(torch.bfloat16).view(shape)
