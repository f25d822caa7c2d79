"""The parity gate passes where both sides are the same, and names where they are not."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.models.decoder import Decoder
from etude.models.spec import TINY, TINY_LATENT, ModelSpec
from etude.run.fleet_plan import is_gated_early
from etude.run.folder import RunFolder
from etude.run.numerics import load_published, published_state, serving_model, training_model
from etude.run.parity import (
    PROMPTS,
    WAYS,
    LayerDifference,
    Parity,
    check_parity,
    compare_layers,
    gate,
    sample,
    show_parity,
    verdict,
)
from etude.run.weight_log import open_log
from etude.trainer.mismatch import Mismatch, MismatchLevel
from etude.types import Json
from phases import run_phases
from waiting import wait_until

torch.set_num_threads(1)
INVARIANT, FAST = NumericsConfig(arithmetic="invariant"), NumericsConfig(arithmetic="fast")


def make_state(spec: ModelSpec, numerics: NumericsConfig) -> dict[str, Tensor]:
    model = training_model(spec, numerics, "cpu")
    assert isinstance(model, Decoder)
    model.initialise(0, std=0.2)
    return published_state(model, numerics)


@pytest.mark.parametrize(
    "spec", [TINY, TINY_LATENT, replace(TINY_LATENT, draft=True)], ids=["grouped", "latent", "draft head"]
)
def test_invariant_arithmetic_is_equal_to_the_last_bit_in_every_layer_and_way(spec: ModelSpec) -> None:
    parity = check_parity(spec, make_state(spec, INVARIANT), INVARIANT, "cpu")
    assert parity.exact
    assert parity.passed
    assert parity.sampled.tokens == parity.sampled.equal >= 200
    assert len(parity.layers) == (2 * spec.layers + 1) * len(WAYS)
    assert {layer.max_abs for layer in parity.layers} == {0.0}
    assert [layer.flips for layer in parity.layers if layer.flips is not None] == [0] * len(spec.sparse_layers) * 3


def test_fast_arithmetic_passes_by_the_ladder_and_replays_routes() -> None:
    parity = check_parity(TINY, make_state(TINY, FAST), FAST, "cpu")
    assert parity.passed
    assert not parity.exact
    assert parity.mismatch_level is MismatchLevel.CLEAR
    assert 0 < parity.sampled.max < 1e-3
    assert parity.sampled.pairs == parity.sampled.tokens * 4
    strict = FAST.model_copy(update={"warn_k3": 1e-30, "stop_k3": 1e-30})
    assert not check_parity(TINY, make_state(TINY, strict), strict, "cpu").passed


@pytest.mark.parametrize(
    ("tampered", "first"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "layer 1 attention"),
        ("model.layers.0.mlp.gate.weight", "layer 0 feed-forward"),
        ("model.norm.weight", "final norm"),
    ],
)
def test_the_first_part_that_differs_is_named(tampered: str, first: str) -> None:
    state = make_state(TINY, INVARIANT)
    trainer, server = training_model(TINY, INVARIANT, "cpu"), serving_model(TINY, INVARIANT, "cpu")
    assert isinstance(trainer, Decoder)
    load_published(trainer, state, INVARIANT)
    load_published(server, {**state, tampered: -state[tampered]}, INVARIANT)
    sequences = [trajectory.token_ids for trajectory in sample(server, record_routes=False)]
    layers = compare_layers(trainer, server, sequences)
    parity = Parity(invariant=True, mismatch_level=MismatchLevel.CLEAR, sampled=NOTHING, layers=layers)
    assert parity.first is not None
    assert parity.first.name == first
    assert not parity.passed
    if "gate" in tampered:
        assert parity.first.flips
    assert f"{first} (decode) is the first" in verdict(parity)


NOTHING = Mismatch(tokens=0, k1=0.0, k3=0.0, p99=0.0, max=0.0, equal=0)


def test_conversations_have_two_turns_that_share_a_prefix() -> None:
    model = serving_model(TINY, INVARIANT, "cpu")
    load_published(model, make_state(TINY, INVARIANT), INVARIANT)
    trajectories = sample(model, record_routes=True)
    assert [trajectory.turn_starts[0] for trajectory in trajectories] == list(PROMPTS)
    assert all(len(trajectory.turn_starts) == 2 for trajectory in trajectories)
    assert all(trajectory.routes is not None for trajectory in trajectories)


def test_a_model_with_too_few_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="max_positions=64"):
        check_parity(replace(TINY, max_positions=64), {}, INVARIANT, "cpu")


def _parity(*, invariant: bool, mismatch_level: MismatchLevel, equal: float) -> Parity:
    layer = LayerDifference(name="layer 0 attention", way="chunks", max_abs=1 - equal, equal=equal, flips=3)
    sampled = Mismatch(tokens=200, k1=0.0, k3=2e-3, p99=0.1, max=0.2, equal=200 if equal == 1 else 10)
    return Parity(invariant=invariant, mismatch_level=mismatch_level, sampled=sampled, layers=(layer,))


@pytest.mark.parametrize(
    ("parity", "passed", "words"),
    [
        (_parity(invariant=True, mismatch_level=MismatchLevel.CLEAR, equal=1.0), True, "agree to the last bit"),
        (
            _parity(invariant=True, mismatch_level=MismatchLevel.CLEAR, equal=0.5),
            False,
            "differ although the arithmetic is invariant",
        ),
        (_parity(invariant=False, mismatch_level=MismatchLevel.CLEAR, equal=0.5), True, "trainer agree;"),
        (_parity(invariant=False, mismatch_level=MismatchLevel.WARN, equal=0.5), True, "agree badly"),
        (_parity(invariant=False, mismatch_level=MismatchLevel.STOP, equal=0.5), False, "disagree"),
    ],
)
def test_the_verdict_is_told_and_decides(parity: Parity, passed: bool, words: str) -> None:
    assert parity.passed is passed
    console = Console(width=200, file=StringIO(), color_system=None)
    with console.capture() as captured:
        show_parity(parity, console)
    text = captured.get()
    assert words in text
    assert ("layer 0 attention (chunks)" in text) == (parity.first is not None)


def test_nearly_equal_is_never_shown_as_equal() -> None:
    console = Console(width=200, file=StringIO(), color_system=None)
    with console.capture() as captured:
        show_parity(
            _parity(invariant=False, mismatch_level=MismatchLevel.CLEAR, equal=math.nextafter(1.0, 0.0)), console
        )
    assert "99.9%" in captured.get()
    assert "100" not in captured.get()


def recipe(**sections: dict[str, Json]) -> RunConfig:
    shape: Json = {"vocab_size": 400, "hidden_size": 32, "layers": 1, "experts": 2, "expert_size": 16}
    tree: dict[str, Json] = {
        "tasks": {"options": {"kinds": ["arith"]}},
        "model": {"shape": shape},
        "midtrain": {"tokens": 0},
        "engine": {"device": "cpu"},
        "trainer": {"device": "cpu"},
    }
    return parse_config({**tree, **sections}, source="test")


def test_a_gate_that_begins_before_the_weights_compares_random_ones_and_waits(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", recipe())
    open_log(folder)  # as the supervisor does
    printed = StringIO()
    with redirect_stdout(printed), ThreadPoolExecutor() as pool:
        waiting = pool.submit(gate, folder)
        wait_until(lambda: "to the last bit" in printed.getvalue() or waiting.done(), timeout_s=240.0)
        is_early, first = not waiting.done(), len(printed.getvalue())
        run_phases(folder)
        waiting.result(60)
    assert is_early
    random, published = printed.getvalue()[:first], printed.getvalue()[first:]
    assert random.startswith("random weights:")
    assert "published weights:" in published and "to the last bit" in published


@pytest.mark.parametrize(
    ("sections", "is_early"),
    [
        ({}, True),
        ({"engine": {"device": "cuda"}}, False),
        ({"model": {"checkpoint": "/models/m"}}, False),
        ({"engine": {"kind": "vllm", "device": "cpu"}}, False),
    ],
)
def test_a_gate_begins_early_where_it_takes_no_room_from_mid_training(
    sections: dict[str, dict[str, Json]], is_early: bool
) -> None:
    assert is_gated_early(recipe(**sections)) is is_early
