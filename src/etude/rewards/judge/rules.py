"""A judge that is a program: it answers the very questions that a model is asked, over the same API.

    POST /v1/chat/completions ──▶ what stands behind the bars, aspect, nonce ──▶ a rule for that aspect ──▶ verdict

It is served over HTTP instead of being called because then nothing about judging is special where rules do it: prompts,
fences, votes, cache, budget, calibration and drift are what they are with a model, on a machine that has none. A rule
is given the two texts as they were shown, cut and spelled out as a model would see them.

Owns reading our own prompts back. The rules are their families'.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import orjson
from aiohttp import web

from etude.rewards.judge.injection_guard import BAR
from etude.types import Json

Rule: TypeAlias = Callable[[str, str], tuple[int, str]]
"""(task, work) → score, and a reason."""
MODEL = "etude-rules"
"""What the endpoint calls itself, before its version."""
LARGEST_REQUEST = 16 << 20
"""Bytes."""
QUESTION = re.compile(
    r"<<< (?P<mark>[0-9a-f]{32}) task\n(?P<task>.*)\n>>> (?P=mark) task\n"
    r"<<< (?P=mark) work\n(?P<work>.*)\n>>> (?P=mark) work\n\n"
    r"Aspect: (?P<aspect>[a-z0-9_]+)\n.*"
    r'"nonce": "(?P<nonce>[0-9a-f]+)"\}\n',
    re.DOTALL,
)
"""A question as :mod:`etude.rewards.judge.prompts` writes it."""


def answer(question: str, rules: Mapping[str, Rule]) -> str:
    """The reply to a question. Raises ``ValueError`` for one that is not ours, or about an aspect without a rule."""
    asked = QUESTION.match(question)
    if asked is None or asked["aspect"] not in rules:
        raise ValueError(f"expected a question about {', '.join(sorted(rules))}, as étude's judge asks them")
    score, reason = rules[asked["aspect"]](_text(asked["task"]), _text(asked["work"]))
    return orjson.dumps({"reason": reason, "score": score, "aspect": asked["aspect"], "nonce": asked["nonce"]}).decode()


def rules_app(rules: Mapping[str, Rule], version: str) -> web.Application:
    """A server of chat completions whose model are some rules, of a version that changes with them."""

    async def complete(request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
            said = answer(body["messages"][-1]["content"], rules)
        except (ValueError, LookupError, TypeError) as error:
            return web.json_response({"error": {"code": "invalid_request", "message": str(error)}}, status=400)
        read = sum(len(message["content"].encode()) for message in body["messages"])
        return web.json_response(_completion(said, read, version))

    app = web.Application(client_max_size=LARGEST_REQUEST)
    app.router.add_post("/v1/chat/completions", complete)
    return app


def _completion(said: str, read: int, version: str) -> Json:
    """Bytes are counted as tokens."""
    return {
        "id": "chatcmpl-rules",
        "object": "chat.completion",
        "created": 0,
        "model": f"{MODEL}-{version}",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": read, "completion_tokens": len(said), "total_tokens": read + len(said)},
    }


def _text(barred: str) -> str:
    """What stands behind the bars; a line without one says what was left out."""
    return "\n".join(line.removeprefix(BAR) for line in barred.split("\n") if line.startswith(BAR))
