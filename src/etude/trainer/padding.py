"""Rows of different lengths in one rectangular array."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", np.int32, np.float32, np.bool_)


def pad_rows(rows: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Stack 1-D arrays as rows [B,T], padded on the right with zeros (or false)."""
    padded = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
