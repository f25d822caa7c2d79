"""The sandboxes of a run: a provider of the recipe's kind, and in it the environments of its tasks.

    recipe ──▶ provider ──▶ warm pool, if configured ──▶ services inside ──▶ EnvironmentTaskSandboxes.open(task)

This module chooses the implementations, which themselves store images, create sandboxes and grade.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

from etude.config.tasks import PROVIDERS, SandboxConfig, TaskConfig
from etude.errors import ConfigError, EtudeError
from etude.protocols import Grader, GraderContext, Sandbox, SandboxProvider
from etude.rewards.graders.answers import AnswerGrader
from etude.rewards.graders.functions import FreshGrader, GraderByKind, HiddenTests
from etude.rewards.graders.hidden_tests import HiddenTestGrader
from etude.rewards.graders.named import NamedGrader
from etude.rewards.graders.queries import QueryGrader
from etude.rewards.graders.script import ScriptGrader
from etude.sandbox_spec import EnvironmentSpec, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.providers import ProviderContext
from etude.sandboxes.remote.hosts import FindHosts, HostedSandboxes, SandboxLoad
from etude.sandboxes.services import ServicedSandboxes, sandbox_spec
from etude.sandboxes.warm_pool import SandboxPool, WarmPoolLimits
from etude.types import AnswerChecks, Checks, FunctionChecks, NamedChecks, QueryChecks, ScriptChecks, Task, TestChecks

NOTHING: Mapping[str, Path] = MappingProxyType({})
"""No mounts in addition to a task's environment."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})
"""``tasks.graders`` of a recipe without its own graders."""
WAITING_EACH = 16
"""Maximum waiting requests per sandbox of a warm pool."""
IMAGES = "images"
"""Folder of images next to the tasks."""


def base_store(config: SandboxConfig) -> ImageStore:
    """The store of base systems: the recipe's folder of images, or the user's."""
    return ImageStore(Path(config.images) if config.images else None)


def image_store(sandboxes: SandboxConfig, tasks: TaskConfig) -> ImageStore:
    """The store of the tasks' images: next to the tasks, or with the base systems."""
    beside = Path(tasks.folder) / IMAGES
    return ImageStore(beside) if tasks.folder and beside.is_dir() else base_store(sandboxes)


def open_provider(config: SandboxConfig, store: ImageStore, find_hosts: Sequence[FindHosts] = ()) -> SandboxProvider:
    """The provider of a recipe, over the base systems of ``store`` and the sandbox hosts of a fleet; the caller closes
    it.

    Raises :class:`~etude.errors.ConfigError` for a provider that this machine lacks, and for ``local``, which does not
    isolate its files.
    """
    if config.kind == "local":
        raise ConfigError("sandboxes.kind = 'local' has no machine around its files: use ns")
    provider = open_kind(config, store, find_hosts)
    return SandboxPool(provider, pool_limits(config)) if config.pool_size else provider


@asynccontextmanager
async def opened_provider(config: SandboxConfig) -> AsyncIterator[SandboxProvider]:
    """The provider of a recipe over its base systems, closed afterwards. Raises as :func:`open_provider`."""
    provider = open_provider(config, base_store(config))
    try:
        yield provider
    finally:
        await provider.close()


def pool_limits(config: SandboxConfig) -> WarmPoolLimits:
    """Limits of a recipe's warm pool: one concurrent start per core of this machine, or no limit if sandboxes run on
    other machines.
    """
    live = config.pool_size
    waiting = max(WarmPoolLimits().waiting, WAITING_EACH * live)
    if config.kind == "remote":
        return WarmPoolLimits(live=live, waiting=waiting, starting=live, reserve_bytes=0, start_bytes=0)
    return WarmPoolLimits(live=live, waiting=waiting, starting=max(WarmPoolLimits().starting, os.cpu_count() or 1))


def open_kind(config: SandboxConfig, store: ImageStore, find_hosts: Sequence[FindHosts] = ()) -> SandboxProvider:
    """The provider of ``sandboxes.kind`` alone, without a warm pool. Raises :class:`~etude.errors.ConfigError`."""
    context = ProviderContext(kind=config.kind, store=store, find_hosts=find_hosts)
    return cast("SandboxProvider", PROVIDERS.make(config.kind, config.options, context))


class PlainTaskSandboxes:
    """Sandboxes with only a task's files; a :class:`~etude.rollouts.worker.TaskSandboxes`."""

    def __init__(self, provider: SandboxProvider) -> None:
        """The caller closes ``provider``."""
        self._provider = provider

    async def open(self, task: Task, *, gateway: str = "") -> Sandbox:
        """A fresh sandbox with the task's files and no network.

        Raises :class:`~etude.errors.ConfigError` for one that needs more.
        """
        if task.environment is not None:
            raise ConfigError(f"task {task.task_id!r} needs a machine around its files: set sandboxes.kind = 'ns'")
        return await self._provider.create(task.files)


class EnvironmentTaskSandboxes:
    """Opens the environments of tasks; a :class:`~etude.rollouts.worker.TaskSandboxes`."""

    def __init__(
        self,
        provider: SandboxProvider,
        images: ImageStore,
        *,
        beside: Mapping[str, Path] = NOTHING,
        reaches: bool = False,
    ) -> None:
        """``provider`` is closed with this; ``beside`` are mounts for every agent in addition to its task's
        environment; with ``reaches``, a sandbox reaches the gateway of its session, for agents that call the model from
        inside. In a pool, graders have priority over rollouts: rollouts that wait for their grades hold sandboxes, and
        could hold all of them forever.
        """
        if isinstance(provider, SandboxPool):
            self.sandboxes = ServicedSandboxes(provider)
            self._grading = ServicedSandboxes(provider.urgent())
        else:
            self.sandboxes = self._grading = ServicedSandboxes(provider)
        self._provider = provider
        self._images = images
        self._beside = beside
        self._reaches = reaches
        self._gateways: set[str] = set()
        self._announcements: set[asyncio.Task[None]] = set()

    async def open(self, task: Task, *, gateway: str = "") -> Sandbox:
        """A fresh sandbox with the task's environment, running services and files.

        Raises :class:`~etude.errors.SandboxError`, and :class:`~etude.errors.ConfigError` for a missing image.
        """
        return await self._open(task.files, task.environment or EnvironmentSpec(), gateway)

    def announce(self, task: Task, count: int) -> None:
        """Let pools prepare ``count`` sandboxes of a task, on this machine or on hosts. This is a hint, without effect
        if there is no pool or if the gateway to reach is unknown. Sandboxes with services are forks of a retained one,
        which needs no announcement.
        """
        environment = task.environment or EnvironmentSpec()
        is_known = not self._reaches or len(self._gateways) == 1
        if isinstance(self._provider, SandboxPool | HostedSandboxes) and not environment.services and is_known:
            announcing = asyncio.create_task(self._announce(self._provider, environment, count))
            self._announcements.add(announcing)
            announcing.add_done_callback(self._announcements.discard)

    async def _announce(
        self, provider: SandboxPool | HostedSandboxes, environment: EnvironmentSpec, count: int
    ) -> None:
        with suppress(EtudeError):  # the later request reports the error
            spec = self._agents_spec(environment, next(iter(self._gateways), ""))
            if isinstance(provider, SandboxPool):
                provider.announce(spec, count)
            else:
                await provider.announce(spec, count)

    async def open_empty(self, gateway: str = "") -> Sandbox:
        """An agent's sandbox without a task. Raises :class:`~etude.errors.SandboxError`."""
        return await self._open({}, EnvironmentSpec(), gateway)

    def spec_of(self, environment: EnvironmentSpec) -> SandboxSpec:
        """The spec of an environment's sandbox."""
        return sandbox_spec(environment, self._images.open(environment.image) if environment.image else None)

    def grader(self, slack_s: float, answers: AnswerGrader, names: Mapping[str, str] = NO_NAMES) -> GraderByKind:
        """Grades any kind of checks in sandboxes of the same provider.

        ``slack_s`` is the time for grading in addition to the task's own time: ``rollouts.grading_timeout_s``. The
        caller closes ``answers``; ``names`` are ``tasks.graders``.
        """
        graders: Mapping[type[Checks], Grader] = {
            FunctionChecks: FreshGrader(HiddenTests(), self._grading),
            TestChecks: HiddenTestGrader(self._grading, self._images, slack_s=slack_s),
            ScriptChecks: ScriptGrader(self._grading, self._images),
            QueryChecks: QueryGrader(self._grading, spec_of=self.spec_of),
            AnswerChecks: answers,
            NamedChecks: NamedGrader(names, GraderContext(open_sandbox=self._open_to_grade)),
        }
        return GraderByKind(graders)

    async def _open_to_grade(self, task: Task) -> Sandbox:
        """A fresh sandbox of a task for its grader, without the additional mounts of agents."""
        environment = task.environment or EnvironmentSpec()
        return await self._grading.create(task.files, self.spec_of(environment), environment.services)

    async def _open(self, files: Mapping[str, str], environment: EnvironmentSpec, gateway: str) -> Sandbox:
        if self._reaches and gateway:
            self._gateways.add(gateway)
        return await self.sandboxes.create(files, self._agents_spec(environment, gateway), environment.services)

    def _agents_spec(self, environment: EnvironmentSpec, gateway: str) -> SandboxSpec:
        spec = self.spec_of(environment)
        reached = (urlsplit(gateway).netloc,) if self._reaches and gateway else ()
        return replace(spec, mounts={**spec.mounts, **self._beside}, allow=(*spec.allow, *reached))

    def load(self) -> SandboxLoad:
        """Demand for sandboxes on several hosts, and their capacity; none on this machine, or behind a warm pool."""
        return self._provider.load() if isinstance(self._provider, HostedSandboxes) else SandboxLoad()

    async def close(self) -> None:
        """Close every sandbox; calling it twice is harmless."""
        await asyncio.gather(*self._announcements)
        for part in (self.sandboxes, self._grading, self._provider):
            await part.close()
