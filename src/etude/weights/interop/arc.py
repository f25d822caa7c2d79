"""``arc_v2``: the deltas that Fireworks' hot-load service takes, as one safetensors file per checkpoint file.

    tensor → U8 [n] zstd of (new XOR old); __metadata__: tensor → Adler-32 of its new bytes, in decimal

Every tensor is in it, changed or not. Written from and tested against the PyPI package ``fireworks-delta-compression``
0.1.0 (``compression.py``, ``backends/arc2.py``), which needs torch; this file does not. Payloads are equal to its byte
for byte as long as its zstd works in one job; it splits tensors of some ten megabytes among as many threads as it finds
processors. ``arc_v1`` (zlib) and ``arc_v3`` are not ours to read: nothing in a file says which of the three it is.
"""

import zlib
from pathlib import Path

from etude.errors import DamagedError, UserError
from etude.weights.interop.payloads import (
    Encoding,
    apply_change,
    encode_change,
    in_parallel,
    matched,
    payload_tensor,
)
from etude.weights.interop.tensor_file import read_tensor_file, whole, write_tensor_file
from etude.weights.state import Bytes1d, State, StoredTensor

ZSTD_LEVEL = 3
"""The default of the ``zstd`` package, which is what theirs compresses with."""


def write_arc(path: Path, old: State, new: State) -> None:
    """Write the change from ``old`` to ``new``.

    Raises ``UserError`` if the two states differ in more than values or are shares of one rank, and
    ``InfrastructureError`` if the file cannot be written.
    """

    def change(pair: tuple[StoredTensor, StoredTensor]) -> tuple[StoredTensor, str]:
        before, after = pair
        payload = encode_change(before.data, after.data, Encoding.XOR, ZSTD_LEVEL)
        return payload_tensor(after.spec.name, payload), adler32(after.data)

    changes = in_parallel(change, matched(old, new))
    write_tensor_file(
        path, [payload for payload, _ in changes], {payload.spec.name: digest for payload, digest in changes}
    )


def read_arc(path: Path, old: State) -> dict[str, StoredTensor]:
    """The state after a change, by ascending name; ``old`` stays as it is.

    Raises ``UserError`` if the file is of other tensors than ``old``, ``DamagedError`` naming the file if it is broken
    or a tensor does not have its checksum afterwards, be it because ``old`` is the wrong base.
    """
    file = read_tensor_file(path)
    bases = whole(old)
    if file.tensors.keys() != old.keys():
        unmatched = sorted(file.tensors.keys() ^ old.keys())
        raise UserError(f"{path} is no change of this state: {unmatched[:5]} are only in one of them")

    def changed(before: StoredTensor) -> StoredTensor:
        name = before.spec.name
        origin = f"{path}: tensor {name!r}"
        new = apply_change(file.tensors[name].data, before.data, Encoding.XOR, origin)
        if (found := adler32(new)) != file.metadata.get(name):
            expected = file.metadata.get(name, "missing")
            raise DamagedError(f"{origin} has Adler-32 {found}, not {expected:.64}: wrong base or damaged")
        return StoredTensor(spec=before.spec, data=new)

    return {tensor.spec.name: tensor for tensor in in_parallel(changed, bases)}


def adler32(data: Bytes1d) -> str:
    """The checksum as these files spell it: in decimal, unlike ``payloads.checksum``."""
    return str(zlib.adler32(data.data))
