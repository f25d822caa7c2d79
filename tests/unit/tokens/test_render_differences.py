"""Differences of a prompt that a server renders anew are found and named."""

import pytest

from chat_formats import TEMPLATES, every_format, make_jinja
from etude.tokens.messages import ChatFormat
from etude.tokens.render_differences import rendered_differently

THOUGHTS = "earlier thoughts are left out at the next user's message"
TOOLS_MOVE = "what stands before the first message changes at the next user's message"
LEFT_OUT = "other tokens stand behind the reply at a second tool's result"


@pytest.fixture(scope="module")
def formats() -> dict[str, ChatFormat]:
    r1 = make_jinja((TEMPLATES / "r1.jinja").read_text(), "<｜end▁of▁sentence｜>")
    return every_format() | {"r1": r1}


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("ours", []),
        ("llama", []),
        ("kimi", []),
        ("qwen", [THOUGHTS]),
        ("deepseek", [f"{THOUGHTS} and at a tool's result"]),
        ("mistral", [TOOLS_MOVE]),
        ("r1", [f"{THOUGHTS} and at a tool's result", LEFT_OUT]),
    ],
)
def test_what_a_fresh_rendering_changes_is_named(
    name: str, differences: list[str], formats: dict[str, ChatFormat]
) -> None:
    assert rendered_differently(formats[name]) == differences
