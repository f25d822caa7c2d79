"""Our decoder is transformers' models: same checkpoints, same logits, in both directions; and the same chat tokens."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from etude.models.arithmetic import Arithmetic
from etude.models.checkpoint import load_checkpoint, load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.models.families import hf_config
from etude.models.fast import FastArithmetic
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINIEST, LatentSpec, ModelSpec
from etude.tokens.chat import ChatTemplate

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about its own future

VOCAB = 96
TOLERANCE = 1e-5

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 16}
SPARSE = GROUPED | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GLM = GROUPED | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_mtp_layers": 0}
GEMMA = GROUPED | {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
OSS = GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 13}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", GROUPED | {"tie_word_embeddings": True}),
    "qwen3 biased": ("qwen3", GROUPED | {"attention_bias": True}),
    "qwen3 yarn": ("qwen3", GROUPED | {"rope_parameters": YARN}),
    "qwen2": ("qwen2", SHAPE | {"num_key_value_heads": 2}),
    "llama": ("llama", GROUPED),
    "llama tied": ("llama", GROUPED | {"tie_word_embeddings": True, "attention_bias": True}),
    "llama llama3": (
        "llama",
        GROUPED | {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0, "original_max_position_embeddings": 32}},
    ),
    "llama linear": (
        "llama",
        GROUPED | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "mistral": ("mistral", GROUPED | {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", SPARSE | {"norm_topk_prob": True}),
    "qwen3_moe unnormalised": ("qwen3_moe", SPARSE | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3_moe every other": ("qwen3_moe", SPARSE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3 plain queries": ("deepseek_v3", LATENT | {"q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek_v3 halves": ("deepseek_v3", LATENT | {"rope_interleave": False, "n_shared_experts": 2}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 1}},
    ),
    "qwen2 window": (
        "qwen2",
        SHAPE | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3_moe window": ("qwen3_moe", SPARSE | {"use_sliding_window": True, "sliding_window": 20}),
    "mistral window": ("mistral", GROUPED | {"sliding_window": 17}),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe norms": (
        "glm4_moe",
        GLM
        | {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 2, "n_shared_experts": 2}
        | {"routed_scaling_factor": 2.5, "rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
    ),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3 scaled": (
        "gemma3_text",
        GEMMA
        | {"query_pre_attn_scalar": 24, "attention_bias": True, "sliding_window": 40}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "gpt_oss": ("gpt_oss", OSS),
    "gpt_oss plain rope": (
        "gpt_oss",
        OSS
        | {"attention_bias": False, "layer_types": ["full_attention"] * 3, "swiglu_limit": 0.5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "kimi_k2": (
        "kimi_k2",
        LATENT
        | {"n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 2.827, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_theirs(name: str, seed: int = 0) -> Any:
    """A random model of transformers with nothing at its neutral value: gains, biases and corrections, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, values = CONFIGS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model("deepseek_v3" if family == "kimi_k2" else family, **values)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter) + (1.0 if parameter.ndim == 1 else 0.0))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def load_ours(folder: Path) -> Decoder:
    spec, state = load_checkpoint(folder)
    model = Decoder(spec)
    load_state(model, state)
    return model


def make_ids(rows: int = 3, length: int = 70) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Decoder, ids: Tensor, routing: Routing | None = None) -> Tensor:
    hidden = model.forward_packed(ids.flatten(), (ids.shape[1],) * len(ids), routing)
    return model.logits(hidden).unflatten(0, ids.shape)  # type: ignore[no-any-return]  # torch leaves unflatten untyped


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    theirs, ids = make_theirs(name), make_ids()
    theirs.save_pretrained(tmp_path / "theirs")
    if CONFIGS[name][0] == "kimi_k2":  # transformers has no class of this name; the checkpoint is of the same form
        rename(tmp_path / "theirs", "kimi_k2")
    ours = load_ours(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(ids).logits
    assert expected.std() > 0.05  # not all alike
    assert (logits(ours, ids) - expected).abs().max() < TOLERANCE

    # and back: what we save is theirs again
    from transformers import AutoModelForCausalLM

    save_checkpoint(tmp_path / "ours", ours.spec, state_of(ours), end_id=2, pad_id=0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert again.dtype is torch.float32
    with torch.no_grad():
        assert torch.equal(again(ids).logits, expected)
    assert load_checkpoint(tmp_path / "ours")[0] == ours.spec


@pytest.mark.parametrize("name", ["glm4_moe norms", "gemma3 scaled", "gpt_oss", "mistral window"])
@pytest.mark.parametrize("arithmetic", [FastArithmetic(), InvariantArithmetic()], ids=["fast", "invariant"])
def test_gradients_equal_transformers(tmp_path: Path, name: str, arithmetic: Arithmetic) -> None:
    theirs, ids = make_theirs(name), make_ids().clamp(min=1)  # Gemma's embedding of padding, 0, learns nothing there
    theirs.save_pretrained(tmp_path)
    ours = load_ours(tmp_path)
    ours.arithmetic = arithmetic
    hidden = ours.forward_packed(ids.flatten(), (ids.shape[1],) * len(ids))
    for outputs in (ours.logits(hidden), theirs(ids).logits.flatten(0, 1)):
        functional.cross_entropy(outputs, ids.flatten().roll(-1)).backward()
    gradients = Decoder(ours.spec)  # their gradients, where ours would be
    load_state(gradients, state_of_gradients(theirs, gradients))
    for (place, ours_), theirs_ in zip(ours.named_parameters(), gradients.parameters(), strict=True):
        assert ours_.grad is not None
        assert (ours_.grad - theirs_).norm() < 1e-4 * theirs_.norm() + 1e-7, place


def state_of_gradients(theirs: Any, ours: Decoder) -> dict[str, Tensor]:
    """The gradients of transformers' parameters by the names of our state."""
    theirs_ = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    state = {}
    for name, view in state_of(ours).items():
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if name in theirs_:
            state[name] = theirs_[name]
        elif expert is None:  # a buffer
            state[name] = view
        elif expert[3] == "down":
            state[name] = theirs_[f"{expert[1]}.down_proj"][int(expert[2])]
        else:
            gate, up = theirs_[f"{expert[1]}.gate_up_proj"][int(expert[2])].chunk(2)
            state[name] = gate if expert[3] == "gate" else up
    return state


def rename(folder: Path, family: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": family}))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe unnormalised", "deepseek_v3", "kimi_k2"])
def test_replaying_their_routes_gives_their_logits(tmp_path: Path, name: str) -> None:
    theirs, ids = make_theirs(name), make_ids()
    theirs.save_pretrained(tmp_path)
    ours = load_ours(tmp_path)
    own = Routing(record=True)
    before = logits(ours, ids, own)
    replayed = Routing(replay=own.recorded(), floor=1.0)
    assert torch.equal(logits(ours, ids, replayed), before)
    assert (replayed.flips, replayed.replaced) == (0, 0)
    assert replayed.pairs == own.recorded().numel()

    chosen = hooked_routes(theirs, ids)
    assert torch.equal(chosen.sort(-1).values, own.recorded().sort(-1).values)
    with torch.no_grad():
        expected = theirs(ids).logits
    assert (logits(ours, ids, Routing(replay=chosen)) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def hooked_routes(model: Any, ids: Tensor) -> Tensor:
    """[N, sparse layers, k] the experts that transformers' routers chose."""
    chosen: list[Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    handles = [gate.register_forward_hook(lambda _module, _inputs, out: chosen.append(out[2])) for gate in gates]
    model(ids)
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1)


def test_checkpoints_of_transformers_4_say_the_same(tmp_path: Path) -> None:
    theirs = make_theirs("deepseek_v3 yarn")
    theirs.save_pretrained(tmp_path)
    spec, _ = load_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    file.write_text(json.dumps(config))
    assert load_checkpoint(tmp_path)[0] == spec
    assert isinstance(spec.attention, LatentSpec)
    assert spec.attention.sharpness > 1.0


def test_a_split_checkpoint_is_one(tmp_path: Path) -> None:
    theirs, ids = make_theirs("deepseek_v3"), make_ids()
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.no_grad():
        assert (logits(load_ours(tmp_path), ids) - theirs(ids).logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("spec", TINIEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_round_trips_bit_for_bit(tmp_path: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    model, other = Decoder(spec).to(dtype), Decoder(spec).to(dtype)
    model.initialise(1)
    other.initialise(2)
    save_checkpoint(tmp_path, spec, state_of(model), end_id=2, pad_id=0)
    result, state = load_checkpoint(tmp_path)
    load_state(other, state)
    assert result == spec
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("spec", TINIEST)
def test_transformers_knows_every_setting_that_we_write(spec: ModelSpec) -> None:
    from transformers import AutoConfig

    config = hf_config(spec)
    theirs = AutoConfig.for_model(str(config.pop("model_type")), **config)
    assert theirs.num_hidden_layers == spec.layers
    rope = theirs.rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == spec.rope.theta


def test_the_chat_template_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chat = ChatTemplate.train(["fix f in util.py\n    return a + b"] * 10, vocab_size=300)
    chat.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "fix f in util.py"}, {"role": "assistant", "content": "read util.py"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ours = [i for message in messages for i in chat.render_message(message["role"], message["content"])]
    assert list(rendered) == ours + chat.generation_prompt()
