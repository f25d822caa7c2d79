"""Small weights that change from version to version as in training, for tests.

Any version can be made from its number alone, in any process, so that a receiver of weights can check whether they are
one version or a mixture of several.
"""

import numpy as np

from etude.types import TensorSpec
from etude.weights.state import NUMBER_TYPES, State, StoredTensor

PERIOD = 50
"""Each number changes once in this many versions, hence every version changes one in this many numbers."""


def synthetic_version(version: int, rows: int = 40, columns: int = 24) -> dict[str, StoredTensor]:
    """The weights of a version: tensors of most kinds, all bit patterns among them, one a single number, one empty."""
    shapes = {"BF16": (rows, columns), "F32": (rows, 4), "F8_E4M3": (columns, rows), "I8": (rows,), "F64": (2, 3)}
    state = {f"layer.{dtype.lower()}": _drifted(dtype, shape, version) for dtype, shape in shapes.items()}
    counter = np.array([version], "<i8").view(np.uint8)
    state["counter"] = StoredTensor(spec=TensorSpec(name="counter", dtype="I64", shape=()), data=counter)
    nothing = TensorSpec(name="nothing", dtype="F16", shape=(0, columns))
    state["nothing"] = StoredTensor(spec=nothing, data=np.zeros(0, np.uint8))
    return state


def alike(one: State, other: State) -> bool:
    """True if two states have the same tensors with the same bytes."""
    return one.keys() == other.keys() and all(
        one[name].spec == other[name].spec and one[name].data.tobytes() == other[name].data.tobytes() for name in one
    )


def _drifted(dtype: str, shape: tuple[int, ...], version: int) -> StoredTensor:
    spec = TensorSpec(name=f"layer.{dtype.lower()}", dtype=dtype, shape=shape)
    width = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "F64": 4}[dtype]
    numbers = int(np.prod(shape)) * (2 if dtype == "F64" else 1)
    draw = np.random.default_rng(sum(dtype.encode()))
    start = draw.integers(0, 2 ** (8 * width), numbers, np.uint64)
    step = draw.choice([-1, 1], numbers)
    moved = start + (step * ((version + np.arange(numbers)) // PERIOD)).astype(np.uint64)
    return StoredTensor(spec=spec, data=moved.astype(NUMBER_TYPES[width]).view(np.uint8))
