"""``bench engine``: every figure has its right name, and a contestant that fails is a row with the reason."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine.bench import Cell, Row, bench_engine, native_goals, table
from bench.engine.card import decode_speed
from bench.engine.contestants import Order, Setup
from bench.engine.models import MODELS, MOE_20M, QUICK_MODEL, load_served, write_model
from bench.engine.options import EngineOptions, engine_options
from bench.engine.worker import Load, Timing, Worker, available_cores, python_of, tree_cpu_s, tree_peak_bytes
from etude.config.inference import NumericsConfig
from etude.engines.vllm.process import PYTHON_VARIABLE
from etude.errors import InfrastructureError, UserError
from etude.models.decoder import Decoder
from etude.models.spec import TINY

LOAD = Load(batch=3, prompt_tokens=5, new_tokens=2, temperature=1.0, vocabulary=50, seed=1)


def _row(contestant: str, batch: int, *rates: float, dtype: str = "float32") -> Row:
    cell = Cell(model=MOE_20M, dtype=dtype, batch=batch, temperature=0.0)
    rounds = [Timing(tokens=int(rate), cpu_s=1.0, wall_s=1.0, first_token_s=None, peak_bytes=1) for rate in rates]
    return Row(contestant=contestant, cell=cell, rounds=tuple(rounds))


@pytest.mark.heavy("minutes, with all that a bench starts")
def test_a_call_measures_the_contestants_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    options = replace(engine_options(("native-invariant", "vllm"), quick=True), batches=(2,))
    result = bench_engine(options)
    printed = json.loads(json.dumps(result))
    native, vllm = printed["results"]
    goals = printed["goals"]
    assert native["tokens_per_cpu_s"] > 0 and native["first_token_s"] > 0
    assert "/nowhere/python" in vllm["missing"]
    assert goals["native_vs_vllm"]["met"] is False and "/nowhere/python" in goals["native_vs_vllm"]["reason"]
    assert goals["prefix_reuse"]["value"] >= 0.9
    assert set(goals) == {
        "native_vs_vllm",
        "native_vs_transformers_cb",
        "invariant_slowdown",
        "swap_pause_vs_reload",
        "prefix_reuse",
    }
    drawn = table(result)
    assert "native-invariant" in drawn and "/nowhere/python" in drawn


def test_a_worker_samples_what_was_ordered(tmp_path: Path) -> None:
    write_model(QUICK_MODEL, tmp_path / "model", seed=0)
    setup = Setup(
        contestant="native-fast", folder=str(tmp_path / "model"), dtype="bfloat16", cores=available_cores()[-1:]
    )
    order = Order(prompts=[[1, 2, 3], [4, 5, 6]], new_tokens=4, temperature=1.0, seed=7)
    with Worker(setup, tmp_path / "log") as worker:
        assert worker.await_ready()["arithmetic"] == "fast"
        first, again = worker.sample(order), worker.sample(order)
        assert [len(one["token_ids"]) for one in first] == [len(one["logprobs"]) for one in first] == [4, 4]
        assert [one["token_ids"] for one in first] == [one["token_ids"] for one in again]
        timing = worker.run(LOAD)
        assert timing.tokens == 6 and timing.cpu_s > 0 and 1e8 < timing.peak_bytes < 1e10
        with pytest.raises(InfrastructureError, match=r"native-fast ended: .*prompt"):
            worker.sample(replace(order, prompts=[[]]))


def test_equal_seeds_write_the_same_model(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_model(QUICK_MODEL, tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    served = load_served(tmp_path / "a", NumericsConfig(dtype="bfloat16"))
    assert served.spec == QUICK_MODEL.spec


def test_the_models_have_the_size_in_their_name() -> None:
    sizes = [sum(parameter.numel() for parameter in Decoder(model.spec).parameters()) / 1e6 for model in MODELS]
    assert sizes == [pytest.approx(20, rel=0.05), pytest.approx(20, rel=0.05), pytest.approx(6, rel=0.1)]


def test_no_prompt_comes_twice_and_seeds_repeat_them() -> None:
    others = [replace(LOAD, seed=2), replace(LOAD, batch=2), replace(LOAD, temperature=0.0)]
    orders = [LOAD.order(0), LOAD.order(1), *(other.order(0) for other in others)]
    prompts = [tuple(prompt) for order in orders for prompt in order.prompts]
    assert len(set(prompts)) == len(prompts) == 14
    assert LOAD.order(1) == orders[1]
    assert all(len(prompt) == 5 and 0 <= min(prompt) <= max(prompt) < 50 for prompt in prompts)


def test_cpu_seconds_count_children() -> None:
    before_s = tree_cpu_s()
    source = "import time, sys\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    living_s, peak = tree_cpu_s() - before_s, tree_peak_bytes()
    child.communicate()
    assert living_s > 0.25
    assert tree_cpu_s() - before_s > 0.25
    assert tree_peak_bytes() < peak


def test_cpu_seconds_do_not_count_waiting() -> None:
    before_s = tree_cpu_s()
    time.sleep(2.0)
    assert tree_cpu_s() - before_s < 1.0


def test_the_worst_cell_of_the_better_arithmetic_is_judged() -> None:
    rows = [
        _row("native-fast", 1, 10, 10, 10),
        _row("native-fast", 16, 200, 200, 200),
        _row("native-fast", 64, 300, 300, 300),
        _row("native-invariant", 16, 100, 250, 900),
        _row("native-invariant", 64, 400, 400, 400),
        _row("vllm", 1, 100, 100, 100),
        _row("vllm", 16, 100, 100, 300),
        _row("vllm", 64, 200, 200, 200),
    ]
    goal = native_goals({(row.contestant, row.cell): row for row in rows})["native_vs_vllm"]
    assert isinstance(goal, dict)
    assert goal["value"] == 2.0 and goal["met"] is True and goal["arithmetic"] == "invariant"
    assert goal["worst_of"] == {"native-fast": 1.5, "native-invariant": 2.0}


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InfrastructureError, match=r"\.venv-vllm/bin/python is missing"):
        python_of("vllm")


@pytest.mark.parametrize(
    "fault", [{"contestants": ("sglang",)}, {"threads": 10_000}, {"batches": (65,)}, {"new_tokens": 600}]
)
def test_options_that_measure_nothing_are_refused(fault: dict[str, tuple[str, ...] | int]) -> None:
    with pytest.raises(UserError, match="bench engine"):
        EngineOptions(**fault)  # type: ignore[arg-type]  # that is the point


def test_the_cards_measure_times_steps_in_which_all_decode() -> None:
    model = Decoder(TINY).eval()
    model.initialise(0)
    speed = decode_speed(model, batch=3, context=128)
    assert 64 < speed.context < 128
    keys_and_values = 3 * speed.context * TINY.layers * 2 * (16 + 16) * 2
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert abs(speed.least_bytes - weights - keys_and_values) < 3 * TINY.layers * 128
    assert speed.to_json(copy_bytes_per_s=speed.least_bytes / speed.step_s / 2)["share"] == 2.0
