"""Tables of routes: a view answers a query about one run, in a thread, and knows nothing of HTTP.

    "GET /curves": curves  ──▶  /api/runs/{run}/curves?since=7  ──▶  curves(RunQuery)  ──▶  JSON, or a file

Each view module has such a table, ``ROUTES``; :mod:`etude.ui.server` mounts them all. A view raises
:class:`~etude.errors.UserError` for a query that makes no sense and :class:`NotFound` for what is not there.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from etude.errors import UserError
from etude.types import Json
from etude.ui.runs import RunReader


class NotFound(UserError):
    """A query names something that is not there."""


class Forbidden(UserError):
    """A call that changes something came without the key for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """A request about one run, as a view sees it."""

    run: RunReader
    names: Mapping[str, str] = field(default_factory=dict)
    """The parts of the path that stand in braces: ``/rollouts/{rollout}``."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Pairs behind the question mark; of a name that is given twice the last one."""
    body: Json = None
    """JSON of a ``POST``."""
    key: str = ""
    """``X-Etude-Key`` of a ``POST``, for what the page's token does not open."""

    def number(self, name: str, default: int) -> int:
        """A whole number among the options. Raises :class:`~etude.errors.UserError`."""
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
    """Made one after another, in threads."""


Answer: TypeAlias = "Json | Download"
View: TypeAlias = Callable[[RunQuery], Answer]
Routes: TypeAlias = Mapping[str, View]
"""``METHOD /path`` below ``/api/runs/{run}`` → its view."""
