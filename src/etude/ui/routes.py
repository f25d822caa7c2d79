"""Tables of routes: a view answers a query about one run, in a thread, and does not know HTTP.

    "GET /curves": curves  ──▶  /api/runs/{run}/curves?since=7  ──▶  curves(RunQuery)  ──▶  JSON, or a file

Each view module has such a table, ``ROUTES``; :mod:`etude.ui.server` mounts them all. A view raises
:class:`~etude.errors.UserError` for an invalid query and :class:`NotFound` for a missing object.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.errors import UserError
from etude.types import Json
from etude.ui.runs import RunReader


class NotFound(UserError):
    """A query names an object that does not exist."""


class Forbidden(UserError):
    """A request for a change lacks the required key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """A request about one run, as a view sees it."""

    run: RunReader
    names: Mapping[str, str] = field(default_factory=dict)
    """The path's parameters: ``/rollouts/{rollout}``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Query parameters; for a repeated name the last value."""
    body: Json = None
    """JSON of a ``POST``."""
    key: str = ""
    """``X-Etude-Key`` of a ``POST``, for actions that the page's token does not permit."""

    def number(self, name: str, default: int) -> int:
        """An integer option. Raises :class:`~etude.errors.UserError`."""
        text = self.options.get(name, "")
        if not text:
            return default
        try:
            return int(text)
        except ValueError as error:
            raise UserError(f"{name}={text!r} is not a whole number") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file that a browser saves."""

    name: str
    media_type: str
    chunks: Iterable[bytes]
    """Produced one after another, in threads."""


Answer: TypeAlias = "Json | Download"
View: TypeAlias = Callable[[RunQuery], Answer]
Routes: TypeAlias = Mapping[str, View]
"""``METHOD /path`` below ``/api/runs/{run}`` → its view."""
