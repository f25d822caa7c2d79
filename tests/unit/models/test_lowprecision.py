"""Experts in eight or four bits: inputs of products, and what is published, loaded and stored."""

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import ConfigError, DamagedError, DivergedError
from etude.models.lowprecision import (
    EXPERT_FORMATS,
    FP8,
    MXFP8,
    NVFP4,
    ExpertFormat,
    dequantised_state,
    is_routed_expert,
    quantised_state,
    quantization_config,
)
from etude.objects import ObjectStore
from etude.types import TensorSpec
from etude.weights.digest import state_digest
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher
from etude.weights.pull import pull
from etude.weights.state import State, StoredTensor

ALL = tuple(EXPERT_FORMATS.values())
STORED = MappingProxyType(
    {
        torch.float32: "F32",
        torch.uint8: "U8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
)

each_format = pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@each_format
def test_a_row_depends_on_itself_alone(form: ExpertFormat) -> None:
    x_RI = torch.randn(70, 100, generator=torch.Generator().manual_seed(0)).exp()
    batched = form.activation(x_RI)
    for row in range(0, 70, 9):
        assert torch.equal(form.activation(x_RI[row : row + 1])[0], batched[row])
        assert torch.equal(form.activation(x_RI[: row + 1])[row], batched[row])
    assert form.activation(x_RI[:0]).shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_format
def test_gradients_pass_straight_through(form: ExpertFormat, dtype: torch.dtype) -> None:
    x_RI = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    w_EOI = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    x, w = form.activation(x_RI), form.weight(w_EOI, parts=2)
    assert x.dtype == w.dtype == dtype
    assert not torch.equal(x, x_RI)
    factor_x, factor_w = torch.rand_like(x), torch.rand_like(w)
    ((x * factor_x).sum() + (w * factor_w).sum()).backward()
    assert x_RI.grad is not None and torch.equal(x_RI.grad, factor_x)
    assert w_EOI.grad is not None and torch.equal(w_EOI.grad, factor_w)
    with torch.no_grad():
        assert torch.equal(form.activation(x_RI), x)
    assert torch.equal(form.activation(x_RI.detach()), x)


def test_fused_matrices_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 matrices .* 8 rows"):
        FP8.weight(torch.ones(1, 8, 4), parts=3)


# ── published weights ───────────────────────────────────────────────────────────────────────────────────────────────

HIDDEN, INNER, EXPERTS = 160, 136, 3


def expert_name(expert: int, projection: str) -> str:
    return f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight"


def make_state(seed: int = 0) -> dict[str, Tensor]:
    """The state of one sparse layer, whose experts are larger than a 128 × 128 block and no multiple of it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (20, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (INNER, HIDDEN),
        **{expert_name(e, p): (INNER, HIDDEN) for e in range(EXPERTS) for p in ("gate", "up")},
        **{expert_name(e, "down"): (HIDDEN, INNER) for e in range(EXPERTS)},
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stored(state: dict[str, Tensor]) -> State:
    return {
        name: StoredTensor(
            spec=TensorSpec(name=name, dtype=STORED[tensor.dtype], shape=tuple(tensor.shape)),
            data=tensor.contiguous().view(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in state.items()
    }


def tensors(state: State) -> dict[str, Tensor]:
    types = {name: dtype for dtype, name in STORED.items()}
    return {
        name: torch.from_numpy(one.data.copy()).view(types[one.spec.dtype]).view(one.spec.shape)
        for name, one in state.items()
    }


@each_format
def test_an_engine_decodes_what_the_trainer_computes_with(form: ExpertFormat) -> None:
    state = make_state()
    decoded = dequantised_state(quantised_state(state, form), form)
    assert decoded.keys() == state.keys()
    gate_up = torch.stack([torch.cat([state[expert_name(e, p)] for p in ("gate", "up")]) for e in range(EXPERTS)])
    down = torch.stack([state[expert_name(e, "down")] for e in range(EXPERTS)])
    for fused, parts, projections in ((gate_up, 2, ("gate", "up")), (down, 1, ("down",))):
        seen_by_trainer = form.weight(fused.requires_grad_(), parts=parts).detach()
        seen_by_engine = torch.stack(
            [torch.cat([decoded[expert_name(e, p)] for p in projections]) for e in range(EXPERTS)]
        )
        assert torch.equal(seen_by_trainer, seen_by_engine)
        assert torch.equal(form.weight(seen_by_engine, parts=parts), seen_by_engine)
    assert all(decoded[name] is state[name] for name in state if not is_routed_expert(name))


@each_format
def test_what_is_published_and_loaded_publishes_the_same_bytes(form: ExpertFormat) -> None:
    published = quantised_state(make_state(), form)
    again = quantised_state(dequantised_state(published, form), form)
    assert state_digest(stored(again)) == state_digest(stored(published))


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (FP8, {"weight": ("F8_E4M3", (INNER, HIDDEN)), "weight_scale_inv": ("F32", (2, 2))}),
        (MXFP8, {"weight": ("F8_E4M3", (INNER, HIDDEN)), "weight_scale": ("F8_E8M0", (INNER, 5))}),
        (
            NVFP4,
            {
                "weight": ("U8", (INNER, HIDDEN // 2)),
                "weight_scale": ("F8_E4M3", (INNER, 10)),
                "weight_scale_2": ("F32", ()),
            },
        ),
    ],
    ids=["fp8", "mxfp8", "nvfp4"],
)
def test_checkpoint_tensors_are_named_and_typed_as_others_read_them(
    form: ExpertFormat, expected: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    state = make_state()
    published = quantised_state(state, form)
    stem = expert_name(1, "gate").removesuffix("weight")
    quantised = {name.removeprefix(stem): tensor for name, tensor in published.items() if name.startswith(stem)}
    assert {last: (STORED[tensor.dtype], tuple(tensor.shape)) for last, tensor in quantised.items()} == expected
    left_alone = [name for name in state if not is_routed_expert(name)]
    assert len(left_alone) == 4
    assert all(published[name] is state[name] for name in left_alone)


def test_gate_and_up_share_their_second_scale() -> None:
    state = make_state()
    state[expert_name(0, "up")] *= 100
    published = quantised_state(state, NVFP4)
    gate, up, down = (published[expert_name(0, p) + "_scale_2"] for p in ("gate", "up", "down"))
    assert torch.equal(gate, up)
    assert float(down) < float(up) / 20


def test_an_up_projection_without_a_gate_is_published_too() -> None:
    state = {name: tensor for name, tensor in make_state().items() if ".gate_proj." not in name}
    for form in ALL:
        assert dequantised_state(quantised_state(state, form), form).keys() == state.keys()


@each_format
def test_the_weight_store_and_safetensors_carry_every_type(form: ExpertFormat, tmp_path: Path) -> None:
    states = [stored(quantised_state(make_state(), form))]
    nudged = {name: tensor * 1.01 for name, tensor in make_state().items()}
    states.append(stored(quantised_state(nudged, form)))
    log = WeightLog(ObjectStore("memory://"))
    with Publisher(log) as publisher:
        for version, state in enumerate(states):
            publisher.publish(state, version=version, step=version).result(60)
    for version, state in enumerate(states):
        pulled = pull(log, version)
        assert pulled.digest == state_digest(state)
        assert_same_state(tensors(pulled.state), tensors(state))
    save_file(tensors(states[0]), tmp_path / "model.safetensors")
    assert_same_state(load_file(tmp_path / "model.safetensors"), tensors(states[0]))


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape
        assert torch.equal(actual[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_format
def test_weights_that_are_not_finite_are_not_published(form: ExpertFormat, bad: float) -> None:
    state = make_state()
    state[expert_name(2, "up")][3, 4] = bad
    with pytest.raises(DivergedError, match=r"1 of 21760 weights .*experts\.2\.up_proj"):
        quantised_state(state, form)


def test_four_bit_matrices_of_odd_width_are_not_published() -> None:
    state = {expert_name(0, "down"): torch.ones(4, 33)}
    with pytest.raises(ConfigError, match=r"33 columns[\s\S]*even"):
        quantised_state(state, NVFP4)
    assert torch.equal(
        dequantised_state(quantised_state(state, MXFP8), MXFP8)[expert_name(0, "down")], torch.ones(4, 33)
    )


@each_format
def test_damaged_states_are_refused_by_name(form: ExpertFormat) -> None:
    published = quantised_state(make_state(), form)
    scale = expert_name(1, "down").removesuffix("weight") + form.scale_name
    with pytest.raises(DamagedError, match=rf"experts\.1\.down_proj\.{form.scale_name}.*missing"):
        dequantised_state({name: tensor for name, tensor in published.items() if name != scale}, form)
    with pytest.raises(DamagedError, match=rf"experts\.1\.down_proj\.{form.scale_name}.*\[3, 4\]"):
        dequantised_state({**published, scale: published[scale].new_ones(3, 4)}, form)
    with pytest.raises(DamagedError, match=r"experts\.0\.gate_proj\.weight'.*float32"):
        dequantised_state(make_state(), form)


def test_config_says_what_is_quantised_as_deepseek_does() -> None:
    state = make_state()
    assert quantization_config(state, FP8) == quantization_config(quantised_state(state, FP8), FP8)
    assert quantization_config(state, FP8) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "model.embed_tokens",
            "model.layers.0.mlp.gate",
            "model.layers.0.mlp.shared_experts.up_proj",
        ],
    }
    assert [quantization_config(state, form)["quant_algo"] for form in (MXFP8, NVFP4)] == ["MXFP8", "W4A16_NVFP4"]
