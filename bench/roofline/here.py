"""The formula of :mod:`etude.run.roofline` on this machine's processor, beside what was measured in the same minute.

    copies ──▶ bytes per second ─┐
                                 ├──▶ least time of a decode step, of a training pass ──▶ over the measured one: share
    products ▶ operations per s ─┘

Here every part is taken to reach the machine's own rates and nothing to be fixed: a bound, which no step can beat. A
share above 1 would mean that the formula counts bytes or operations that a step does not need.
"""

from dataclasses import replace

import torch

from bench.engine.card import copy_bandwidth, decode_speed
from bench.engine.models import BenchModel
from bench.engine.worker import available_cores
from bench.memory.counter import DENSE
from bench.trainer.bench import TrainerOptions, bench_trainer
from bench.trainer.contestants import Setup, sequences
from bench.trainer.worker import matmul_peak
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.run.roofline import DecodeStep, TrainingStep, measured_rates
from etude.types import Json

SPEC: ModelSpec = replace(DENSE, hidden_size=1024, dense_size=3072, layers=8)
"""Wide enough that its own work dominates on a processor."""
BATCH, CONTEXT = 8, 256
ITEM = 4
"""Bytes of a number: float32."""
SETUP = Setup(
    contestant="etude-fast", folder="", device="cpu", dtype="float32", threads=len(available_cores()), vocabulary=4096,
    sequences=8, longest=512, microbatch_tokens=8 * 512, steps=2, seed=0,
)  # fmt: skip


def check_here() -> list[Json]:
    """Rows of a decode step and of a training step."""
    torch.set_num_threads(SETUP.threads)
    bandwidth, peak = copy_bandwidth("cpu"), matmul_peak("cpu", "float32")
    return [_decode_row(bandwidth, peak), _training_row(bandwidth)]


def _decode_row(bandwidth: float, peak: float) -> Json:
    model = Decoder(SPEC).eval()
    model.initialise(0)
    speed = decode_speed(model, batch=BATCH, context=CONTEXT)
    step = DecodeStep.of(SPEC, batch=BATCH, context=speed.context, item=ITEM)
    least = step.seconds(measured_rates(bytes_per_s=bandwidth, flops=peak))
    return _row(f"here: decode step, {BATCH} × {speed.context}", least, speed.step_s)


def _training_row(bandwidth: float) -> Json:
    model = BenchModel(name="dense, 1,024 wide", spec=SPEC)
    result = bench_trainer(TrainerOptions(contestants=(SETUP.contestant,), model=model, setup=SETUP, apart=True))
    rows = result["results"]
    assert isinstance(rows, list) and isinstance(rows[0], dict)
    if rows[0]["missing"] is not None:
        return {"case": "here: training step", "contestant": "etude", "missing": rows[0]["missing"]}
    lengths = [len(example.token_ids) for example in sequences(SETUP)]
    tokens, mean = sum(lengths), sum(length**2 for length in lengths) // sum(lengths)
    step = TrainingStep.of(SPEC, tokens=tokens, length=mean, recomputes=False)
    peak, seconds = rows[0]["peak_gflops"], rows[0]["step_s"]
    assert isinstance(peak, float) and isinstance(seconds, float)
    least = step.seconds(measured_rates(bytes_per_s=bandwidth, flops=peak * 1e9))
    return _row(f"here: training step, {tokens:,} tokens", least, seconds)


def _row(case: str, least_s: float, measured_s: float) -> Json:
    return {"case": case, "contestant": "etude", "least_ms": round(least_s * 1e3, 1), "ms": round(measured_s * 1e3, 1),
            "share": round(least_s / measured_s, 3)}  # fmt: skip
