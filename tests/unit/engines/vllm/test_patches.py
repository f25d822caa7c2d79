"""A patch file contains what was written, and damage is detected."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.engines.vllm.patches import Patch, read_patch, write_patch
from etude.errors import DamagedError
from etude.types import TensorSpec
from etude.weights.interop.checkpoint import write_tensor_file
from etude.weights.replica import ChangedNumbers
from etude.weights.state import StoredTensor

LARGEST = ((np.uint8, 2**8 - 1), (np.uint16, 2**16 - 1), (np.uint32, 2**32 - 1))


@st.composite
def runs(draw: st.DrawFn) -> ChangedNumbers:
    indices = np.array(sorted(draw(st.sets(st.integers(0, 2**63 - 1), max_size=5))), np.uint64)
    kind, largest = draw(st.sampled_from(LARGEST))
    bits = [draw(st.integers(0, largest)) for _ in indices]
    return ChangedNumbers(indices=indices, bits=np.array(bits, kind))


@settings(max_examples=40, deadline=None)
@given(changes=st.dictionaries(st.text(min_size=1, max_size=8), st.lists(runs(), min_size=1, max_size=12), max_size=4))
def test_what_was_written_is_read(
    changes: dict[str, list[ChangedNumbers]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("patch") / "patch"
    write_patch(path, Patch(base="b", digest="d", changes=changes))
    actual = read_patch(path)
    assert (actual.base, actual.digest) == ("b", "d")
    assert actual.changes.keys() == changes.keys()
    for name, expected in changes.items():
        for one, other in zip(actual.changes[name], expected, strict=True):
            np.testing.assert_array_equal(one.indices, other.indices)
            np.testing.assert_array_equal(one.bits, other.bits)
            assert one.bits.dtype == other.bits.dtype


@pytest.mark.parametrize(
    ("title", "metadata"),
    [("0/indices/w", {"base": "b", "digest": "d"}), ("w", {"base": "b", "digest": "d"}), ("0/bits/w", {"base": "b"})],
)
def test_a_file_that_is_no_patch_is_damaged(tmp_path: Path, title: str, metadata: dict[str, str]) -> None:
    stored = StoredTensor(spec=TensorSpec(name=title, dtype="U64", shape=(1,)), data=np.zeros(8, np.uint8))
    write_tensor_file(tmp_path / "patch", [stored], metadata)
    with pytest.raises(DamagedError):
        read_patch(tmp_path / "patch")
