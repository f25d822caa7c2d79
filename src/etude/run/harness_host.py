"""Permissions of the external harness of a run on a fleet, on a sandbox host: its files, and the run's gateways.

    directories of the regions ──every FOLLOW_S──▶ RunGateways ──may be reached──▶ clients of the host

A session's gateway is known only when its rollout starts, and gateways start and stop; so a host reads the directories,
as rollouts do. An entry is valid only if the run signed it (:mod:`etude.run.directory`). This module owns the
permissions that follow from the run; the host's operator decides on all others.
"""

import asyncio
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import final
from urllib.parse import urlsplit

from etude.config.rollouts import CommandOptions
from etude.errors import ConfigError, InfrastructureError
from etude.run.directory import Directory
from etude.run.folder import RunFolder
from etude.run.placement import fleet_of
from etude.run.process_name import GATEWAY
from etude.run.region_stores import open_directory
from etude.run.rollouts import mounts_beside
from etude.sandboxes.remote.principals import SandboxClient

FOLLOW_S = 0.5
"""Interval at which the directories are read: more often than rollouts, which request what they found there."""


@final
class RunGateways:
    """The places ``host:port`` of a run's gateways, and those that are ``named``; a container."""

    def __init__(self, directories: Mapping[str, Directory], named: Container[str] = ()) -> None:
        """``directories`` by region."""
        self._directories = directories
        self._named = named
        self._places: dict[str, Collection[str]] = {}

    def __contains__(self, place: object) -> bool:
        return place in self._named or any(place in places for places in self._places.values())

    async def follow(self) -> None:
        """Update the gateways from the directories, forever; while a store is unavailable, its gateways stay."""
        async with asyncio.TaskGroup() as group:
            for region in self._directories:
                group.create_task(self._follow_region(region))

    async def _follow_region(self, region: str) -> None:
        while True:
            with suppress(InfrastructureError):
                urls = await asyncio.to_thread(self._directories[region].urls, GATEWAY.command)
                self._places[region] = {urlsplit(url).netloc for url in urls.values()}
            await asyncio.sleep(FOLLOW_S)


def serve_run(folder: RunFolder, client: SandboxClient) -> tuple[SandboxClient, RunGateways]:
    """Let a client's sandboxes reach the gateways of a run, once they are followed, and see its harness's files.

    Raises :class:`~etude.errors.ConfigError` for a run without a fleet, or without an external harness.
    """
    fleet, harness = fleet_of(folder), folder.config().harness
    if fleet is None or not isinstance(harness.options, CommandOptions):
        missing = f"harness.kind = {harness.kind!r}" if fleet else "it is on one machine"
        raise ConfigError(f"--run {folder.name}: only the external harness of a run on a fleet needs that; {missing}")
    places = {region.name: "" if region.name == fleet.home else region.name for region in fleet.regions}
    directories = {name: open_directory(folder, place) for name, place in places.items()}
    permissions = client.permissions
    gateways = RunGateways(directories, permissions.allow)
    folders = (*permissions.folders, *mounts_beside(folder.path, harness.options).values())
    return replace(client, permissions=replace(permissions, allow=gateways, folders=folders)), gateways
