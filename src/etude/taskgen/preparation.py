"""Preparation of a repository for task generation: install, survey, and check for copies of the package.

    texts ──▶ project ──▶ layer of dependencies ──▶ runs of the tests, in several orders ──▶ survey

Waits for pip and for runs of the tests, each with a deadline. :mod:`~etude.taskgen.survey` evaluates the runs.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.protocols import Sandbox, SandboxProvider
from etude.sandbox_spec import WORKDIR, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.candidates import sources_of
from etude.taskgen.failures import CopyError, InstallError
from etude.taskgen.installer import Installer, score
from etude.taskgen.installs import (
    SITE,
    Requirements,
    attempts,
    environment,
    install,
    missing_modules,
    record_project,
    without_copies,
)
from etude.taskgen.projects import Project
from etude.taskgen.scrubbing import copy_clean
from etude.taskgen.survey import Survey, survey_of
from etude.taskgen.testruns import RunObservation, TestRun, observe
from etude.taskgen.validator import SANDBOX_TTL_S, PreparedRepository
from etude.tasks.repositories.folder import PackageFolder

PINS_FILE = "requirements.txt"
"""File in a package's folder that lists the installed packages."""
REPAIRS = 3
"""Maximum installations per list of requirements, each with the modules that the run before lacked."""
RUNS = 3
"""Runs of the unchanged tests that must agree: the first in the original order, the others shuffled."""
RUN_TIMEOUT_S = 300.0
WATCHED_SLACK = 6.0
"""Factor by which an observed run may be slower."""
ASK_PYTHON = "import sys; print('%d.%d' % sys.version_info[:2])"
FIND_COPIES = """
find / \\( -path /proc -o -path /sys -o -path /dev -o -path {work} -o -path {site} -o -path /tmp \\) -prune -o \\
  \\( {names} \\) -print 2>/dev/null | head -5
"""
LIMITS = SandboxLimits(memory_bytes=2 << 30, processes=256)
"""Limits for runs of whole test suites."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of a package's preparation."""

    base: str = ""
    """Stored base system of the tasks' images; empty: the provider's default."""
    before: str = ""
    """Date; packages uploaded to an index later are not installed."""
    seed: int = 0
    timeout_s: float = RUN_TIMEOUT_S
    """Timeout of one run of all tests."""


class Preparation:
    """Prepares the repository of one package for its candidates."""

    def __init__(
        self,
        provider: SandboxProvider,
        store: ImageStore,
        folder: PackageFolder,
        settings: Settings,
        installer: Installer | None = None,
    ) -> None:
        """``installer`` runs if the listed requirements cannot be installed, or if no test passes with them."""
        self._installer = installer
        self._provider = provider
        self._store = store
        self._folder = folder
        self._settings = settings

    async def bench(
        self, tree: Path, project: Project, texts: Mapping[str, str], scratch: Path, *, say: Say
    ) -> PreparedRepository:
        """Install requirements, survey tests and check for copies; ``scratch`` is an empty folder for temporary files.

        Raises :class:`~etude.taskgen.failures.RepositoryError` with the reason, and
        :class:`~etude.errors.SandboxError`.
        """
        variables = environment(project)
        pristine = await self._pristine(tree, scratch)
        installed, first = await self._installed(project, texts, scratch, pristine, say)
        digest = await asyncio.to_thread(self._store.add_layer, installed)
        image = Image(base=self._settings.base, layers=(self._store.layer(digest), pristine), environment=variables)
        survey = self._index()
        async with self._sandbox(image) as sandbox:
            await self._refuse_copies(sandbox, project)
            if survey is None:
                survey = await self._survey(sandbox, project, texts, first, say)
                self._folder.write("survey.json", survey.encode())
        return PreparedRepository(
            project=project,
            texts=texts,
            tree=tree,
            survey=survey,
            site=digest,
            pristine=image,
            base=self._settings.base,
            environment=variables,
            seed=self._settings.seed,
        )

    async def site(self, tree: Path, project: Project, texts: Mapping[str, str], scratch: Path, *, say: Say) -> str:
        """Install the requirements of a project and its tests; return the layer's digest. Raises like :meth:`bench`."""
        pristine = await self._pristine(tree, scratch)
        installed, _ = await self._installed(project, texts, scratch, pristine, say)
        return await asyncio.to_thread(self._store.add_layer, installed)

    async def site_again(self, project: Project, texts: Mapping[str, str], scratch: Path) -> str | None:
        """Install exactly the packages that an earlier :meth:`site` installed, without a run of the tests.

        Returns the layer's digest, or ``None`` if the folder does not list the packages. Raises
        :class:`~etude.taskgen.failures.InstallError`.
        """
        pins = (self._folder.read(PINS_FILE) or b"").decode().split()
        if not pins:
            return None
        layer = scratch / "site"
        python = await self._python()
        await asyncio.to_thread(install, Requirements(requirements=tuple(pins), python=python), layer)
        without_copies(layer, project)
        record_project(layer, project, texts)
        return await asyncio.to_thread(self._store.add_layer, layer)

    async def _pristine(self, tree: Path, scratch: Path) -> Path:
        """The layer of the unchanged package, in a temporary store."""
        with_project = scratch / "pristine"
        await asyncio.to_thread(copy_clean, tree, with_project / WORKDIR.strip("/"), {})
        private = ImageStore(scratch / "private")
        return private.layer(await asyncio.to_thread(private.add_layer, with_project))

    async def _installed(
        self, project: Project, texts: Mapping[str, str], scratch: Path, pristine: Path, say: Say
    ) -> tuple[Path, RunObservation]:
        """Install the listed requirements; if no test passes with them, use the installer, if there is one."""
        try:
            installed, first = await self._install(project, texts, scratch, pristine, say)
            if self._installer is None or score(first)[0] > 0:
                return installed, first
        except InstallError as error:
            if self._installer is None:
                raise
            say(str(error))
        say("the installer's model tries")
        return await self._ask_installer(project, texts, scratch, pristine)

    async def _ask_installer(
        self, project: Project, texts: Mapping[str, str], scratch: Path, pristine: Path
    ) -> tuple[Path, RunObservation]:
        assert self._installer is not None
        layer = scratch / "site-installer"
        image = Image(base=self._settings.base, layers=(pristine,))
        await self._installer.install(project, texts, image, layer)
        without_copies(layer, project)
        record_project(layer, project, texts)
        return layer, await self._first_run(project, (layer, pristine), environment(project))

    def _index(self) -> Survey | None:
        """The survey of an earlier build of the same version."""
        data = self._folder.read("survey.json")
        try:
            return None if data is None else Survey.decode(data)
        except ValueError:
            return None

    async def _install(
        self, project: Project, texts: Mapping[str, str], scratch: Path, pristine: Path, say: Say
    ) -> tuple[Path, RunObservation]:
        """Try lists of requirements, and add missing modules, until the tests can be collected."""
        python = await self._python()
        last: InstallError | None = None
        for number, requirements in enumerate(attempts(project)):
            installed: tuple[Path, RunObservation, tuple[str, ...]] | None = None
            for repair in range(REPAIRS):
                layer = scratch / f"site-{number}-{repair}"
                try:
                    pins = await asyncio.to_thread(
                        install,
                        Requirements(requirements=requirements, python=python, before=self._settings.before),
                        layer,
                    )
                except InstallError as error:
                    last = error
                    break
                without_copies(layer, project)
                record_project(layer, project, texts)
                say(f"installed {len(pins)} packages: {' '.join(pins)}")
                run = await self._first_run(project, (layer, pristine), environment(project))
                installed = layer, run, pins
                missing = _missing(project, run, requirements)
                if not missing:
                    break
                say(f"missing: {', '.join(missing)}")
                requirements = (*requirements, *missing)
            if installed is not None:  # modules still missing are unavailable, or belong to the tests
                layer, run, pins = installed
                self._folder.write(PINS_FILE, "".join(f"{pin}\n" for pin in pins).encode())
                return layer, run
        raise last or InstallError(f"nothing to install for {project.name}")

    async def _python(self) -> str:
        async with self._sandbox(Image(base=self._settings.base)) as sandbox:
            result = await sandbox.exec(["python3", "-c", ASK_PYTHON], timeout_s=60.0)
        if result.exit_code != 0:
            raise InstallError(f"the base system {self._settings.base!r} has no python3: {result.stderr[-300:]}")
        return result.stdout.strip()

    async def _first_run(
        self, project: Project, layers: Sequence[Path], variables: Mapping[str, str]
    ) -> RunObservation:
        image = Image(base=self._settings.base, layers=tuple(layers), environment=variables)
        async with self._sandbox(image) as sandbox:
            run = TestRun(targets=project.tests, timeout_s=self._settings.timeout_s)
            return (await observe(sandbox, [run], options=project.options, hash_seed=0))[0]

    async def _survey(
        self, sandbox: Sandbox, project: Project, texts: Mapping[str, str], first: RunObservation, say: Say
    ) -> Survey:
        survey_of([first], first)  # raises at once for errors that more runs cannot fix
        runs = [first]
        for number in range(1, RUNS):
            run = TestRun(targets=project.tests, seed=self._settings.seed + number, timeout_s=self._settings.timeout_s)
            runs += await observe(sandbox, [run], options=project.options, hash_seed=number)
            say(f"run {number + 1} of the tests: {sum(runs[-1].passed(test) for test in runs[-1].tests)} passed")
        passed = [test for test in first.tests if first.passed(test)]
        sources = sources_of(project, texts)
        watch = {path: [function.line for function in source.functions()] for path, source in sources.items()}
        record = {
            path: [function.line for function in source.functions() if not function.parents]
            for path, source in sources.items()
        }
        watched = TestRun(
            targets=project.tests,
            ids=tuple(passed),
            watch=watch,
            record=record,
            timeout_s=self._settings.timeout_s * WATCHED_SLACK,
        )
        seen = (await observe(sandbox, [watched], options=project.options))[0]
        survey = survey_of(runs, seen)
        say(
            f"{len(survey.stable)} tests pass every time; {len(survey.flaky)} flaky, {len(survey.failing)} failing, "
            f"{survey.skipped} skipped, {len(survey.unfit)} unfit, {len(survey.broken)} files broken"
        )
        return survey

    async def _refuse_copies(self, sandbox: Sandbox, project: Project) -> None:
        """Reject a base system that already has the package."""
        names = [f"-path '*-packages/{name}' -o -path '*-packages/{name}.py'" for name in project.modules]
        script = FIND_COPIES.format(work=WORKDIR, site=SITE, names=" -o ".join(names))
        result = await sandbox.exec(["sh", "-c", script], timeout_s=120.0)
        copies = result.stdout.split()
        if copies:
            raise CopyError(
                f"the base system {self._settings.base!r} holds a copy of {project.name} in {copies[0]}, where "
                "an agent could look everything up: use one without it, such as --base debian"
            )

    @asynccontextmanager
    async def _sandbox(self, image: Image) -> AsyncIterator[Sandbox]:
        sandbox = await self._provider.create({}, SandboxSpec(image=image, limits=LIMITS, ttl_s=SANDBOX_TTL_S))
        try:
            yield sandbox
        finally:
            await sandbox.close()


def _missing(project: Project, run: RunObservation, requirements: Sequence[str]) -> tuple[str, ...]:
    """The modules that a run of the tests reports as not installed."""
    utterance = (*(why for _, why in run.errors), *(seen.message for seen in run.tests.values()), run.output)
    return tuple(name for name in missing_modules("\n".join(utterance), requirements) if name not in project.modules)
