"""Predicted speeds agree with measurements on an H200 (docs/gpu.md), from bytes and operations alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine.card import QWEN3_8B
from etude.models.checkpoint import load_spec
from etude.models.spec import GroupedSpec, ModelSpec
from etude.run.hardware import load_gpus
from etude.run.roofline import DecodeStep, Rates, TrainingStep, measured_rates

H200 = Rates.of_gpu(load_gpus()["h200"].kind)
QWEN3_30B = load_spec(Path(__file__).parents[3] / "recipes" / "gpu-30b-a3b")
QWEN3_2B = replace(
    QWEN3_8B,
    hidden_size=2048,
    layers=28,
    attention=GroupedSpec(heads=16, kv_heads=8, head_dim=128, normed=True),
    dense_size=6144,
    tied=True,
)


@pytest.mark.parametrize(
    ("spec", "context", "measured_ms"),
    [(QWEN3_8B, 93, 7.2), (QWEN3_8B, 8052, 28.6), (QWEN3_30B, 93, 29.0)],
    ids=["8b", "8b-long", "30b-a3b"],
)
def test_a_decode_step_takes_what_it_took(spec: ModelSpec, context: int, measured_ms: float) -> None:
    step = DecodeStep.of(spec, batch=64, context=context, item=2)
    assert step.seconds(H200) * 1e3 == pytest.approx(measured_ms, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "recomputes", "measured"),
    [(QWEN3_2B, True, 0.41), (replace(QWEN3_8B, layers=8), True, 0.44), (replace(QWEN3_8B, layers=8), False, 0.50)],
    ids=["1.7b", "eight-layers", "eight-layers-all-saved"],
)
def test_a_training_step_uses_the_share_of_the_peak_that_it_used(
    spec: ModelSpec, recomputes: bool, measured: float
) -> None:
    step = TrainingStep.of(spec, tokens=32_768, length=2048, recomputes=recomputes)
    assert step.utilisation(H200) == pytest.approx(measured, rel=0.1)


def test_where_every_part_reaches_the_device_the_share_is_one() -> None:
    step = DecodeStep.of(QWEN3_8B, batch=1, context=1024, item=2)
    assert step.bandwidth_share(measured_rates(bytes_per_s=1e12, flops=1e18)) == pytest.approx(1.0)


def test_ranks_send_blocks_and_gradients_and_one_alone_sends_nothing() -> None:
    alone, many = (
        TrainingStep.of(QWEN3_8B, tokens=4096, length=2048, recomputes=True, ranks=ranks) for ranks in (1, 8)
    )
    assert alone.sent_bytes == 0
    assert many.sent_bytes > 8 * 7e9, "two bytes twice, and gradients of four, of seven billion"
