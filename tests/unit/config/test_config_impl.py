"""Recipes whose model transformers computes: unsupported combinations are refused, with the key to change."""

import pytest

from etude.config.loading import default_recipe
from etude.errors import ConfigError

HF = ("model.impl=hf", "model.checkpoint=models/olmo-2", "midtrain.tokens=0", "engine.kind=vllm")


def test_a_served_checkpoint_is_accepted() -> None:
    assert default_recipe(HF).model.impl == "hf"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("engine.kind=native",), "engine.kind = 'native'"),
        (("model.checkpoint=",), "an empty model.checkpoint"),
        (("engine.options.arguments.trust-remote-code=true",), "engine.options.arguments.trust-remote-code"),
        (("optimiser.kind=muon",), "optimiser.kind = 'muon'"),
        (("parallel.cp=2",), "parallel.cp"),
        (("numerics.replay=full",), "numerics.replay = 'full'"),
        (("lora.rank=8",), "lora.rank"),
    ],
)
def test_what_is_for_the_own_decoder_alone_is_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        default_recipe([*HF, *settings])
    assert f"model.impl = 'hf' does not go with {words}" in str(caught.value)
