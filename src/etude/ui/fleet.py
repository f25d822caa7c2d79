"""The fleet of a run as a map of regions: their processes with health and load.

    fleet.toml, desired state ─┐                           ┌─ region: role, store, version, sessions, remark
    observed state by region ──┼─▶ regions with processes ─┤
    events: swaps, loads ──────┤                           └─ process: health, state, machine, version, load
    heartbeats of one machine ─┘

A machine without a fleet is one region, with the processes that its supervisor started. Health is one of five words,
with a reason; a process that was not observed is ``unknown``, never ``well``.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from etude.config.fleet import FleetConfig, RegionConfig
from etude.errors import EtudeError
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.fleet.state import Desired
from etude.run.fleet_status import RegionStatus, region_status, state_words
from etude.run.placement import fleet_objects, fleet_of
from etude.run.process_name import ProcessName
from etude.types import Json
from etude.ui.runs import RunReader
from etude.ui.weight_history import WeightHistory

WELL, WAITS, ILL, GONE, UNKNOWN = "well", "waits", "ill", "gone", "unknown"
"""Running; waiting for a machine, or drained; silent machine or heartbeat; ended; not observed."""
SILENT_S = 20.0
"""Age from which a running process's heartbeat, which is written every second, counts as late."""
Facts: TypeAlias = dict[str, Json]


def fleet(run: RunReader, history: WeightHistory, now_s: float) -> Json:
    """The map at Unix time ``now_s``."""
    config = fleet_of(run.folder)
    return _one_machine(run, history, now_s) if config is None else _regions(run, config, history, now_s)


def _one_machine(run: RunReader, history: WeightHistory, now_s: float) -> Json:
    beats = {file.name[1:-5]: file.stat().st_mtime for file in run.folder.path.glob(".*.beat")}
    is_alive = bool(run.overview()["alive"])
    processes = [_local(name, beats.get(name), is_alive, history, now_s) for name in history.started]
    region: Facts = {
        "name": "this machine",
        "is_home": True,
        "store": run.folder.store,
        "remark": "",
        **_served("", history, now_s),
        **_sandboxes(run, 0),
        "processes": _sorted(processes),
    }
    return {"kind": "machine", "generation": None, "launcher": "local", "regions": [region], "problem": ""}


def _local(name: str, beat_s: float | None, is_alive: bool, history: WeightHistory, now_s: float) -> Facts:
    started = history.started[name]
    age_s = None if beat_s is None else now_s - beat_s
    health, state = (WELL, "runs") if is_alive else (GONE, "ended with the run")
    if is_alive and age_s is not None and age_s > SILENT_S:
        health, state = (GONE, "ended, or silent") if age_s > 3 * SILENT_S else (ILL, f"silent for {age_s:.0f} s")
    return {
        "name": name,
        "command": ProcessName.parse(name).command,
        "health": health,
        "state": state,
        "host": "",
        "pid": started["pid"],
        "restarts": started["restarts"],
        "started_s": started["at_s"],
        "beat_age_s": age_s,
        "memory_bytes": None,
        "is_lent": False,
        **_load(name, history),
    }


def _regions(run: RunReader, config: FleetConfig, history: WeightHistory, now_s: float) -> Json:
    desired, generation, problem = _desired(run)
    specs = () if desired is None else desired.specs
    config = config if desired is None else desired.fleet
    regions: list[Json] = []
    for region in config.regions:
        name = "" if region.name == config.home else region.name
        seen = RegionStatus() if problem else region_status(run.folder, name, generation)
        own = [spec for spec in specs if spec.region == region.name]
        regions.append({
            "name": region.name,
            "is_home": region.name == config.home,
            "store": region.store,
            "remark": seen.remark,
            "supervisor": seen.host,
            "observed_age_s": seen.age_s,
            "lent_engines": region.lent_engines,
            "engines": region.engines,
            **_served(name, history, now_s),
            **_sandboxes(run, region.sandbox_hosts),
            "processes": _sorted(_placed(region, own, seen, history)),
        })  # fmt: skip
    return {
        "kind": "fleet",
        "generation": generation or None,
        "launcher": config.launcher,
        "regions": regions,
        "problem": problem,
    }


def _desired(run: RunReader) -> tuple[Desired | None, int, str]:
    """The desired state, its generation, and the reason if it is unknown."""
    try:
        home = fleet_objects(run.folder)
        generation = home.generation()
        return (home.desired(generation), generation, "") if generation else (None, 0, "its regions have not begun yet")
    except EtudeError as error:
        return None, 0, str(error)


def _placed(
    region: RegionConfig, specs: list[ProcessSpec], seen: RegionStatus, history: WeightHistory
) -> Iterator[Facts]:
    for spec in specs:
        status = seen.statuses.get(spec.name)
        is_drained = spec.name in seen.drained
        started = history.started.get(spec.name)
        yield {
            "name": spec.name,
            "command": ProcessName.parse(spec.name).command,
            "health": _health(status, seen, is_drained=is_drained),
            "state": state_words(status, is_drained=is_drained) if seen.age_s is not None or is_drained else "not seen",
            "host": status.host if status else "",
            "pid": status.pid if status and status.pid else None,
            "restarts": None if started is None else started["restarts"],
            "started_s": None if started is None else started["at_s"],
            "beat_age_s": None,
            "memory_bytes": status.memory_bytes if status and status.memory_bytes else None,
            "is_lent": spec.is_lent,
            **_load(spec.name, history),
        }


def _health(status: ProcessStatus | None, seen: RegionStatus, *, is_drained: bool) -> str:
    if is_drained:
        return WAITS
    if not seen.is_current:
        return UNKNOWN
    if status is None or status.is_pending:
        return WAITS
    if status.is_lost:
        return ILL
    return WELL if status.is_running else GONE


def _served(region: str, history: WeightHistory, now_s: float) -> Facts:
    """The version that a region serves, its lag, and the number of its sessions."""
    engines = [engine for engine in history.engines.values() if engine.region == region and engine.version >= 0]
    version, newest = min((engine.version for engine in engines), default=None), history.newest
    lags = history.lags_s.get(region, {})
    facts: Facts = {
        "version": version,
        "behind": None if version is None or newest is None else newest - version,
        "lag_s": lags[max(lags)] if lags else None,
        "sessions": None,
        "is_away": False,
    }
    if region in history.regions:
        event = history.regions[region]
        facts |= {"sessions": event["open"], "is_away": event["is_away"], "told_age_s": now_s - event["at_s"]}
    return facts


def _load(name: str, history: WeightHistory) -> Facts:
    engine = history.engines.get(name)
    load = None if engine is None else engine.load
    return {
        "version": engine.version if engine is not None and engine.version >= 0 else None,
        "busy": None if load is None else min(1.0, load["busy_s"] / load["window_s"]),
        "running": None if load is None else load["running"],
    }


def _sandboxes(run: RunReader, hosts: int) -> Facts:
    """The kind of sandboxes, and a region's number of sandbox hosts."""
    return {"sandboxes": str(run.config.sandboxes.kind), "sandbox_hosts": hosts}


def _sorted(processes: Iterable[Facts]) -> list[Json]:
    return [*sorted(processes, key=_order)]


def _order(facts: Mapping[str, Json]) -> tuple[int, str]:
    commands = ("train", "rollouts", "serve", "gateway", "production", "product", "release", "feedback", "relay")
    command = str(facts["command"])
    return commands.index(command) if command in commands else len(commands), str(facts["name"])
