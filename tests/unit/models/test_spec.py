"""A spec that contradicts itself is never born."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from etude.models.spec import (
    TINY,
    TINY_DENSE,
    TINY_LATENT,
    ExpertsSpec,
    GroupedSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    WindowSpec,
    YarnScaling,
)


def test_routes_count_sparse_layers_only() -> None:
    assert TINY.routes_shape == (2, 2)
    assert TINY_DENSE.routes_shape == (0, 0)
    assert TINY_LATENT.routes_shape == (2, 3)


def test_a_latent_cache_holds_one_key_head_whose_first_columns_are_the_values() -> None:
    spec = TINY_LATENT.attention
    assert (spec.key_heads, spec.key_width, spec.value_width, spec.values_in_keys) == (1, 24, 16, True)
    assert spec.scale == pytest.approx(24**-0.5)
    spec = TINY.attention
    assert (spec.key_heads, spec.key_width, spec.value_width, spec.values_in_keys) == (2, 16, 16, False)
    assert spec.scale == pytest.approx(0.25)


def test_yarn_sharpens_and_stretches_as_deepseek_v3_does() -> None:
    yarn = YarnScaling(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert yarn.amplitude == 1.0
    assert yarn.latent_sharpness == pytest.approx((0.1 * 3.6888794541 + 1) ** 2)
    assert replace(yarn, mscale=0.0).amplitude == pytest.approx(1.36888794541)
    assert replace(yarn, attention_factor=1.5).amplitude == 1.5
    assert replace(yarn, factor=0.5).latent_sharpness == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupedSpec(heads=3, kv_heads=2, head_dim=8), "kv_heads=2 must divide heads=3"),
        (lambda: GroupedSpec(heads=2, kv_heads=2, head_dim=7), "head_dim=7 must be even"),
        (
            lambda: LatentSpec(heads=1, q_rank=None, kv_rank=8, nope_dim=8, rope_dim=3, value_dim=8),
            "rope_dim=3",
        ),
        (lambda: ExpertsSpec(count=4, per_token=5, size=8), "per_token=5 and count=4"),
        (lambda: ExpertsSpec(count=65_535, per_token=1, size=8), "count=65535"),
        (lambda: ExpertsSpec(count=6, per_token=1, size=8, groups=4), "6 experts cannot be chosen from 1 of 4 groups"),
        (lambda: ExpertsSpec(count=4, per_token=1, size=8, groups=2, top_groups=3), "3 of 2 groups"),
        (lambda: ExpertsSpec(count=8, per_token=5, size=8, groups=2, top_groups=1), "too few for per_token=5"),
        (lambda: ExpertsSpec(count=4, per_token=1, size=8, groups=4, top_groups=2), "groups of 1 experts"),
        (lambda: replace(TINY, sparse_layers=(1, 0)), "must ascend"),
        (lambda: replace(TINY, sparse_layers=(0, 2)), "within the 2 layers"),
        (lambda: replace(TINY, sparse_layers=()), "0 sparse layers"),
        (lambda: replace(TINY, experts=None), "2 sparse layers, but experts=None"),
        (lambda: replace(TINY, dense_size=8), "0 of 2 layers are dense, but dense_size=8"),
        (lambda: replace(TINY_DENSE, dense_size=0), "2 of 2 layers are dense"),
        (lambda: replace(TINY, rope=RopeSpec(interleaved=True)), "latent attention only"),
        (
            lambda: GroupedSpec(heads=2, kv_heads=2, head_dim=16, rotary_dim=18),
            "rotary_dim=18 must be even and within head_dim=16",
        ),
        (lambda: WindowSpec(size=0, layers=(0,)), "a window of 0 positions"),
        (lambda: WindowSpec(size=4, layers=(1, 0)), "layers (1, 0)"),
        (lambda: replace(TINY, window=WindowSpec(size=4, layers=(2,))), "within the 2 layers"),
        (lambda: replace(TINY_LATENT, window=WindowSpec(size=4, layers=(0,))), "grouped attention only"),
        (lambda: sharpened(TINY_LATENT), "sharpness=2.0, but the rope asks for 1.0"),
    ],
)
def test_contradictions_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def sharpened(spec: ModelSpec) -> ModelSpec:
    assert isinstance(spec.attention, LatentSpec)
    return replace(spec, attention=replace(spec.attention, sharpness=2.0))
