"""Chat formats of many makes over one tiny tokenizer: the templates of six families of models, and étude's own."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import Checkpoint, JinjaFormat
from etude.tokens.messages import ChatFormat

TEMPLATES = Path(__file__).parents[1] / "unit" / "tokens" / "templates"
FAMILIES = ("qwen", "coder", "llama", "mistral", "deepseek", "kimi")
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
)
ENDS = {"llama": "<|eot_id|>", "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>"}


def make_tokenizer() -> Tokenizer:
    """One that knows every special token of the templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant system fix edit reminder"] * 9, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    return tokenizer


def make_jinja(source: str, end: str) -> JinjaFormat:
    """The format of a template whose replies end with the token ``end``."""
    tokenizer = make_tokenizer()
    variables = {"bos_token": "<s>", "eos_token": end}
    end_id = tokenizer.token_to_id(end)
    assert end_id is not None
    return JinjaFormat(
        Checkpoint(tokenizer=tokenizer, templates={"default": source}, variables=variables, stop_ids=(end_id,))
    )


def every_format() -> dict[str, ChatFormat]:
    """Name → format; "ours" is étude's own."""
    result: dict[str, ChatFormat] = {
        name: make_jinja((TEMPLATES / f"{name}.jinja").read_text(), ENDS.get(name, "<|im_end|>")) for name in FAMILIES
    }
    return result | {"ours": ChatTemplate.train(["fix f in f.py", "edit FILE N"], 300)}
