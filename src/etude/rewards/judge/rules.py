"""Rule-based judges: programs that answer a judge's prompts over the same API as a model.

    POST /v1/chat/completions ──▶ the text behind the bars, aspect, nonce ──▶ a rule for that aspect ──▶ verdict

They are served over HTTP instead of being called directly, so that judging is the same with rules as with a model:
prompts, guard, votes, cache, budget, calibration and alarms, even on a machine that has no model. A rule receives the
two texts as the prompt shows them, truncated and escaped as a model would see them.

The rules here judge one-line summaries of functions: style, and truth.

    def first(items): return items[0]      first returns items[0]                      style 5, factuality 4
                                           hm, I think it maybe returns the first!     style 1, factuality 2

The rubrics themselves are text files next to the recipe; the agreement of the rules with labels by these rubrics is
measured as for any judge.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import orjson
from aiohttp import web

from etude.rewards.judge.prompts import BAR
from etude.types import Json

Rule: TypeAlias = Callable[[str, str], tuple[int, str]]
"""(task, work) → score, and a reason."""
MODEL = "etude-rules"
"""Model name that the endpoint reports, without its version."""
LARGEST_REQUEST = 16 << 20
"""In bytes."""
QUESTION = re.compile(
    r"<<< (?P<mark>[0-9a-f]{32}) task\n(?P<task>.*)\n>>> (?P=mark) task\n"
    r"<<< (?P=mark) work\n(?P<work>.*)\n>>> (?P=mark) work\n\n"
    r"Aspect: (?P<aspect>[a-z0-9_]+)\n.*"
    r'"nonce": "(?P<nonce>[0-9a-f]+)"\}\n',
    re.DOTALL,
)
"""A prompt as :mod:`etude.rewards.judge.prompts` writes it."""


def answer(question: str, rules: Mapping[str, Rule]) -> str:
    """The rules' reply to a prompt. Raises ``ValueError`` for an unknown prompt format, or an aspect without a rule."""
    match = QUESTION.match(question)
    if match is None or match["aspect"] not in rules:
        raise ValueError(f"expected a question about {', '.join(sorted(rules))}, as étude's judge asks them")
    score, reason = rules[match["aspect"]](_text(match["task"]), _text(match["work"]))
    return orjson.dumps({"reason": reason, "score": score, "aspect": match["aspect"], "nonce": match["nonce"]}).decode()


def rules_app(rules: Mapping[str, Rule], version: str) -> web.Application:
    """A chat-completion server whose model is a set of rules; ``version`` must change whenever they do."""

    async def complete(request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
            summary = answer(body["messages"][-1]["content"], rules)
        except (ValueError, LookupError, TypeError) as error:
            return web.json_response({"error": {"code": "invalid_request", "message": str(error)}}, status=400)
        read = sum(len(message["content"].encode()) for message in body["messages"])
        return web.json_response(_completion(summary, read, version))

    app = web.Application(client_max_size=LARGEST_REQUEST)
    app.router.add_post("/v1/chat/completions", complete)
    return app


def _completion(summary: str, read: int, version: str) -> Json:
    """The response; its token counts are numbers of bytes and characters."""
    return {
        "id": "chatcmpl-rules",
        "object": "chat.completion",
        "created": 0,
        "model": f"{MODEL}-{version}",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": summary}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": read, "completion_tokens": len(summary), "total_tokens": read + len(summary)},
    }


def _text(barred: str) -> str:
    """The text behind the bars; the line that reports omitted characters has none and is dropped."""
    return "\n".join(line.removeprefix(BAR) for line in barred.split("\n") if line.startswith(BAR))


SUMMARY_RULES_VERSION = "1"
"""Increased with every change of a rule: a calibration is valid for one version."""
STYLE_SCORES, FACTUALITY_SCORES = (1, 5), (1, 4)
"""Lowest and highest score."""
LONGEST_LINE = 72
"""Maximum length of a summary, in characters."""
OPENING = re.compile(r"[A-Za-z_]\w* returns \S")
"""Opening of a summary: the function's name, then its result."""
HEDGE = re.compile(
    r"\b(I|I'm|we|you|my)\b|\b(think|guess|probably|maybe|perhaps|basically|simply|just|seems?|hm+|well|kind of|"
    r"sort of|some)\b",
    re.IGNORECASE,
)
"""Hedges and words about the writer; those in the returned expression are ignored."""
ORNAMENT = re.compile(r"!(?!=)|\*\*\S|[`#~]|\.\.\.|:\)")
"""Decoration without information; that in the returned expression is ignored."""
DEFINITION = re.compile(r"^\s*(?:async )?def (\w+)", re.MULTILINE)
RETURN = re.compile(r"^\s*return (.+)$", re.MULTILINE)
WORDS = re.compile(r"\w+")
"""Names and numbers of an expression."""


def style(task: str, work: str) -> tuple[int, str]:
    """Score of a summary's style: one point less for each kind of fault."""
    text = work.strip()
    prose = _without_expression(task, text)
    faults = [
        name
        for name, is_faulty in (
            ("it does not begin with a name and 'returns'", not OPENING.match(text)),
            ("it hedges or chats", HEDGE.search(prose)),
            ("it is ornamented", ORNAMENT.search(prose)),
            ("it is not one short line", "\n" in text or len(text) > LONGEST_LINE),
        )
        if is_faulty
    ]
    return max(STYLE_SCORES[0], STYLE_SCORES[1] - len(faults)), "; ".join(faults) or "plain and short"


def factuality(task: str, work: str) -> tuple[int, str]:
    """Score of a summary's truth: whether it names the task's function and its result."""
    defined, returned = DEFINITION.search(task), RETURN.findall(task)
    if defined is None or not returned:
        return FACTUALITY_SCORES[0], "the task shows no function"
    names = defined[1] in WORDS.findall(work)
    returned_text, summary = returned[-1].strip(), " ".join(work.split())
    if returned_text in summary:
        points, amount = 2, "all"
    elif _shares_words(returned_text, summary):
        points, amount = 1, "some"
    else:
        points, amount = 0, "nothing"
    reason = f"the name is {'there' if names else 'missing'}, and of what it returns {amount}"
    return FACTUALITY_SCORES[0] + names + points, reason


SUMMARY_RULES: Mapping[str, Callable[[str, str], tuple[int, str]]] = MappingProxyType(
    {"style": style, "factuality": factuality}
)
"""Aspect → rule."""


def _without_expression(task: str, text: str) -> str:
    for returned in RETURN.findall(task):
        text = text.replace(returned.strip(), "")
    return text


def _shares_words(returned_text: str, summary: str) -> bool:
    words = set(WORDS.findall(returned_text))
    return bool(words) and 2 * len(words & set(WORDS.findall(summary))) >= len(words)
