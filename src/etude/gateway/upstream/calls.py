"""One call of an external API: its destination, and the token usage in its answer.

Owns the URL, the headers and the body of a call, which parts of an API an agent may use, and the parsing of the usage
in answers of OpenAI's and Anthropic's APIs: whole answers, and streams of server-sent events. Nothing is sent from here
(:mod:`.passthrough`). Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import orjson

from etude.errors import ConfigError
from etude.gateway.upstream.apis import ANTHROPIC_VERSION, Api
from etude.types import Json

AGENTS_TOOLS = ("function", "custom", "bash", "text_editor", "computer", "memory", "local_shell", "apply_patch")
"""Prefixes of the types of tools that agents run themselves. The API runs all others: they search the web, call
servers, execute code.
"""
HOSTED_FIELDS = frozenset({"web_search_options", "mcp_servers", "container", "plugins", "models"})
"""Fields that request such hosted tools, or a model other than the one under test."""
DATA_URL = "data:"
QUOTED_CHARACTERS = 80
NO_KEY = "none"
"""Key that is sent if there is none: self-hosted servers ignore it."""
EVENT_DATA = b"data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A model behind a URL."""

    url: str
    """Base URL; calls go to paths below its ``/v1``."""
    model: str
    """The API's name for it."""
    api: Api = "openai"
    key: str = field(default="", repr=False)
    extra: Mapping[str, Json] = field(default_factory=dict)
    """Fields added to every request, overriding the harness's; ``None`` removes a field."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {self.url!r} is not a URL of an API: expected http://… or https://…")
        if (parts := urlsplit(self.url)).username is not None or parts.query or parts.fragment:
            raise ConfigError(
                f"--url has more than a place in it (before '@', or behind '?' or '#'), which results would show: name "
                f"{parts.scheme}://{parts.hostname}… alone, and the variable of a key by --key-env"
            )
        if not self.model:
            raise ConfigError("--model is empty: name the model as its API does")

    def place(self, path: str) -> str:
        """The URL of a path below ``/v1/``."""
        base = self.url.rstrip("/")
        return f"{base if base.endswith('/v1') else base + '/v1'}/{path}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call."""
        key = self.key or NO_KEY
        if self.api == "anthropic":
            return {"x-api-key": key, "anthropic-version": ANTHROPIC_VERSION}
        return {"Authorization": f"Bearer {key}"}

    def request(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A harness's body as it is forwarded: for this model, with the fields of :attr:`extra`."""
        sent = {**body, "model": self.model, **self.extra}
        if path == "chat/completions" and body.get("stream") and self.api == "openai":
            sent.setdefault("stream_options", {"include_usage": True})  # or a stream has no token usage
        return {name: value for name, value in sent.items() if name not in self.extra or value is not None}


def beyond_the_model(body: Mapping[str, Any]) -> str:
    """A description of anything that a call requests of an API beyond the model's output, which a sandbox without a
    network must not get; empty if nothing.
    """
    if fields := sorted(HOSTED_FIELDS & body.keys()):
        return f"field {fields[0]!r}"
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type", "custom") if isinstance(tool, dict) else "custom"
        if not str(kind).startswith(AGENTS_TOOLS):
            return f"tool {kind!r}"
    remaining: list[Any] = [body]
    while remaining:
        part = remaining.pop()
        if isinstance(part, dict):
            if (url := _remote_url(part)) is not None:
                return f"content at {url[:QUOTED_CHARACTERS]!r}"
            remaining += part.values()
        elif isinstance(part, list):
            remaining += part
    return ""


def _remote_url(part: Mapping[str, Any]) -> str | None:
    """The URL from which an API would fetch a part of a message, if any."""
    source = part if part.get("type") == "url" else {}
    for place in (part.get("image_url"), part.get("file_url"), source.get("url")):
        url = place.get("url") if isinstance(place, dict) else place
        if isinstance(url, str) and not url.startswith(DATA_URL):
            return url
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of calls, as the API counts them."""

    prompt_tokens: int = 0
    """All prompt tokens, cached or not."""
    cached_tokens: int = 0
    """Prompt tokens that the API had cached and charges less for."""
    sampled_tokens: int = 0

    def __add__(self, other: Self) -> "TokenUsage":
        return TokenUsage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
        )


def read_usage(answer: bytes) -> TokenUsage:
    """The usage in a whole answer, or in all events of a stream; zero if it is not given."""
    fields: dict[str, Any] = {}
    for part in json_objects(answer):
        inner = part.get("message") or part.get(
            "response"
        )  # Anthropic's first event; the last event of OpenAI's responses
        for holder in (part, inner):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):  # later events are more accurate
                fields |= {name: value for name, value in usage.items() if value is not None}
    cached = _number(fields, "cache_read_input_tokens")
    if (
        "cache_read_input_tokens" in fields or "cache_creation_input_tokens" in fields
    ):  # Anthropic counts these separately
        prompt = _number(fields, "input_tokens") + cached + _number(fields, "cache_creation_input_tokens")
    else:
        prompt = _number(fields, "prompt_tokens") or _number(fields, "input_tokens")
        details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
        cached = _number(details, "cached_tokens") if isinstance(details, dict) else 0
    sampled = _number(fields, "completion_tokens") or _number(fields, "output_tokens")
    return TokenUsage(prompt_tokens=prompt, cached_tokens=cached, sampled_tokens=sampled)


def json_objects(answer: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of an answer: the answer itself, or its events."""
    texts = [line[len(EVENT_DATA) :] for line in answer.splitlines() if line.startswith(EVENT_DATA)] or [answer]
    for text in texts:
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue  # the end marker of a stream is not JSON
        if isinstance(parsed, dict):
            yield parsed


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0
