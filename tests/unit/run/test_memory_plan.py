"""A run's need of memory is computed before it is made, part by part, also for GPUs of other machines."""

import pytest
import torch
from torch import Tensor

from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, UserError
from etude.models.adapters import attach
from etude.models.arithmetic import AttentionRule, packed_rows
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic
from etude.models.sizes import ModelSizes, saved_bytes
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ModelSpec
from etude.run.memory_plan import DeviceUse, MemoryPart, MemoryPlan, ProcessMemory, check_memory, device_uses
from etude.run.numerics import adapter_spec, count_parameters
from etude.run.preflight import spec_of_recipe
from etude.run.pretend import resolved_there
from etude.run.resolve import resolve

GB = 10**9


def sizes_of(process: ProcessMemory) -> dict[str, int]:
    return {part.name: part.size_bytes for part in process.parts}


def on_gpus(*settings: str) -> RunConfig:
    return resolved_there(default_recipe(["engine.device=cuda", "trainer.device=cuda", *settings]))


@pytest.mark.parametrize("spec", [TINY, TINY_DENSE, TINY_LATENT], ids=["moe", "dense", "latent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_by_formula_are_the_bytes_that_torch_keeps(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Within five hundredths, block by block."""
    length, model = 256, Decoder(spec, FastArithmetic(dtype))
    model.initialise(0)
    rows = packed_rows((length, length), torch.device("cpu"))
    (rotary,) = model.rotary
    rotation = rotary(rows.positions_N)
    lasting = (*model.parameters(), rotation.cosines_ND, rotation.sines_ND)  # all blocks share the tables
    own = {tensor.untyped_storage().data_ptr() for tensor in lasting}

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        return model.arithmetic.attend_packed(q, k, v, rows, rule)

    for layer, block in enumerate(model.blocks):
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        x = torch.randn(2 * length, spec.hidden_size, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(x, model.arithmetic, rotation, attend, None)
        measured = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)
        formula = 2 * length * saved_bytes(spec, layer, item=dtype.itemsize, fused=False, length=length)
        assert formula == pytest.approx(measured, rel=0.05), f"block {layer}"


@pytest.mark.parametrize("spec", [TINY, TINY_DENSE, TINY_LATENT], ids=["moe", "dense", "latent"])
def test_parameters_are_counted_by_part(spec: ModelSpec) -> None:
    sizes = ModelSizes.of(spec)
    assert sizes.total == count_parameters(spec)
    assert bool(sum(sizes.routed)) == (spec.experts is not None)


def test_state_is_sharded_over_ranks_and_moments_are_as_the_recipe_keeps_them() -> None:
    settings = ["model.shape.layers=2", "parallel.dp=4"]
    config = on_gpus(*settings)
    spec = spec_of_recipe(config)
    own = count_parameters(spec) / 4
    parts = sizes_of(MemoryPlan.of(config, spec).trainer)
    assert [parts[name] / own for name in ("parameters", "gradients", "moments")] == pytest.approx([4, 4, 8], rel=0.01)
    assert parts["gathered weights"] > 0
    for state, bytes_each in (("8bit", 2), ("offload", 0)):
        saved = sizes_of(MemoryPlan.of(on_gpus(*settings, f"optimiser.state={state}"), spec).trainer)["moments"]
        assert saved == pytest.approx(bytes_each * own, rel=0.01)


def test_recomputed_activations_are_one_state_per_token_and_block() -> None:
    saved, recomputed = (
        MemoryPlan.of(config, spec_of_recipe(config)).trainer
        for config in (on_gpus(), on_gpus("trainer.checkpoint_activations=true"))
    )
    shape = spec_of_recipe(on_gpus())
    assert sizes_of(recomputed)["activations"] == shape.layers * 12_000 * shape.hidden_size * 2
    assert sizes_of(saved)["activations"] > 5 * sizes_of(recomputed)["activations"]


def test_an_engine_holds_weights_once_or_twice_and_its_cache() -> None:
    shape = ["model.shape.layers=2", "model.shape.kv_heads=3", "model.shape.heads=6", "model.shape.head_dim=8"]
    settings = [*shape, "engine.options.cache_tokens=1024", "numerics.replay=off"]
    config = on_gpus(*settings)
    spec = spec_of_recipe(config)
    parts = sizes_of(MemoryPlan.of(config, spec).engine)
    assert parts["weights"] == parts["spare weights"] == 2 * count_parameters(spec)
    assert parts["cache"] == 1024 * 2 * 3 * (8 + 8) * 2, "keys and values of two layers"
    once = sizes_of(MemoryPlan.of(on_gpus(*settings, "engine.options.spare_weights=false"), spec).engine)
    assert once["spare weights"] == 0


def test_a_vllm_whose_share_of_a_gpu_does_not_hold_one_sequence_says_which_key() -> None:
    config = on_gpus("engine.kind=vllm", "engine.max_length=4096")
    plan = MemoryPlan.of(config, spec_of_recipe(config), 80 * GB)
    assert plan.engine.problem == ""
    assert plan.engine.total == pytest.approx(0.9 * 80 * GB, rel=0.01)
    small = MemoryPlan.of(config, spec_of_recipe(config), 2 * GB)
    assert "raise engine.options.arguments.tensor-parallel-size" in small.engine.problem


def test_experts_that_a_mesh_does_not_divide_are_refused() -> None:
    config = on_gpus("parallel.dp=3")
    with pytest.raises(ConfigError, match=r"parallel\.ep = 1 of 3 ranks.*powers of two"):
        MemoryPlan.of(config, spec_of_recipe(config))


def test_a_side_that_cannot_be_held_is_refused_and_two_that_hardly_can_are_warned_of() -> None:
    trainer, engine = (
        ProcessMemory(
            name=name, count=1, gpus=1, parts=(MemoryPart(name="state", size_bytes=size, words="", key=f"{name}.key"),)
        )
        for name, size in (("trainer", 300), ("engine", 200))
    )
    both = DeviceUse(device="cpu", processes=(trainer, engine))
    with pytest.raises(UserError, match=r"cpu has 299 B of memory free.*300 B for the trainer.*trainer\.key"):
        both.compare(299)
    assert "200 B for the engine" in both.compare(499)
    assert both.compare(500) == ""


def test_processes_are_on_the_gpus_that_a_run_would_give_them() -> None:
    config = on_gpus("engine.replicas=2", "parallel.dp=2")
    plan = MemoryPlan.of(config, spec_of_recipe(config))
    placed = {use.device: [side.name for side in use.processes] for use in device_uses(config, plan, 4)}
    assert placed == {"cuda:0": ["engine"], "cuda:1": ["engine"], "cuda:2": ["trainer"], "cuda:3": ["trainer"]}
    alone = on_gpus()
    (shared,) = device_uses(alone, MemoryPlan.of(alone, spec_of_recipe(alone)), 1)
    assert [side.name for side in shared.processes] == ["trainer", "engine"]


def test_this_machine_has_memory_for_a_small_model() -> None:
    config = resolve(default_recipe(["engine.device=cpu", "trainer.device=cpu"]))
    assert check_memory(config, spec_of_recipe(config)) == []


def test_an_adapter_takes_its_own_state_and_a_base_without_gradients() -> None:
    config = on_gpus("model.checkpoint=base", "midtrain.tokens=0", "lora.rank=8", "numerics.dtype=bfloat16")
    model = Decoder(TINY)
    attach(model, adapter_spec(config), base="00" * 16)
    own = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    plan = MemoryPlan.of(config, TINY)
    parts = sizes_of(plan.trainer)
    assert [parts[name] / own for name in ("parameters", "gradients", "moments")] == [4, 4, 8]
    assert parts["frozen base"] == 2 * ModelSizes.of(TINY).total
    assert sizes_of(plan.engine)["spare weights"] == 0
