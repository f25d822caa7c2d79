"""Rollouts as text on terminals of several widths, and in a pipe."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from etude.dashboard.formatting import visible
from etude.dashboard.rollout_text import group_table, overview, rollout_list, rollout_page
from etude.dashboard.rollouts import (
    ReadComparison,
    ReadPart,
    ReadRollout,
    ReadSummary,
    ReadToken,
    ReadTurn,
    ReadVote,
    to_json,
)
from etude.ledger.archive import Census, RolloutMatch, RolloutOutcome, Traits
from etude.ledger.states import GroupState
from etude.types import Disposition, Hint, Observation, ObservedSession, RolloutStatus, Verdict

TURN = ReadTurn(
    number=0, kind="act", continues=None, heard="fix f in f.py", said="read f.py", thinking="",
    content="read f.py", calls=(), finish="stop", temperature=1.0,
    prompt_tokens=120, new_tokens=20, sampled_tokens=8, versions={3: 8}, reward=None, hint=None, advantage=0.25,
    loss_tokens=8, summary=None, tokens=None,
)  # fmt: skip
SUMMARY = replace(
    TURN, number=1, kind="summary", continues=0, said="hm\nsummary\ntax 42", versions={3: 5, 4: 3}, reward=-0.5,
    finish="length", hint=Hint(turn=1, text="mind the fee", source="rule"),
    summary=ReadSummary(scratch="hm", text="tax 42", tokens_before=812, tokens_after=96,
                        facts={"tax 42": True, "fee 7": False, "rate 3": None}),
)  # fmt: skip
ROLLOUT = ReadRollout(
    rollout_id="3f2a" * 8, purpose="train", group=12, slot=3, attempt=0, step=5, group_state="consumed", task_id="a1b2",
    epoch=2,
    template="off_by_one", prompt="fix f in f.py", files=(), status="graded", reason="submit", reward=0.85,
    parts=(ReadPart(name="tests", value=1.0, worth=1.0, source="grader"),
           ReadPart(name="todo_open", value=1.0, worth=-0.15, source="measure.todo_open"),
           ReadPart(name="summaries", value=1.0, worth=None, source=""),
           ReadPart(name="asking", value=0.0, worth=None, source="judge.asking")),
    counts={"read": 2, "submit": 1}, seconds=4.21, verdict=None, votes=(), branch_of=None, branch_turns=0,
    comparison=ReadComparison(penalty=0.05, compared=0.8, rollouts=7, quarantined=0, lost=1, weight=7 / 6,
                              has_signal=True, step_tokens=1234),
    turns=(TURN, SUMMARY), notes=("something is not known",),
)  # fmt: skip
MATCHES = RolloutMatch(
    rollout_id="3f2a" * 8, purpose="train", group=12, slot=3, attempt=1, task_id="a1b2",
    status=RolloutStatus.GRADED, reward=0.85,
    reason="submit", step=5, disposition=Disposition.QUARANTINE, cause="reads_tests",
    traits=Traits(turns=2, summaries=1, hints=2, prompt_tokens=240, sampled_tokens=16, first_version=3, last_version=4,
                  seconds=4.21),
)  # fmt: skip
CENSUS = Census(
    purpose="train", groups={GroupState.READY: 3}, outcomes=dict.fromkeys(RolloutOutcome, 2),
    mean_reward=0.5, summaries=1,
    hints=0, versions=(0, 4), unlisted=7,
)  # fmt: skip


def drawn(page: RenderableType, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(page)
    return out.getvalue()


def test_a_rollout_is_drawn_turn_by_turn() -> None:
    text = drawn(rollout_page(ROLLOUT), 160)
    for words in (
        "train group 12, slot 3 · step 5",
        "0.850 = +1.000 tests (1)  −0.150 todo_open (1)",
        "summaries 1 · all else 0",
        "0.800 = 0.850 − 0.050 for effort · 7 compared, 1 lost: advantages × 1.167 · 16 of its step's 1\u202f234 loss",
        "something is not known",
        "turn 0 · act · prompt 120 (20 new) · sampled 8 of v3 (1 behind) · A +0.250 on 8",
        "5 of v3 (1 behind), 3 of v4 (0 behind)",
        "mind the fee  says rule",
        "earned −0.500",
        "cut: length",
        "812 tokens of context, of which is left: the next context begins with 96",
        "✓ tax 42  ✗ fee 7  · rate 3  1 of 2 seen facts kept",
    ):
        assert words in text, words


def test_what_is_not_known_is_left_out() -> None:
    untrained = replace(ROLLOUT, comparison=None, step=None, turns=(replace(TURN, advantage=None, loss_tokens=None),))
    text = drawn(rollout_page(untrained))
    assert "no step" in text
    assert "behind" not in text
    assert "A +" not in text
    assert "compared" not in text


def test_a_group_is_drawn_with_its_state() -> None:
    assert "train group 12 · off_by_one · epoch 2 · open · 7 compared" in drawn(
        group_table([replace(ROLLOUT, group_state="open")])
    )


def test_votes_of_a_judge_are_drawn_with_their_reasons() -> None:
    vote = ReadVote(aspect="style", score=4, lowest=1, highest=5, reason="clear\x1b[2J, but long")
    text = drawn(rollout_page(replace(ROLLOUT, votes=(vote, replace(vote, score=None)))))
    assert "judge     style 4 of 1–5  clear\\x1b[2J, but long" in text
    assert "style cannot tell" in text


def test_a_live_session_is_drawn_with_its_user() -> None:
    observation = Observation(
        user="u-1f", day=3, template="chat", arm="canary", prompt_tokens=9, weight=0.5, propensity=0.125
    )
    answers = {"kept": (1.0,), "thumbs": (None, 0.5)}
    observed = ObservedSession(
        session_id="s", observation=observation, ended_at=1.0, sampled_tokens=(2, 3), answers=answers
    )
    page = drawn(rollout_page(replace(ROLLOUT, observed=observed)))
    assert "user      u-1f  arm canary  kept 1, thumbs – 0.5  weight 0.5  answered 12% of the time" in page
    silent = drawn(rollout_page(replace(ROLLOUT, observed=replace(observed, answers={}))))
    assert "arm canary  nothing was answered" in silent


def test_a_quarantine_is_drawn_with_its_reason() -> None:
    verdict = Verdict(disposition=Disposition.QUARANTINE, reason="spy", flags=("spy", "touch"), graded=1.0)
    page = drawn(rollout_page(replace(ROLLOUT, verdict=verdict)))
    assert "quarantine, by spy; graded 1  spy, touch" in page
    assert "by its verdict; scored at" in page


def test_tokens_are_a_table_of_what_is_known() -> None:
    token = ReadToken(
        token_id=7, text=" tax", logprob=-0.5, version=3, mismatch=1e-7, kept=None, routes=None, advantage=None,
        has_loss=None,
    )  # fmt: skip
    plain = drawn(rollout_page(replace(ROLLOUT, turns=(replace(TURN, tokens=(token, replace(token, mismatch=None))),))))
    assert "' tax'" in plain
    assert "1.0×10⁻⁷" in plain
    assert "kept" not in plain
    assert "routes" not in plain
    routed = replace(token, kept=20, routes=((0, 3), (1, 7)))
    assert "0,3 | 1,7" in drawn(rollout_page(replace(ROLLOUT, turns=(replace(TURN, tokens=(routed,)),))))


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    wordy = replace(TURN, heard="many words " * 40, said="x" * 300)
    pages = [
        rollout_page(replace(ROLLOUT, turns=(wordy, SUMMARY))),
        rollout_list([MATCHES], 10),
        group_table([ROLLOUT, ROLLOUT]),
        overview("run", "5 of 9 steps", [CENSUS], [(RolloutStatus.FAILED_INFRA, "SandboxError: " + "gone " * 30, 3)]),
    ]  # fmt: skip
    for page in pages:
        assert max(map(len, drawn(page, width).splitlines())) <= width


def test_a_pipe_gets_whole_lines() -> None:
    wordy = replace(TURN, heard="many words " * 40)
    assert "many words " * 39 + "many words" in drawn(rollout_page(replace(ROLLOUT, turns=(wordy,))), 100_000)


def test_the_overview_says_what_filters_cannot_find() -> None:
    text = drawn(overview("run", "5 of 9 steps", [CENSUS], [(RolloutStatus.GRADED, "submit", 3)]))
    assert "7 rollouts were recorded by an older étude" in text
    assert "graded submit" in text


def test_the_list_says_how_many_there_are() -> None:
    text = drawn(rollout_list([MATCHES], 10), 160)
    assert "1 of 10" in text
    assert "submit, 1 summary, 2 hints, quarantined: reads_tests" in text
    assert "v3–4" in text
    assert "no rollout is like that" in drawn(rollout_list([], 0))


def test_what_a_model_writes_never_reaches_the_terminal_as_a_command() -> None:
    nasty = "\x1b[2J\x07 red\x9b31m\u202egnp.exe\ttab\r\n[bold]x[/bold]"
    assert visible(nasty) == "\\x1b[2J\\x07 red\\x9b31m\\u202egnp.exe    tab\\r\n[bold]x[/bold]"
    turn = replace(
        SUMMARY, heard=nasty, said=nasty, hint=Hint(turn=1, text=nasty, source=nasty),
        summary=ReadSummary(scratch=nasty, text=nasty, tokens_before=1, tokens_after=None, facts={nasty: True}),
        tokens=(ReadToken(token_id=0, text=nasty, logprob=0.0, version=0, mismatch=None, kept=None, routes=None,
                          advantage=None, has_loss=None),),
    )  # fmt: skip
    rollout = replace(
        ROLLOUT, prompt=nasty, template=nasty, reason=nasty, counts={nasty: 1}, turns=(turn,), notes=(nasty,)
    )
    result = replace(MATCHES, reason=nasty, cause=nasty)
    reasons = [(RolloutStatus.GRADED, nasty, 1)]
    for page in (
        rollout_page(rollout),
        group_table([rollout]),
        rollout_list([result], 1),
        overview("r", "", [], reasons),
    ):
        assert not set(drawn(page)) & set("\x1b\x07\x9b\u202e\r")


def test_the_json_has_every_field() -> None:
    message = to_json(ROLLOUT)
    assert list(message)[:4] == ["rollout_id", "purpose", "group", "slot"]
    turns = message["turns"]
    assert isinstance(turns, list)
    assert isinstance(turns[1], dict)
    assert turns[1]["summary"] == {
        "scratch": "hm", "text": "tax 42", "tokens_before": 812, "tokens_after": 96,
        "facts": {"tax 42": True, "fee 7": False, "rate 3": None},
    }  # fmt: skip
