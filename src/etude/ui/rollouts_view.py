"""The tab *Rollouts*: a table of rollouts, one rollout turn by turn, its tokens, its group, and downloads.

    ledger ──Search──▶ rows of the table
    ledger, payloads, model ──RolloutReader──▶ a rollout as text ──▶ JSON, tokens in columns, exports

Owns the queries and the form of the responses. As for `etude show`, :mod:`etude.ledger.archive` finds rollouts and
:mod:`etude.run.rollout_reader` reads them. Each query opens the ledger read-only; the index of its records and the
model's tokenizer are cached between queries.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import orjson

from etude.dashboard.rollout_export import exported
from etude.dashboard.rollouts import ReadRollout, ReadToken, to_json
from etude.errors import UserError
from etude.ledger.archive import Archive, Order, RolloutMatch, RolloutOutcome, Search, parse_comparison
from etude.ledger.changes import TRAIN
from etude.ledger.record_index import RecordIndex
from etude.run.folder import RunFolder
from etude.run.rollout_reader import RolloutReader, RunWords
from etude.run.stores import open_archive
from etude.types import Json
from etude.ui.routes import Download, NotFound, Routes, RunQuery

DEFAULT_ROWS, MOST_ROWS = 100, 1_000
"""Default and maximum number of rows of one response."""
MOST_REASONS = 30
"""Maximum number of reasons that are offered as filters: the most frequent ones."""
REASON_CHARACTERS = 200
"""Maximum length of a reason in a row; that of a failure may be a whole log."""
MOST_ROUTES = 400_000
"""Maximum number of routed experts in a response; if there are more, they are omitted unless one turn is requested."""
Choice = TypeVar("Choice", RolloutOutcome, Order)
SCORING = threading.Lock()
"""Lock for scoring a rollout with the trainer's model: one at a time, for any number of pages."""
RUNS = 16
"""Number of runs whose indexes and tokenizers are cached."""


def table(query: RunQuery) -> Json:
    """A page of the table: ``total`` is the number of matches, ``rows`` are those from ``offset``; with ``count=0`` the
    matches are not counted, and ``total`` is null.
    """
    search = _search(query)
    with _archive(query) as archive:
        rows = archive.find(search)
        total = None if query.options.get("count") == "0" else archive.count(search)
        templates = archive.templates(search.purpose, {row.group for row in rows})
    return {
        "total": total,
        "offset": search.offset,
        "rows": [_row(row, templates.get(row.group, "")) for row in rows],
    }


def census(query: RunQuery) -> Json:
    """Values to filter by: purposes with counts and versions, and the finish reasons of one purpose's rollouts."""
    purpose = query.options.get("purpose", TRAIN)
    with _archive(query) as archive:
        purposes, reasons = archive.census(), archive.reasons(purpose, MOST_REASONS)
    return {
        "purposes": orjson.loads(orjson.dumps(purposes, option=orjson.OPT_NON_STR_KEYS)),
        "reasons": [{"status": status, "reason": reason, "count": count} for status, reason, count in reasons],
    }


def rollout(query: RunQuery) -> Json:
    """One rollout with its turns as text."""
    with _reader(query) as reader:
        return to_json(_named(reader, query))


def tokens(query: RunQuery) -> Json:
    """The sampled tokens of a rollout, or of one ``turn``, in columns; with ``mismatch=1`` the trainer's logprobs."""
    number = query.number("turn", -1)
    if query.options.get("mismatch") == "1":
        with SCORING, _reader(query, tokens=True, mismatches=True) as reader:
            read = _named(reader, query)
    else:
        with _reader(query, tokens=True) as reader:
            read = _named(reader, query)
    turns = [turn for turn in read.turns if number in (-1, turn.number)]
    routes = sum(
        len(token.routes) * len(token.routes[0]) for turn in turns for token in turn.tokens or () if token.routes
    )
    with_routes = routes > 0 and (routes <= MOST_ROUTES or number >= 0)
    return {
        "turns": [{"number": turn.number, **_columns(turn.tokens or (), with_routes=with_routes)} for turn in turns],
        "has_routes": routes > 0,
        "notes": list(read.notes),
    }


def group(query: RunQuery) -> Json:
    """The rollouts of a group, with all attempts, in order of slots."""
    purpose, number = query.names["purpose"], query.names["number"]
    if not number.isdecimal():
        raise NotFound(f"group {number!r}: expected a number")
    with _reader(query) as reader:
        try:
            return [to_json(each) for each in reader.group(purpose, int(number))]
        except UserError as error:
            raise NotFound(str(error)) from error


def export(query: RunQuery) -> Download:
    """One rollout as a file: ``as`` is ``jsonl``, ``harbor`` or ``html``."""
    form = query.options.get("as", "jsonl")
    if form not in ("jsonl", "harbor", "html"):
        raise UserError(f"as={form!r}: expected jsonl, harbor or html")
    with _reader(query, tokens=True) as reader:
        read = _named(reader, query)
    name, config = read.rollout_id, query.run.config
    if form == "html":
        page = exported(read, "html", config).encode()
        return Download(name=f"{name}.html", media_type="text/html", chunks=[page])
    if form == "harbor":
        trajectory = exported(read, "harbor", config).encode()
        return Download(name=f"{name}.trajectory.json", media_type="application/json", chunks=[trajectory])
    return Download(name=f"{name}.jsonl", media_type="application/jsonl", chunks=[_line(read)])


def export_all(query: RunQuery) -> Download:
    """All matching rollouts as shown, one per line, without tokens."""
    return Download(name="rollouts.jsonl", media_type="application/jsonl", chunks=_lines(query))


def _lines(query: RunQuery) -> Iterator[bytes]:
    search = _search(query, limit=MOST_ROWS)
    while True:
        with _reader(query) as reader, _archive(query) as archive:
            matches = archive.find(search)
            for match in matches:
                yield _line(reader.rollout(match.rollout_id))
        if len(matches) < search.limit:
            return
        search = _search(query, offset=search.offset + search.limit, limit=MOST_ROWS)


def _line(read: ReadRollout) -> bytes:
    return orjson.dumps(read, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE)


def _search(query: RunQuery, offset: int | None = None, limit: int | None = None) -> Search:
    """The search for a query's options. Raises :class:`~etude.errors.UserError` naming an invalid one."""
    options = query.options
    rows = query.number("limit", DEFAULT_ROWS) if limit is None else limit
    start = query.number("offset", 0) if offset is None else offset
    if not 1 <= rows <= MOST_ROWS or start < 0:
        raise UserError(f"limit={rows}, offset={start}: expected 1 to {MOST_ROWS} rows from 0 on")
    return Search(
        purpose=options.get("purpose") or TRAIN,
        group=query.number("group", 0) if options.get("group") else None,
        reward=parse_comparison(options["reward"]) if options.get("reward") else None,
        outcome=_choice(RolloutOutcome, "outcome", options),
        reason=options.get("reason", ""),
        version=query.number("version", 0) if options.get("version") else None,
        task=options.get("task", ""),
        has_summary=options.get("has_summary") == "1",
        has_hint=options.get("has_hint") == "1",
        hacked=options.get("hacked") == "1",
        order=_choice(Order, "sort", options) or Order.NEWEST,
        is_reversed=options.get("reversed") == "1",
        offset=start,
        limit=rows,
    )


def _choice(kind: type[Choice], name: str, options: Mapping[str, str]) -> Choice | None:
    try:
        return kind(options[name]) if options.get(name) else None
    except ValueError as error:
        raise UserError(f"{name}={options[name]!r}: expected one of {', '.join(kind)}") from error


def _row(match: RolloutMatch, template: str) -> dict[str, Json]:
    fields: dict[str, Json] = orjson.loads(orjson.dumps(match))
    traits = fields.pop("traits")
    assert isinstance(traits, dict | None)
    fields["reason"] = match.reason[:REASON_CHARACTERS]
    return fields | {"template": template} | (traits or {})


def _columns(tokens: Sequence[ReadToken], *, with_routes: bool) -> dict[str, Json]:
    """Tokens as columns, each with one value per token; a column without any value is null."""
    names = ("token_id", "text", "logprob", "version", "mismatch", "kept", "advantage", "has_loss")
    columns: dict[str, Json] = {}
    for name in (*names, *(["routes"] if with_routes else [])):
        values = [getattr(token, name) for token in tokens]
        columns[name] = None if all(value is None for value in values) else values
    return columns


@lru_cache(maxsize=RUNS)
def _index(folder: RunFolder) -> RecordIndex:
    """Index of a run's records, shared by all its searches."""
    return RecordIndex()


@lru_cache(maxsize=RUNS)
def _words(folder: RunFolder, changed_ns: int) -> RunWords:
    """A run's chat format and recipe; a changed ``run.toml`` gives a new cache entry."""
    return RunWords(folder)


@contextmanager
def _archive(query: RunQuery) -> Iterator[Archive]:
    folder = query.run.folder
    with open_archive(folder, _index(folder)) as archive:
        yield archive


@contextmanager
def _reader(query: RunQuery, *, tokens: bool = False, mismatches: bool = False) -> Iterator[RolloutReader]:
    folder = query.run.folder
    words = _words(folder, folder.config_file.stat().st_mtime_ns)
    with _archive(query) as archive:
        yield RolloutReader(folder, archive, tokens=tokens, mismatches=mismatches, words=words)


def _named(reader: RolloutReader, query: RunQuery) -> ReadRollout:
    """The rollout in the query's path. Raises :class:`~etude.ui.routes.NotFound`."""
    try:
        return reader.rollout(query.names["rollout"])
    except UserError as error:
        raise NotFound(str(error)) from error


ROUTES: Routes = {
    "GET /rollouts": table,
    "GET /rollouts/census": census,
    "GET /rollouts.jsonl": export_all,
    "GET /rollouts/{rollout}": rollout,
    "GET /rollouts/{rollout}/tokens": tokens,
    "GET /rollouts/{rollout}/export": export,
    "GET /groups/{purpose}/{number}": group,
}
