"""Exports: files valid by Harbor's own schema, and pages that show a model's text as text only."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from etude.dashboard.rollout_export import to_harbor, to_html
from etude.dashboard.rollouts import ReadCall, ReadLine, ReadRollout, ReadSummary, ReadToken, ReadTurn
from etude.types import Hint

SCHEMA = Path(__file__).parents[2] / "support" / "atif_1_8.json"
"""The JSON schema of ``harbor.models.trajectories.Trajectory`` of harbor 0.26.0, without its descriptions."""
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202egnp.exe\x00<!-- ]]> &amp; \"'"
TOKENS = tuple(
    ReadToken(
        token_id=number, text=text, logprob=-0.5 * number, version=3, mismatch=None, kept=None, routes=None,
        advantage=0.5, has_loss=True,
    )
    for number, text in enumerate(("edit", " f.py", "<script>"))
)  # fmt: skip
CALL = ReadCall(
    tool="edit", arguments={"path": "f.py", "line": "2", "text": "x"}, path="f.py",
    diff=(ReadLine(mark="-", number=2, text=HOSTILE), ReadLine(mark="+", number=2, text="x")),
)  # fmt: skip
FIRST = ReadTurn(
    number=0, kind="act", continues=None, heard="fix f", said="edit f.py 2\nx", thinking="hm", content="edit f.py 2\nx",
    calls=(CALL,), finish="stop", temperature=1.0, prompt_tokens=20, new_tokens=20, sampled_tokens=3, versions={3: 3},
    reward=0.5, hint=Hint(turn=0, text="mind line 2", source="rule"), advantage=0.5, loss_tokens=3, summary=None,
    tokens=TOKENS,
)  # fmt: skip
SECOND = replace(
    FIRST, number=1, kind="summary", continues=0, heard=f"ok {HOSTILE}", thinking="", calls=(), reward=None, hint=None,
    prompt_tokens=30, new_tokens=7, tokens=None,
    summary=ReadSummary(scratch=HOSTILE, text="x", tokens_before=30, tokens_after=9, facts={}),
)  # fmt: skip
THIRD = replace(SECOND, number=2, kind="act", continues=None, heard="fix f\nsummary 1\nx", summary=None)
ROLLOUT = ReadRollout(
    rollout_id="3f2a" * 8, purpose="train", group=12, slot=3, attempt=0, step=5, group_state="consumed", task_id="a1",
    epoch=1, template=HOSTILE, prompt="fix f", files=(), status="graded", reason=HOSTILE, reward=1.0, parts=(),
    counts={"edit": 1}, seconds=4.2, verdict=None, votes=(), branch_of="77" * 16, branch_turns=1, comparison=None,
    turns=(FIRST, SECOND, THIRD), notes=("one is missing",),
)  # fmt: skip


def trajectory(rollout: ReadRollout) -> dict[str, Any]:
    """A trajectory that was validated with Harbor's schema."""
    made = to_harbor(rollout, agent="coding", version="1.0", model="tiny")
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(made)
    return dict(json.loads(json.dumps(made)))


def test_a_trajectory_has_a_step_for_each_context_and_each_reply() -> None:
    made = trajectory(ROLLOUT)
    steps = made["steps"]
    assert made["schema_version"] == "ATIF-v1.8"
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["source"] for step in steps] == ["user", "agent", "agent", "user", "agent"]
    act, summary = steps[1], steps[2]
    assert act["tool_calls"] == [
        {"tool_call_id": "turn-0-call-0", "function_name": "edit", "arguments": dict(CALL.arguments)}
    ]
    assert act["observation"]["results"] == [{"content": f"ok {HOSTILE}", "source_call_id": "turn-0-call-0"}]
    assert (act["reasoning_content"], act["extra"]["hint"]["text"]) == ("hm", "mind line 2")
    assert act["metrics"]["completion_token_ids"] == [0, 1, 2]
    assert act["metrics"]["logprobs"] == [0.0, -0.5, -1.0]
    assert "completion_token_ids" not in summary["metrics"]
    assert "observation" not in summary
    assert made["final_metrics"] == {
        "total_prompt_tokens": 80, "total_completion_tokens": 9, "total_cached_tokens": 46, "total_steps": 5,
    }  # fmt: skip


def test_steps_that_another_rollout_sampled_are_copied_context() -> None:
    steps = trajectory(ROLLOUT)["steps"]
    assert [step.get("is_copied_context", False) for step in steps] == [True, True, False, False, False]


def test_a_rollout_that_ended_before_its_first_turn_is_a_trajectory_too() -> None:
    made = trajectory(replace(ROLLOUT, turns=(), reward=None, status="failed_infra", branch_of=None, branch_turns=0))
    assert made["steps"] == [{"step_id": 1, "source": "user", "message": "fix f"}]


class Tags(HTMLParser):
    """Reads the tags and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_hostile_words_and_runs_none() -> None:
    page = to_html(ROLLOUT)
    read = Tags()
    read.feed(page)
    assert "script" not in read.tags
    assert not {name for name in read.attributes if name.startswith("on") or name in ("src", "style")}
    assert "default-src 'none'" in page
    assert read.text.count("<script>alert(1)</script>") >= 5
    assert not {letter for letter in page if not letter.isprintable() and letter != "\n"}
    assert r"\u202egnp.exe\x00" in read.text


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_page_shades_tokens_by_how_unlikely_they_were(level: int) -> None:
    assert f'class="l{int(0.5 * level / 0.75)}" title="{-0.5 * level:.3f}, v3"' in to_html(ROLLOUT)
