"""Optimiser, parallelism and start: contradictions and options without effect are refused."""

import pytest

from etude.config.loading import parse_config
from etude.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("optimiser", {"momentum": 0.9}, "optimiser.momentum would have no effect"),
        ("optimiser", {"kind": "adam"}, "optimiser.kind"),
        ("parallel", {"dp": 3, "ep": 2}, "parallel.ep=2 must divide dp \\* cp = 3"),
        ("parallel", {"dp": 0}, "parallel.dp"),
        ("model", {"checkpoint": "/w", "shape": {"layers": 2}}, "with model.checkpoint = '/w', it goes with ''"),
    ],
)
def test_what_makes_no_sense_is_refused(section: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({section: values}, source="test")


def test_the_world_is_divided_twice() -> None:
    config = parse_config({"parallel": {"dp": 2, "cp": 4, "ep": 8}, "optimiser": {"kind": "muon"}}, source="test")
    assert config.parallel.ranks == 8
    assert config.optimiser.momentum == 0.95
