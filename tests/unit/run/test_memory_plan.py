"""What a run takes of memory is known before it is made."""

import pytest

from etude.config.loading import default_recipe
from etude.errors import UserError
from etude.run.memory_need import MemoryNeed, check_memory
from etude.run.preflight import spec_of_recipe

MILLION = 1_000_000


def test_the_need_of_a_known_model_is_what_its_two_sides_hold() -> None:
    shape = ["model.shape.layers=2", "model.shape.kv_heads=3", "model.shape.heads=6", "model.shape.head_dim=8"]
    settings = [*shape, "engine.options.cache_tokens=1000", "numerics.dtype=bfloat16"]
    config = default_recipe(settings)
    need = MemoryNeed.of(config, spec_of_recipe(config), MILLION)
    assert need.trainer == 16 * MILLION, "parameter, gradient and two moments in float32"
    assert need.engine == 2 * 2 * MILLION + 1000 * 2 * 3 * (8 + 8) * 2, "weights twice; keys and values of two layers"
    three = default_recipe([*settings, "engine.replicas=3"])
    assert MemoryNeed.of(three, spec_of_recipe(three), MILLION).engine == 3 * need.engine
    once = default_recipe([*settings, "engine.options.spare_weights=false"])
    assert MemoryNeed.of(once, spec_of_recipe(once), MILLION).engine == need.engine - 2 * MILLION


def test_a_side_that_cannot_be_held_is_refused_and_two_that_hardly_can_are_warned_of() -> None:
    need = MemoryNeed(trainer=300, engine=200)
    with pytest.raises(
        UserError, match=r"cpu has 299 B of memory free.*300 B for the trainer.*engine\.options\.cache_tokens"
    ):
        need.compare({"cpu": 299}, trainer="cpu", engine="cpu")
    (warning,) = need.compare({"cpu": 499}, trainer="cpu", engine="cpu")
    assert "200 B for the engine" in warning
    assert need.compare({"cpu": 300, "cuda": 200}, trainer="cpu", engine="cuda") == []


def test_this_machine_has_memory_for_a_small_model() -> None:
    config = default_recipe(["engine.device=cpu", "trainer.device=cpu"])
    assert check_memory(config, spec_of_recipe(config), MILLION) == []
