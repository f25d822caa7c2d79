"""Nouns of the seams check themselves."""

import math
from dataclasses import replace
from typing import Any

import pytest

from etude.protocols import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1.0, 1e-300, 1e-38, 9e-7, 1e39, math.inf, math.nan)),
        *(("top_p", value) for value in (0.0, 1.5)),
    ],
)
def test_what_cannot_be_sampled_with_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(SamplingParams(max_tokens=1), **dict[str, Any]({name: value}))
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(max_tokens=1, top_k=-1)
