"""The tab *Weights*: versions and the links between them, the version of each engine, and the fleet by region.

    GET /weights?before=120&limit=50     engines with their versions, and a page of versions, the newest first
    GET /weights/history?since=40        columns over versions after 40: sizes, seconds, lag by region
    GET /fleet                           regions with their processes and their health

Versions are read from the weight log, which is authoritative for available ones; times and lags are from events.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import time
from weakref import WeakKeyDictionary

from etude.errors import EtudeError, RunFolderError, UserError
from etude.releases.states import Release
from etude.run.stores import open_releases
from etude.run.weight_log import open_log
from etude.types import Json, WeightVersion
from etude.ui.fleet import fleet
from etude.ui.routes import Routes, RunQuery
from etude.ui.runs import RunReader
from etude.ui.weight_history import EngineHistory, WeightHistory
from etude.weights.log import WeightLog
from etude.weights.records import Link, link_key, parse_link_key

MOST_ROWS = 200
COLUMNS = ("at_s", "kind", "size_bytes", "seconds", "blocked_s")
"""Fields of a published version that are plotted."""
LOGS: WeakKeyDictionary[RunReader, WeightLog] = WeakKeyDictionary()
"""Cache of opened logs, with the records that they have read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPage:
    """A page of versions, with the links that lead to them, and their releases."""

    records: Sequence[WeightVersion]
    links: Mapping[int, Sequence[Link]]
    releases: Mapping[int, Release]


def weights(query: RunQuery) -> Json:
    """Engines with their versions, and a page of versions."""
    limit = query.number("limit", 50)
    if not 1 <= limit <= MOST_ROWS:
        raise UserError(f"limit={limit}: expected 1 to {MOST_ROWS}")
    try:
        log = _log(query.run)
        numbers = log.versions()
        shown = [number for number in numbers if number < query.number("before", numbers[-1] + 1 if numbers else 0)]
        page = _read(query.run, log, shown[-limit:][::-1])
        about: dict[str, Json] = {"log_id": log.records.log_id(), "store": query.run.folder.store, "problem": ""}
    except EtudeError as error:
        numbers, page = [], VersionPage(records=(), links={}, releases={})
        about = {"log_id": None, "store": query.run.folder.store, "problem": str(error)}
    with query.run.folded(WeightHistory) as history:
        history.settle()
        newest = max([*numbers[-1:], *([] if history.newest is None else [history.newest])], default=None)
        state_bytes = history.published[max(history.published)]["state_bytes"] if history.published else None
        return {
            **about,
            "newest": newest,
            "total": len(numbers),
            "state_bytes": state_bytes,
            "versions": [_version(record, page, history) for record in page.records],
            "engines": [_engine(engine, newest) for engine in sorted(history.engines.values(), key=_place)],
            "regions": _lags(history),
        }


def weight_history(query: RunQuery) -> Json:
    """Columns over versions after ``since``, from events."""
    since = query.number("since", -1)
    with query.run.folded(WeightHistory) as history:
        history.settle()
        versions = sorted(version for version in history.published if version > since)
        events = [history.published[version] for version in versions]
        return {
            "since": since,
            "version": list(versions),
            **{name: [event[name] for event in events] for name in COLUMNS},
            "lags": {
                region: [lags.get(version) for version in versions] for region, lags in sorted(history.lags_s.items())
            },
        }


def _log(run: RunReader) -> WeightLog:
    if run not in LOGS:
        store = run.folder.store
        if "://" not in store and not Path(store).is_dir():
            raise RunFolderError("no weight version is published yet")
        LOGS[run] = open_log(run.folder)
    return LOGS[run]


def _read(run: RunReader, log: WeightLog, numbers: Iterable[int]) -> VersionPage:
    shown = [*numbers]
    records = [record for number in shown if (record := log.read(number)) is not None]
    ends = [ends for key in log.store.list("links") if (ends := parse_link_key(key)) and ends[1] in set(shown)]
    links: dict[int, list[Link]] = {}
    for link in log.records.read_sound(Link, [link_key(*pair) for pair in ends]):
        links.setdefault(link.target, []).append(link)
    return VersionPage(records=records, links=links, releases=_releases(run))


def _releases(run: RunReader) -> Mapping[int, Release]:
    if not run.config.release.enabled:
        return {}
    try:
        with closing(open_releases(run.folder, read_only=True)) as store:
            return {release.version: release for release in store.releases()}
    except RunFolderError:  # none yet
        return {}


def _version(record: WeightVersion, page: VersionPage, history: WeightHistory) -> Json:
    published = history.published.get(record.version)
    release = page.releases.get(record.version)
    links = page.links.get(record.version, ())
    return {
        "version": record.version,
        "base": record.base,
        "kind": record.kind,
        "size_bytes": record.size_bytes,
        "packs": len(record.packs),
        "digest": record.digest,
        "layout": record.layout,
        "step": record.step,
        "created": record.created,
        "writer": record.writer,
        "changed": history.has_changed(record.version),
        "seconds": None if published is None else published["seconds"],
        "blocked_s": None if published is None else published["blocked_s"],
        "lags": dict(history.lags_of(record.version)),
        "links": [
            {"kind": link.kind, "source": link.source, "size_bytes": sum(pack.size_bytes for pack in link.packs)}
            for link in links
        ],
        "served_by": [engine.name for engine in history.engines.values() if engine.version == record.version],
        "release": None if release is None else str(release.state),
    }


def _place(engine: EngineHistory) -> tuple[str, str]:
    return engine.region, engine.name


def _engine(engine: EngineHistory, newest: int | None) -> Json:
    load = engine.load
    return {
        "name": engine.name,
        "region": engine.region,
        "version": engine.version if engine.version >= 0 else None,
        "behind": None if newest is None or engine.version < 0 else newest - engine.version,
        "since_s": engine.since_s or None,
        "seen_s": engine.seen_s,
        "lag_s": fmean(engine.lags_s) if engine.lags_s else None,
        "lag_last_s": engine.lags_s[-1] if engine.lags_s else None,
        "stage_ms": fmean(engine.stages_ms) if engine.stages_ms else None,
        "pause_ms": max(engine.pauses_ms) if engine.pauses_ms else None,
        "busy": None if load is None else min(1.0, load["busy_s"] / load["window_s"]),
        "running": None if load is None else load["running"],
        "waiting": None if load is None else load["waiting"],
        "tokens_per_s": None if load is None else load["generated_tokens"] / load["window_s"],
    }


def _lags(history: WeightHistory) -> Json:
    """Lag of each region over its newest versions: mean, maximum, and newest."""
    regions: list[Json] = []
    for region, lags in sorted(history.lags_s.items()):
        recent = [lags[version] for version in sorted(lags)[-50:]]
        if recent:
            regions.append({"region": region, "mean_s": fmean(recent), "max_s": max(recent), "last_s": recent[-1]})
    return regions


def fleet_view(query: RunQuery) -> Json:
    """The regions of a run and their processes; one machine is a fleet of one region."""
    with query.run.folded(WeightHistory) as history:
        history.settle()
        return fleet(query.run, history, time())


ROUTES: Routes = {"GET /weights": weights, "GET /weights/history": weight_history, "GET /fleet": fleet_view}
