"""Findings of `etude doctor --fleet` about the sites of a fleet, as seen from the calling machine.

    each region's store     round trip, rate, clock, and that it refuses to overwrite
    production              its load, if machines are lent according to it
    of a run, besides       the newest weights there; its gateways: keys, engines, versions, round trip
    of all sites            versions of étude, Python and torch, as supervisors saw them, and here

This module defines the probes and the limits for slow. It leaves nothing behind, and needs no étude process except
those that it probes.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

import aiohttp

from etude.clock import unix_s
from etude.config.fleet import FleetConfig, RegionConfig
from etude.dashboard import formatting
from etude.errors import EtudeError
from etude.objects import CLOCK_FOLDER, Objects, ObjectStore, check_put_if_absent
from etude.run.folder import RunFolder
from etude.run.keys import RUN_KEY_VARIABLE, KeyRole
from etude.run.lending import make_production
from etude.run.machine_info import versions
from etude.run.placement import fleet_objects
from etude.run.preflight import MachineFinding
from etude.run.process_name import GATEWAY, ProcessName
from etude.run.region_stores import open_directory, weights_url
from etude.run.weight_log import far_options, log_id_of, open_log, open_store

REGION_S = 60.0
"""Longest time for one region."""
ROUND_TRIPS = 5
PROBE_BYTES = 4 << 20
SLOW_ROUND_TRIP_S = 0.5
"""A store with a longer round trip is on another continent or overloaded."""
SLOW_BYTES_PER_S = 5e6
"""Minimum transfer rate: below it a full copy of an 8 GB model takes half an hour."""
GATEWAY_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
CLOCK_S = 2.0
"""Maximum clock difference: a larger one confuses people who compare logs; étude itself does not compare clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreMeasurement:
    """Measurements of a store."""

    round_trip_s: float
    """Median time to read an object that does not exist."""
    put_bytes_per_s: float
    get_bytes_per_s: float
    clock_s: float
    """Seconds that the store's clock is ahead of ours."""

    @property
    def faults(self) -> Iterator[str]:
        """Problems of the store, in words: slow, or wrong clock."""
        if self.round_trip_s > SLOW_ROUND_TRIP_S:
            yield "slow to answer"
        if min(self.put_bytes_per_s, self.get_bytes_per_s) < SLOW_BYTES_PER_S:
            yield "slow to transfer"
        if abs(self.clock_s) > CLOCK_S:
            side = "ahead of" if self.clock_s > 0 else "behind"
            yield f"its clock is {abs(self.clock_s):.0f} s {side} this machine's"


def measure_store(store: Objects) -> StoreMeasurement:
    """Probe a store. Raises :class:`~etude.errors.UserError` if it overwrites, and ``InfrastructureError``."""
    check_put_if_absent(store)
    key = f"{CLOCK_FOLDER}/{uuid4().hex}"
    round_trips_s = [_timed(lambda: store.get(key))[0] for _ in range(ROUND_TRIPS)]
    data = os.urandom(PROBE_BYTES)  # random, as some networks compress
    put_s, _ = _timed(lambda: store.put_if_absent(key, data))
    get_s, _ = _timed(lambda: store.get(key))
    store.delete(key)
    before_s = unix_s()
    told_s = store.now()
    return StoreMeasurement(
        round_trip_s=statistics.median(round_trips_s),
        put_bytes_per_s=PROBE_BYTES / put_s,
        get_bytes_per_s=PROBE_BYTES / get_s,
        clock_s=told_s - (before_s + unix_s()) / 2,
    )


def _timed(call: Callable[[], object]) -> tuple[float, object]:
    began_s = time.perf_counter()
    answer = call()
    return max(time.perf_counter() - began_s, 1e-9), answer


async def look_at_fleet(fleet: FleetConfig, folder: RunFolder | None) -> AsyncIterator[MachineFinding]:
    """Probe one region after another and yield each finding; with a run, probe its processes too."""
    for region in fleet.regions:
        try:
            async with asyncio.timeout(REGION_S):
                async for finding in _look_at_region(fleet, region, folder):
                    yield finding
        except TimeoutError:
            words = f"no answer within {REGION_S:g} s: is the link down?"
            yield MachineFinding(name=region.name, works=False, words=words)
    if folder is not None:
        yield await asyncio.to_thread(_look_at_versions, fleet, folder)


def _look_at_versions(fleet: FleetConfig, folder: RunFolder) -> MachineFinding:
    """The versions of all sites side by side; names a region whose supervisor has reported nothing."""
    sites, silent = {"here": versions()}, []
    for region in fleet.regions:
        try:
            newest = fleet_objects(folder, "" if region.name == fleet.home else region.name).observed()
        except EtudeError:
            newest = None
        if newest is None or not newest[0].versions:
            silent.append(region.name)
        else:
            sites[region.name] = dict(newest[0].versions)
    return MachineFinding(name="versions", works=is_alike(sites), words=compare_versions(sites, silent))


def is_alike(sites: Mapping[str, Mapping[str, str]]) -> bool:
    """True if all sites have the same versions."""
    return len({tuple(sorted(each.items())) for each in sites.values()}) == 1


def compare_versions(sites: Mapping[str, Mapping[str, str]], silent: Sequence[str] = ()) -> str:
    """Describe the versions that all sites share, and site by site those that differ: ``torch differs: 2.4 (here, eu);
    2.5 (ap)``. The versions of ``silent`` sites are unknown.
    """
    parts = []
    for program in sites["here"]:
        places: dict[str, list[str]] = {}
        for site, its in sites.items():
            places.setdefault(its.get(program, "unknown"), []).append(site)
        words = [text if len(places) == 1 else f"{text} ({', '.join(names)})" for text, names in places.items()]
        parts.append(f"{program} {'; '.join(words)}" if len(places) == 1 else f"{program} differs: {'; '.join(words)}")
    unknown = [f"unknown in {', '.join(silent)}, whose supervisor has not reported"] if silent else []
    return ", ".join([*parts, *unknown])


async def _look_at_region(
    fleet: FleetConfig, region: RegionConfig, folder: RunFolder | None
) -> AsyncIterator[MachineFinding]:
    url = region.store or (folder.url if folder is not None else "")
    if url:
        yield await asyncio.to_thread(_look_at_store, region.name, url)
    if region.lending.places:
        yield await asyncio.to_thread(_look_at_production, region)
    if folder is not None:
        place = "" if region.name == fleet.home else region.name
        yield await asyncio.to_thread(_look_at_weights, region.name, folder, place)
        for finding in await _look_at_gateways(region, folder, place):
            yield finding


def _look_at_store(name: str, url: str) -> MachineFinding:
    try:
        measured = measure_store(ObjectStore(url, far_options(url), creates=False))
    except EtudeError as error:
        return MachineFinding(name=f"{name}: store", works=False, words=str(error))
    rates = [f"{way} {formatting.size(rate)}/s" for way, rate in
             (("put", measured.put_bytes_per_s), ("get", measured.get_bytes_per_s))]  # fmt: skip
    words = f"{url}: {1e3 * measured.round_trip_s:.0f} ms, {', '.join(rates)}, refuses to overwrite"
    faults = list(measured.faults)
    return MachineFinding(name=f"{name}: store", works=not faults, words="; ".join([words, *faults]))


def _look_at_production(region: RegionConfig) -> MachineFinding:
    """The production load that decides whether the region's machines are lent."""
    name = f"{region.name}: production"
    try:
        load = make_production(region.lending).load()
    except EtudeError as error:
        return MachineFinding(name=name, works=False, words=str(error))
    return MachineFinding(name=name, works=True, words=f"{load.running} calls run, {load.waiting} wait")


def _look_at_weights(name: str, folder: RunFolder, place: str) -> MachineFinding:
    """The newest version in a region compared with the newest at home."""
    try:
        newest = open_log(folder).latest()
        log = open_store(weights_url(folder, place), creates=False, log_id=log_id_of(folder), far=True)
        version = log.latest()
    except EtudeError as error:
        return MachineFinding(name=f"{name}: weights", works=False, words=str(error))
    words = "none yet" if version is None else f"version {version}"
    if version != newest:
        words += f", home has {newest}: is a relay of {name} running?"
    return MachineFinding(name=f"{name}: weights", works=version == newest, words=words)


async def _look_at_gateways(region: RegionConfig, folder: RunFolder, place: str) -> list[MachineFinding]:
    """The gateways in a region's directory, and their answers."""
    directory, title = open_directory(folder, place), f"{region.name}: gateways"
    try:
        urls = await asyncio.to_thread(directory.urls, GATEWAY.command)
        entries = await asyncio.to_thread(directory.objects.list, "")
    except EtudeError as error:
        return [MachineFinding(name=title, works=False, words=str(error))]
    if any(entry.startswith(GATEWAY.command) for entry in entries) and not urls:
        words = f"{directory.objects.url} has gateways, none signed with this run's key: set {RUN_KEY_VARIABLE} to it"
        return [MachineFinding(name=title, works=False, words=words)]
    findings: list[MachineFinding] = []
    if len(urls) != region.gateways:
        words = f"{len(urls)} of {region.gateways} have announced their URL"
        findings.append(MachineFinding(name=title, works=False, words=words))
    headers = {"Authorization": f"Bearer {folder.key(KeyRole.ADMIN)}"}
    async with aiohttp.ClientSession(headers=headers, timeout=GATEWAY_TIMEOUT) as http:
        findings += await asyncio.gather(*(_query(http, name, url) for name, url in urls.items()))
    return findings


async def _query(http: aiohttp.ClientSession, name: ProcessName, url: str) -> MachineFinding:
    """Request a gateway's list of engines, which needs its admin key."""
    began_s = time.perf_counter()
    try:
        async with http.get(f"{url}/healthz") as answer:
            health = await answer.json()
        took_s = time.perf_counter() - began_s
        async with http.get(f"{url}/engines") as answer:
            status = answer.status
        states, version = health["engines"], health["engine"]["version"]
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
        words = f"{url}: {type(error).__name__}: {error}"
        return MachineFinding(name=str(name), works=False, words=words)
    healthy = int(states.get("healthy", 0))
    words = f"{url}: {1e3 * took_s:.0f} ms, weights {version}, {healthy} of {sum(states.values())} engines healthy"
    if status in (401, 403):
        words += f"; it rejects the admin key of this run: {RUN_KEY_VARIABLE} differs there"
    return MachineFinding(name=str(name), works=healthy > 0 and status == 200, words=words)
