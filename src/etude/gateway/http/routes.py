"""Which path means what.

    /v1/chat/completions, …       model calls, by dialect          /sessions, /keys, /engines     who runs the gateway
    /s/{session}/v1/…             the same, in a session           /healthz /metrics /openapi.json

Owns patterns and their parts. A session is named in the path by its id, or by its key for tools that take a base URL
and nothing else; which of them it is, is :mod:`etude.gateway.http.principal`'s question.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import orjson

from etude.gateway.api.calls import Refusal
from etude.gateway.api.fields import Fields, read_object
from etude.gateway.http.request_log import Visit
from etude.gateway.http.server import JSON, Reply, Visitor
from etude.types import Json

SESSION_PREFIX = "/s/"
PARAMETER = "{}"
"""Stands for the last segment of a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A path, taken apart."""

    pattern: str
    """For logs: it holds no part that a caller chose."""
    handlers: Mapping[str, "Handler"]
    """By method."""
    session: str | None = None
    """What stands behind ``/s/``."""
    parameter: str = ""
    """What stands for ``{}``."""


Handler = Callable[[Visitor, Matched, Visit], Awaitable[Reply | None]]


class Routes:
    """Patterns and their handlers. ``below_session`` are those that also exist behind ``/s/{session}``."""

    def __init__(
        self, table: Mapping[str, Mapping[str, Handler]], below_session: Mapping[str, Mapping[str, Handler]]
    ) -> None:
        self._all = {pattern: Matched(pattern=pattern, handlers=handlers) for pattern, handlers in table.items()}
        self._all |= {pattern: Matched(pattern=pattern, handlers=how) for pattern, how in below_session.items()}
        self._below_session = below_session

    def match(self, path: str) -> Matched | None:
        """What a path means; ``None`` for nothing."""
        fixed = self._all.get(path)
        if fixed is not None and PARAMETER not in path:
            return fixed
        if path.startswith(SESSION_PREFIX):
            session, _, rest = path[len(SESSION_PREFIX) :].partition("/")
            found = self.match("/" + rest) if session and not rest.startswith("s/") else None
            if found is None or found.pattern not in self._below_session:
                return None
            pattern = SESSION_PREFIX + "{session}" + found.pattern
            return Matched(
                pattern=pattern, handlers=found.handlers, session=unquote(session), parameter=found.parameter
            )
        stem, _, leaf = path.rpartition("/")
        open_ended = self._all.get(f"{stem}/{PARAMETER}") if leaf else None
        if open_ended is None:
            return None
        return Matched(pattern=open_ended.pattern, handlers=open_ended.handlers, parameter=unquote(leaf))


def chosen(matched: Matched | None, method: str) -> tuple[Matched, Handler]:
    """What a path means and who handles it. Raises :class:`~etude.gateway.api.calls.Refusal` with 404 or 405."""
    if matched is None:
        raise Refusal(404, "not_found", "there is nothing at this path: see /openapi.json")
    handler = matched.handlers.get(method)
    if handler is None:
        allowed = ", ".join(sorted(matched.handlers))
        raise Refusal(405, "method_not_allowed", f"{matched.pattern} takes {allowed} only", param=allowed)
    return matched, handler


async def read_fields(visitor: Visitor, visit: Visit) -> Fields:
    """The fields of a body, which may be empty. Raises :class:`~etude.gateway.api.calls.Refusal`."""
    body = await visitor.read()
    visit.bytes_in = len(body)
    return read_object(body or b"{}")


def reply_json(visit: Visit, facts: Mapping[str, Json], status: int = 200) -> Reply:
    """An answer of JSON, noted in ``visit``."""
    return reply_bytes(visit, orjson.dumps(facts), status=status)


def reply_bytes(visit: Visit, body: bytes, content_type: str = JSON, *, status: int = 200) -> Reply:
    """An answer as it is, noted in ``visit``."""
    visit.status, visit.bytes_out = status, len(body)
    return Reply(body=body, status=status, content_type=content_type)
