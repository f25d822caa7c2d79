"""The launcher ``ray``: each process has a detached actor on a machine of a Ray cluster, which starts it there.

    supervisor ──place──▶ named actor, by resources and region ──▶ HostProcess, in its own process group

Ray only places and restarts processes; it carries no data, and processes find each other as with any launcher. An actor
outlives the supervisor, and its process never outlives the actor. If a machine is lost, Ray restarts the actors of
single processes elsewhere; the supervisor restarts a group as a whole. Each run has its own namespace in the cluster.

With ``RAY_AUTH_MODE=token``, the cluster requires a token from every client including this launcher; Ray reads it
itself.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from etude.config.fleet import RayOptions
from etude.fleet.launcher import LaunchContext, LauncherUnavailable
from etude.fleet.specs import ProcessSpec, ProcessStatus
from etude.run.launchers.host_process import HostProcess, host_process, stop_all

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util import get_node_ip_address, list_named_actors, remove_placement_group
    from ray.util.placement_group import (
        get_current_placement_group,
        get_placement_group,
        placement_group,
        placement_group_table,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("Ray is not installed: pip install -e '.[ray]'") from error

LOOK_S = 1.0
"""Longest wait for the status of all actors; an actor that does not answer has no machine yet."""
REMOVE_S = 5.0
"""Longest time that an actor may need in addition to its process's grace time."""
GIB = 1024**3


@final
class ProcessActor:
    """Holds one process on its machine, as a Ray actor; the process ends with it."""

    def __init__(self, spec: ProcessSpec, folder: str, secrets: Mapping[str, str]) -> None:
        """Start the process. Its output and heartbeats are files below ``folder``, which is created on that machine."""
        self._spec, self._folder, self._secrets = spec, Path(folder), secrets
        self._process = self._start()

    def start(self) -> None:
        """Restart the process if it has ended."""
        if self._process.has_ended:
            self._process = self._start()

    def status(self) -> ProcessStatus:
        """The status of the process, with this machine's address."""
        return replace(self._process.status(), host=get_node_ip_address())

    def stop(self, grace_s: float) -> None:
        """Stop the process and its process group."""
        stop_all([self._process], grace_s)

    def _start(self) -> HostProcess:
        group = {} if self._spec.group is None else self._spec.group.rendezvous(_first_host())
        return host_process(self._spec, self._folder, {**self._secrets, **group})


def _first_host() -> str:
    """Address of the machine of a group's first member, as seen by an actor of the group."""
    first = placement_group_table(get_current_placement_group())["bundles_to_node_id"][0]
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == first)


@final
class RayLauncher:
    """Places processes on the Ray cluster of this machine, or on the one at an address."""

    def __init__(self, options: RayOptions, context: LaunchContext) -> None:
        """Connect. Raises :class:`~etude.fleet.launcher.LauncherUnavailable` if there is no cluster."""
        self._label = options.region_label
        self._folder = str(context.folder.absolute())
        self._namespace = f"etude-{context.run}"
        self._actor_class: Any = ray.remote(max_task_retries=0)(ProcessActor)
        with _reaching(options.address):
            if not ray.is_initialized():
                ray.init(
                    address=options.address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )

    @property
    def spans_regions(self) -> bool:
        """True if one cluster has the machines of all regions, marked by a label."""
        return bool(self._label)

    def place(self, spec: ProcessSpec) -> None:
        """Create an actor for a process, unless it has one; Ray finds a machine with free resources."""
        with _reaching("the cluster"):
            actor = self._actor(spec.name)
            if actor is not None:
                with suppress(GetTimeoutError, RayActorError):  # no machine yet, or Ray is moving it: it starts later
                    ray.get(actor.start.remote(), timeout=LOOK_S)
                return
            secrets = {name: os.environ[name] for name in spec.secrets if name in os.environ}
            self._actor_class.options(
                name=spec.name,
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=-1 if spec.group is None else 0,
                **self._needs(spec),
            ).remote(spec, self._folder, secrets)

    def remove(self, *names: str, grace_s: float) -> None:
        """Stop the processes through their actors, end the actors, and release a group's resources."""
        with _reaching("the cluster"):
            actors = {name: actor for name in names if (actor := self._actor(name)) is not None}
            stopping = [actor.stop.remote(grace_s) for actor in actors.values()]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=grace_s + REMOVE_S)
            for actor in actors.values():
                ray.kill(actor, no_restart=True)  # its process dies with it, if it does not answer
            for name in names:
                if (group := self._group(name)) is not None:
                    remove_placement_group(group)
            self._await_gone(actors)

    def look(self) -> Mapping[str, ProcessStatus]:
        """Query all actors of the run at once."""
        with _reaching("the cluster"):
            actors = {name: self._actor(name) for name in self._names()}
            answers = {name: actor.status.remote() for name, actor in actors.items() if actor is not None}
            if answers:
                ray.wait(list(answers.values()), num_returns=len(answers), timeout=LOOK_S)
            return {name: _answer(answer) for name, answer in answers.items()}

    def _needs(self, spec: ProcessSpec) -> dict[str, Any]:
        """Resource arguments for Ray: a share of a machine in the region, or a bundle of the group's
        placement group.
        """
        resources, region = spec.resources, {self._label: spec.region} if self._label else {}
        if spec.group is None:
            needs: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
            if resources.memory_gib:
                needs["memory"] = resources.memory_gib * GIB
            return {**needs, "label_selector": region} if region else needs
        group = self._group(spec.group.name) or placement_group(
            [{"CPU": resources.cpus, "GPU": resources.gpus}] * spec.group.size,
            strategy="STRICT_SPREAD",
            name=spec.group.name,
            lifetime="detached",
            bundle_label_selector=[region] * spec.group.size if region else None,
        )
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=spec.group.rank)
        return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": place}

    def _names(self) -> list[str]:
        actors = list_named_actors(all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == self._namespace]

    def _actor(self, name: str) -> Any:
        """The actor of a process, or ``None``."""
        try:
            return ray.get_actor(name, self._namespace)
        except ValueError:
            return None

    def _group(self, name: str) -> Any:
        """The placement group of a process group, named after its first process; or ``None``."""
        try:
            return get_placement_group(name)
        except ValueError:
            return None

    def _await_gone(self, names: Mapping[str, Any]) -> None:
        """Wait until the names are free: Ray ends actors asynchronously."""
        deadline_s = time.monotonic() + REMOVE_S
        while time.monotonic() < deadline_s and not names.keys().isdisjoint(self._names()):
            time.sleep(0.05)


def _answer(answer: Any) -> ProcessStatus:
    """The status in an actor's answer."""
    try:
        status: ProcessStatus = ray.get(answer, timeout=0)
    except GetTimeoutError:
        return ProcessStatus(incarnation="", is_pending=True)
    except RayActorError:
        return ProcessStatus(incarnation="", is_lost=True)
    return status


@contextmanager
def _reaching(place: str) -> Iterator[None]:
    """Add the cluster's address to connection errors."""
    try:
        yield
    except (RayError, ConnectionError) as error:
        line = str(error).strip().partition("\n")[0]
        raise LauncherUnavailable(f"the Ray cluster at {place} cannot be reached: {line}{_token_hint()}") from error


def _token_hint() -> str:
    """The fix for the error of a cluster that requires a token."""
    return (
        "" if "RAY_AUTH_MODE" in os.environ else "; if it requires a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
    )
