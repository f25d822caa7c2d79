"""Rollouts as files for other tools: Harbor's trajectory format, and a self-contained HTML page.

Owns the mapping to an ATIF document (Agent Trajectory Interchange Format 1.8: Harbor's RFC 0001,
https://harborframework.com/docs/trajectory-format) and the layout of the page. JSONL has one
:func:`~etude.dashboard.rollouts.to_json` per line. A model's output is data: it is escaped, and its control characters
are made visible.
"""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import version as version_of
from typing import Literal

import orjson

from etude.config.recipe import RunConfig
from etude.dashboard.formatting import MISSING, count, decimal, visible
from etude.dashboard.page import STYLE
from etude.dashboard.rollouts import ReadCall, ReadLine, ReadRollout, ReadToken, ReadTurn
from etude.types import Json

ATIF = "ATIF-v1.8"
"""Version of the format."""
LEVELS = 6
"""Number of shades of a token, by its probability."""
NATS_PER_LEVEL = 0.75


def exported(rollout: ReadRollout, form: Literal["harbor", "html"], config: RunConfig) -> str:
    """A rollout of a run with the recipe ``config``, as the text of a file."""
    if form == "html":
        return to_html(rollout)
    trajectory = to_harbor(rollout, agent=config.harness.kind, version=version_of("etude"), model=config.name)
    return orjson.dumps(trajectory, option=orjson.OPT_INDENT_2).decode()


def to_harbor(rollout: ReadRollout, *, agent: str, version: str, model: str) -> dict[str, Json]:
    """A rollout as an ATIF trajectory; ``agent`` is the name of its harness, ``version`` étude's.

    A new context is a step of ``user``, and each reply a step of ``agent``, whose observation is the text that follows
    it in its context. Turns that another rollout sampled are marked as copied context, which is not to be trained on.
    Token ids and logprobs are included if the rollout was read with its tokens.
    """
    answers = _answers(rollout.turns)
    steps: list[Json] = []
    for turn in rollout.turns:
        is_copied: dict[str, Json] = {"is_copied_context": True} if turn.number < rollout.branch_turns else {}
        if turn.continues is None:
            context: dict[str, Json] = {"step_id": len(steps) + 1, "source": "user", "message": turn.heard}
            steps.append(context | is_copied | {"extra": {"turn": turn.number}})
        steps.append({"step_id": len(steps) + 1, **_agent_step(turn, answers[turn.number]), **is_copied})
    prompt, sampled = (sum(getattr(turn, f"{kind}_tokens") for turn in rollout.turns) for kind in ("prompt", "sampled"))
    cached = sum(turn.prompt_tokens - turn.new_tokens for turn in rollout.turns)
    trajectory: dict[str, Json] = {
        "schema_version": ATIF,
        "session_id": rollout.rollout_id,
        "trajectory_id": rollout.rollout_id,
        "agent": {"name": agent, "version": version, "model_name": model},
        "steps": steps or [{"step_id": 1, "source": "user", "message": rollout.prompt}],
        "final_metrics": {
            "total_prompt_tokens": prompt,
            "total_completion_tokens": sampled,
            "total_cached_tokens": cached,
            "total_steps": len(steps) or 1,
        },
        "extra": {
            "task_id": rollout.task_id,
            "template": rollout.template,
            "purpose": rollout.purpose,
            "group": rollout.group,
            "slot": rollout.slot,
            "attempt": rollout.attempt,
            "step": rollout.step,
            "status": rollout.status,
            "reason": rollout.reason,
            "reward": rollout.reward,
            "reward_parts": {part.name: part.value for part in rollout.parts},
            "hacked": rollout.verdict.hacked if rollout.verdict else None,
            "branch_of": rollout.branch_of,
            "seconds": rollout.seconds,
        },
    }
    return trajectory | ({"notes": "\n".join(rollout.notes)} if rollout.notes else {})


def _answers(turns: Sequence[ReadTurn]) -> list[str | None]:
    """For each turn, the new text of the first turn that continues it."""
    answers: list[str | None] = [None] * len(turns)
    for turn in reversed(turns):
        if turn.continues is not None:
            answers[turn.continues] = turn.heard
    return answers


def _agent_step(turn: ReadTurn, answer: str | None) -> dict[str, Json]:
    calls: list[Json] = [
        {
            "tool_call_id": f"turn-{turn.number}-call-{number}",
            "function_name": call.tool,
            "arguments": dict(call.arguments),
        }
        for number, call in enumerate(turn.calls)
    ]
    metrics: dict[str, Json] = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.sampled_tokens,
        "cached_tokens": turn.prompt_tokens - turn.new_tokens,
        "extra": {
            "versions": {str(version): tokens for version, tokens in turn.versions.items()},
            "temperature": turn.temperature,
            "finish": turn.finish,
            "advantage": turn.advantage,
            "loss_tokens": turn.loss_tokens,
        },
    }
    if turn.tokens is not None:
        metrics |= {
            "completion_token_ids": [token.token_id for token in turn.tokens],
            "logprobs": [token.logprob for token in turn.tokens],
        }
    step: dict[str, Json] = {"source": "agent", "message": turn.content, "metrics": metrics, "llm_call_count": 1}
    if turn.thinking:
        step["reasoning_content"] = turn.thinking
    if calls:
        step["tool_calls"] = calls
    if answer is not None:  # of several calls nobody says which part of the text answers which
        result: dict[str, Json] = {"content": answer}
        one: dict[str, Json] = {"source_call_id": f"turn-{turn.number}-call-0"} if len(calls) == 1 else {}
        step["observation"] = {"results": [result | one]}
    extra: dict[str, Json] = {"turn": turn.number, "kind": turn.kind}
    if turn.reward is not None:
        extra["reward"] = turn.reward
    if turn.hint is not None:
        extra["hint"] = {"text": turn.hint.text, "source": turn.hint.source}
    return step | {"extra": extra}


# ── a page
# ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

PAGE_STYLE = """
main { max-width: 960px; } h1 { max-width: none; font-size: 26px; }
article { margin-top: 28px; padding-top: 10px; border-top: 1px solid var(--hair); }
article h2 { margin: 0 0 8px; padding: 0; border: 0; } article h2 a { color: var(--ink); text-decoration: none; }
pre { margin: 6px 0; padding: 10px 14px; white-space: pre-wrap; overflow-wrap: anywhere;
  border-left: 3px solid var(--hair);
  font: 13px/1.5 ui-monospace, monospace; } pre.heard { color: var(--soft); } pre.said { border-color: var(--main); }
pre.hint, pre.lost { border-color: var(--warn); } .diff ins, .diff del { display: block; text-decoration: none; }
.diff ins { background: #2c8a4a26; } .diff del { background: #b4552d26; }
""" + "".join(
    f".l{level} {{ background: color-mix(in srgb, var(--warn) {12 * level}%, transparent); }}\n"
    for level in range(1, LEVELS)
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(rollout: ReadRollout) -> str:
    """A rollout as one page: no script, no font, no network. Tokens are shaded by their improbability, if the rollout
    was read with its tokens.
    """
    where = f"{rollout.purpose} group {rollout.group}, slot {rollout.slot}"
    rows = [
        ("task", f"{rollout.template} · {rollout.task_id}"),
        ("ended", f"{rollout.status} · {rollout.reason} · {rollout.seconds:.2f} s"),
        ("step", MISSING if rollout.step is None else str(rollout.step)),
        *((f"{part.name}", f"{part.value:g}") for part in rollout.parts),
        *(("note", note) for note in rollout.notes),
    ]
    if rollout.verdict is not None and rollout.verdict.flags:
        rows.append(("verdict", f"{rollout.verdict.disposition}: {', '.join(rollout.verdict.flags)}"))
    facts = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(rollout.rollout_id)} · étude</title>
<style>{STYLE}{PAGE_STYLE}</style>
</head>
<body>
<main>
<header><p>étude · rollout {_text(rollout.rollout_id)}</p>
<h1>{_text(where)} · reward {decimal(rollout.reward, 3)}</h1></header>
<table>{facts}</table>
{"".join(map(_turn, rollout.turns))}
</main>
</body>
</html>
"""


def _turn(turn: ReadTurn) -> str:
    words = [
        turn.kind,
        f"{count(turn.sampled_tokens)} tokens of {', '.join(f'v{version}' for version in turn.versions)}",
    ]
    if turn.advantage is not None:
        words.append(f"advantage {decimal(turn.advantage, 3)} on {count(turn.loss_tokens)}")
    if turn.continues is None and turn.number:
        words.append("a new context")
    reply = _text(turn.said) if turn.tokens is None else "".join(map(_token, turn.tokens))
    hint = f'<pre class="hint">{_text(turn.hint.text)}</pre>' if turn.hint is not None else ""
    lost = f'<pre class="lost">{_text(turn.summary.scratch)}</pre>' if turn.summary and turn.summary.scratch else ""
    name = f"turn-{turn.number}"
    return (
        f'<article id="{name}"><h2><a href="#{name}">turn {turn.number}</a> · {_text(" · ".join(words))}</h2>{hint}'
        f'<pre class="heard">{_text(turn.heard)}</pre><pre class="said">{reply}</pre>'
        f"{''.join(_diff(call) for call in turn.calls if call.diff)}{lost}</article>"
    )


def _token(token: ReadToken) -> str:
    level = min(LEVELS - 1, int(-token.logprob / NATS_PER_LEVEL))
    about = f"{token.logprob:.3f}, v{token.version}"
    return f'<span class="l{level}" title="{about}">{_text(token.text)}</span>'


def _diff(call: ReadCall) -> str:
    return f'<pre class="diff">{_text(call.path)}\n{"".join(_diff_lines(call.diff))}</pre>'


def _diff_lines(lines: Sequence[ReadLine]) -> Iterator[str]:
    tags = {"+": ("<ins>", "</ins>"), "-": ("<del>", "</del>")}
    for line in lines:
        opening, closing = tags.get(line.mark, ("", "\n"))
        yield f"{opening}{line.mark} {_text(line.text)}{closing}"


def _text(text: str) -> str:
    """Untrusted text, escaped for HTML."""
    return escape(visible(text))
