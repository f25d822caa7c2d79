"""The sections of mid-training and SFT: shares that add up, schedules without idle keys."""

from typing import Any

import pytest

from etude.config.imitation import MidtrainConfig
from etude.config.loading import default_recipe, dump_toml, load_recipe, parse_config
from etude.errors import ConfigError


def test_the_two_shares_leave_the_rest_to_sessions() -> None:
    shares = MidtrainConfig().shares
    assert shares["sessions"] == pytest.approx((0.6, 0.6))
    assert sum(first for first, _ in shares.values()) == pytest.approx(1)
    assert set(MidtrainConfig(mixture={"stdlib": 0.0, "code": 1.0}).shares) == {"code"}


def test_a_mixture_is_read_back_as_it_was(tmp_path: Any) -> None:
    mixture = {"code": [0.5, 0.0], "text:corpora/docs": [0, 0.25], "sessions": [0.5, 0.75]}
    config = parse_config({"midtrain": {"mixture": mixture}}, source="test")
    assert config.midtrain.shares == {"code": (0.5, 0.0), "text:corpora/docs": (0.0, 0.25), "sessions": (0.5, 0.75)}
    (tmp_path / "run.toml").write_text(dump_toml(config))
    assert load_recipe(tmp_path) == config


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"midtrain": {"mixture": {"code": 0.5}}}, r"the first shares are \[0.5\]"),
        ({"midtrain": {"mixture": {"code": [1.0, 0.5], "sessions": 0.0}}}, "the last shares are"),
        ({"midtrain": {"mixture": {"code": 1.5, "sessions": -0.5}}}, "must be positive"),
        ({"midtrain": {"mixture": {"web": 1.0}}}, "'web' is none of stdlib, code, sessions, text:PATH, chat:PATH"),
        ({"midtrain": {"mixture": {"text:": 1.0}}}, "'text:' is none of"),
        ({"midtrain": {"schedule": "cosine", "decay_share": 0.1}}, "decay_share would have no effect with schedule"),
        ({"trainer": {"schedule": "constant", "decay_share": 0.1}}, "trainer.decay_share would have no effect"),
        ({"sft": {"file": "a", "ramp_share": 0.1}}, "sft.first_batch_tokens and ramp_share make a ramp together"),
        ({"midtrain": {"first_batch_tokens": 3_000, "ramp_share": 0.1}}, "is above batch_tokens=2000"),
        ({"sft": {"epochs": 3}}, "sft.epochs would have no effect without sft.file"),
    ],
)
def test_what_would_have_no_effect_or_not_add_up_is_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(tree, source="test")


def test_there_is_no_sft_by_default() -> None:
    assert not default_recipe().sft.file
    assert default_recipe(["sft.file=a.jsonl", "sft.epochs=3"]).sft.epochs == 3
