"""A checkpoint of ours is a normal Hugging Face checkpoint: same logits, same tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.models.checkpoint import load_checkpoint, load_state, save_checkpoint, state_of
from etude.models.qwen3_moe import DENSE_EXPERTS_MAX_TOKENS, TINY, Qwen3Moe
from etude.tokens.chat import ChatTemplate

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about its own future

SPEC = replace(TINY, vocab_size=330)


def make_model(seed: int = 0) -> Qwen3Moe:
    model = Qwen3Moe(SPEC)
    model.initialise(seed)
    return model


@pytest.mark.parametrize("tokens", [DENSE_EXPERTS_MAX_TOKENS // 2, DENSE_EXPERTS_MAX_TOKENS * 2])
def test_logits_equal_transformers(tmp_path: Path, tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model()
    save_checkpoint(tmp_path, SPEC, state_of(model), end_id=2, pad_id=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SPEC.vocab_size, (2, tokens // 2))
    with torch.no_grad():
        difference = model.logits(model.forward_padded(ids)) - theirs(ids).logits
    assert difference.abs().max() < 1e-5


def test_the_chat_template_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    chat = ChatTemplate.train(["fix f in util.py\n    return a + b"] * 10, vocab_size=300)
    chat.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "fix f in util.py"}, {"role": "assistant", "content": "read util.py"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ours = [i for message in messages for i in chat.render_message(message["role"], message["content"])]
    assert list(rendered) == ours + chat.generation_prompt()


def test_a_checkpoint_round_trips_bit_for_bit(tmp_path: Path) -> None:
    model, other = make_model(1), make_model(2)
    save_checkpoint(tmp_path, SPEC, state_of(model), end_id=2, pad_id=0)
    spec, state = load_checkpoint(tmp_path)
    load_state(other, state)
    assert spec == SPEC
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_no_row_sees_another_and_no_token_its_future() -> None:
    model = make_model()
    ids = torch.randint(0, SPEC.vocab_size, (3, 40))
    changed = ids.clone()
    changed[1], changed[0, 30:] = 5, 5
    with torch.no_grad():
        before, after = model.forward_padded(ids), model.forward_padded(changed)
    assert torch.allclose(before[2], after[2], atol=1e-6)
    assert torch.allclose(before[0, :30], after[0, :30], atol=1e-6)
    assert not torch.allclose(before[0, 30:], after[0, 30:], atol=1e-3)
