"""``etude tasks build`` on a small package, in real sandboxes, with wheels made from packages installed here."""

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from etude.cli.actions.build_tasks import SOUND, BuildOptions, BuildReport, build, check, try_all
from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.rollouts.fake import FakeSandbox
from etude.sandbox_spec import Capability, Image, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.taskgen.candidates import propose
from etude.taskgen.failures import CopyError, InstallError, RepositoryError, SourceError, TestsFailError
from etude.taskgen.installer import InstallerOptions, commands_in
from etude.taskgen.preparation import Settings
from etude.taskgen.projects import read_project
from etude.taskgen.sources import read_texts
from etude.taskgen.survey import Survey
from etude.taskgen.validator import CandidateValidator, PreparedRepository
from etude.taskgen.verdicts import Rejection
from etude.tasks.repositories.folder import PackageFolder, RepositoryTasks
from etude.types import Split, Task, TestChecks
from pytest_wheels import make_wheels

MODULE = '''"""Small sums."""

__all__ = ["mean_of", "clamp_to", "Tally"]


def mean_of(values, default=0):
    """The mean of numbers; ``default`` if there are none."""
    numbers = list(values)
    if len(numbers) == 0:
        return default
    total_of_numbers = sum(numbers)
    return total_of_numbers / len(numbers)


def clamp_to(value, low, high):
    """The value, but no less than low and no more than high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


class Tally:
    """Counts things."""

    def __init__(self):
        self.counts = {}

    def add(self, thing):
        """Count one."""
        before = self.counts.get(thing, 0)
        self.counts[thing] = before + 1
        return self.counts[thing]
'''
TESTS = """
import random, pytest
from sums import Tally, clamp_to, mean_of

@pytest.mark.parametrize("values, mean", [([1, 2, 3], 2), ([4], 4), ([], 0)])
def test_mean(values, mean): assert mean_of(values) == mean
def test_mean_default(): assert mean_of([], 7) == 7
@pytest.mark.parametrize("value", range(8))
def test_inside(value): assert clamp_to(value, 0, 7) == value
def test_low(): assert clamp_to(-1, 0, 2) == 0
def test_low_bound(): assert clamp_to(0, 0, 2) == 0
def test_high(): assert clamp_to(3, 0, 2) == 2
def test_tally(): t = Tally(); assert [t.add("a"), t.add("a"), t.add("b")] == [1, 2, 1]
@pytest.mark.parametrize("n", range(8))
def test_arithmetic(n): assert n + 1 > n
def test_flaky(tmp_path_factory): assert random.Random(hash("x")).random() < 0.5
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(autouse=True)
def offline(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[tuple[asyncio.Runner, NamespaceSandboxes]]:
    with asyncio.Runner() as runner:
        provider = NamespaceSandboxes()
        if Capability.FORK not in runner.run(provider.capabilities()):
            pytest.skip("this machine grants no namespaces")
        yield runner, provider
        runner.run(provider.close())


def package(folder: Path, tests: str = TESTS, needs: str = "[]") -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "sums.py").write_text(MODULE)
    (folder / "tests" / "test_sums.py").write_text(tests)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "sums"\nversion = "1.0"\ndependencies = {needs}\n')
    return folder


def make(runner: asyncio.Runner, provider: NamespaceSandboxes, options: BuildOptions) -> BuildReport:
    return runner.run(build(options, provider, say=lambda line: None))


async def passes(provider: NamespaceSandboxes, store: ImageStore, task: Task, files: dict[str, str]) -> bool:
    """Return true if the named tests pass in the task's sandbox with some files replaced."""
    assert task.environment is not None
    assert isinstance(task.checks, TestChecks)
    sandbox = await provider.create(files, SandboxSpec(image=store.open(task.environment.image)))
    try:
        result = await sandbox.exec([*task.checks.command, "-q", *task.checks.must_pass], timeout_s=60)
        return result.exit_code == 0
    finally:
        await sandbox.close()


def test_a_package_becomes_tasks_that_fail_as_given_and_pass_when_solved(
    tmp_path: Path, sandboxes: tuple[asyncio.Runner, NamespaceSandboxes]
) -> None:
    runner, provider = sandboxes
    options = BuildOptions(reference=str(package(tmp_path / "repo")), out=tmp_path / "out", limit=2)
    report = make(runner, provider, options)
    assert report.kept == 2
    assert report.tests["flaky"] == 1
    assert report.tests["stable"] == 24
    saved = json.loads((tmp_path / "out" / "sums-1.0" / "report.json").read_text())
    assert saved["outcomes"]["kept"] == 2
    tasks = RepositoryTasks(tmp_path / "out")
    store = ImageStore(tasks.images)
    for task in [*tasks.tasks(Split.TRAIN), *tasks.tasks(Split.HELDOUT)]:
        assert isinstance(task.checks, TestChecks)
        assert task.checks.artefacts == ("sums.py",)
        assert not runner.run(passes(provider, store, task, dict(task.checks.files)))
        assert runner.run(passes(provider, store, task, {**task.checks.files, "sums.py": MODULE}))
        assert "total_of_numbers" not in task.prompt
    checked = runner.run(check(options.out, provider, say=lambda line: None, repeats=1))
    assert {result.outcome for result in checked} == {SOUND}
    PackageFolder(tmp_path / "bare" / "sums-1.0").add(forgeable(task), tasks.answer(task))
    (tmp_path / "bare" / "images").symlink_to(tasks.images)
    (bare,) = runner.run(check(tmp_path / "bare", provider, say=lambda line: None, repeats=1))
    assert bare.outcome == Rejection.UNGUARDED
    again = make(runner, provider, BuildOptions(reference=options.reference, out=options.out, limit=3))
    assert again.tried > report.tried
    log = (tmp_path / "out" / "sums-1.0" / "log.jsonl").read_text().splitlines()
    ids = [json.loads(line)["candidate_id"] for line in log if line]
    assert len(ids) == len(set(ids))


def forgeable(task: Task) -> Task:
    """The task without its probe, and with its tests where the agent can read them."""
    assert isinstance(task.checks, TestChecks)
    return replace(task, files=task.checks.files, checks=replace(task.checks, probes=()))


def test_what_has_neither_a_probe_nor_a_canary_is_no_task(
    tmp_path: Path, sandboxes: tuple[asyncio.Runner, NamespaceSandboxes]
) -> None:
    """A row that passes anyway would tell a canary, and methods are not called from outside."""
    rows = """
import pytest
from sums import Tally

@pytest.mark.parametrize("things, count", [("", 0), ("aa", 2)])
def test_tally(things, count): t = Tally(); assert ([0] + [t.add(one) for one in things])[-1] == count
@pytest.mark.parametrize("n", range(8))
def test_arithmetic(n): assert n + 1 > n
"""
    reference = str(package(tmp_path / "repo", rows))
    report = make(*sandboxes, BuildOptions(reference=reference, out=tmp_path / "out", unprobed=True))
    assert report.kept == 0
    assert report.outcomes["unguarded"] >= 1


@pytest.mark.parametrize(
    ("tests", "needs", "timeout_s", "error", "message"),
    [
        ("def test_a(): assert False\n", "[]", 60.0, TestsFailError, "0 of 1 tests pass"),
        ("import time\ndef test_a(): time.sleep(60)\n", "[]", 3.0, TestsFailError, "ended with timeout"),
        (TESTS, '["no-such-package-at-all"]', 60.0, InstallError, "no-such-package-at-all"),
    ],
)
def test_a_package_that_cannot_be_used_is_named_with_its_log(
    tmp_path: Path,
    sandboxes: tuple[asyncio.Runner, NamespaceSandboxes],
    tests: str,
    needs: str,
    timeout_s: float,
    error: type[RepositoryError],
    message: str,
) -> None:
    reference = str(package(tmp_path / "repo", tests, needs))
    options = BuildOptions(reference=reference, out=tmp_path / "out", settings=Settings(timeout_s=timeout_s))
    with pytest.raises(error, match=message):
        make(*sandboxes, options)
    assert message in (tmp_path / "out" / "sums-1.0" / "failure.log").read_text()


class NoSandboxes:
    """A sandbox provider on a broken machine."""

    async def capabilities(self) -> frozenset[Capability]:
        return frozenset()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        raise SandboxError("out of everything")

    async def close(self) -> None:
        pass


def test_sandboxes_that_keep_failing_end_the_build_and_count_for_nothing(tmp_path: Path) -> None:
    repo = package(tmp_path / "repo")
    texts = read_texts(repo)
    project = read_project(texts)
    survey = Survey(
        stable={"tests/test_sums.py::test_low": 0.1},
        flaky=(),
        failing=(),
        skipped=0,
        unfit=(),
        broken=(),
        reached={f"sums.py:{line}": ("",) for line in range(1, 40)},
        calls={},
    )
    bench = PreparedRepository(
        project=project,
        texts=texts,
        tree=repo,
        survey=survey,
        site="",
        pristine=Image(),
        base="",
        environment={},
        seed=0,
    )
    folder = PackageFolder(tmp_path / "out" / "sums-1.0")
    candidates = propose(project, texts, survey, seed=0)
    validator = CandidateValidator(bench, NoSandboxes(), ImageStore(tmp_path / "images"), folder)
    no_one = FakeSandbox({}, lambda sandbox: None)  # of a function of which no call is known none is run
    (verdict,) = asyncio.run(validator.quick(candidates[:1], no_one))[1]
    assert verdict.outcome == Rejection.UNPROBED
    options = BuildOptions(reference=str(repo), out=tmp_path / "out")
    assert [candidate.candidate_id for candidate in propose(project, texts, survey, seed=0)] == [
        candidate.candidate_id for candidate in candidates
    ]
    with pytest.raises(SandboxError, match="failed in a row, the last: out of everything"):
        asyncio.run(try_all(validator, candidates, folder, options, lambda line: None))
    assert {verdict.outcome for verdict in folder.verdicts()} == {Rejection.FAILED}


def test_a_project_s_name_does_not_choose_where_a_build_writes(tmp_path: Path) -> None:
    repo = package(tmp_path / "repo")
    (repo / "pyproject.toml").write_text('[project]\nname = "../outside"\nversion = "1.0"\n')
    options = BuildOptions(reference=str(repo), out=tmp_path / "out")
    with pytest.raises(SourceError, match=r"'\.\./outside' is not a valid project name"):
        asyncio.run(build(options, NoSandboxes(), say=lambda line: None))
    assert not (tmp_path / "outside-1.0").exists()


def test_a_copy_in_the_base_system_is_refused(
    tmp_path: Path, sandboxes: tuple[asyncio.Runner, NamespaceSandboxes]
) -> None:
    repo = package(tmp_path / "repo")
    (repo / "sums.py").rename(repo / "pip.py")
    (repo / "tests" / "test_sums.py").write_text(TESTS.replace("from sums", "from pip"))
    with pytest.raises(CopyError, match="holds a copy"):
        make(*sandboxes, BuildOptions(reference=str(repo), out=tmp_path / "out"))


def test_a_model_installs_what_the_files_do_not_tell(
    tmp_path: Path, sandboxes: tuple[asyncio.Runner, NamespaceSandboxes], wheels: Path
) -> None:
    """The scripted model first writes only text, then breaks something, then succeeds; the server is real."""
    runner, provider = sandboxes
    unpack = "mkdir -p /opt/site && for w in /wheels/*.whl; do python3 -m zipfile -e $w /opt/site; done"
    helper = base64.b64encode(b"VALUE = 1\n").decode()
    answers = [
        "I shall look into it.",
        "```sh\nrm -rf /opt/site\nfalse\n```",
        f"This should do:\n```sh\n{unpack}\necho {helper} | base64 -d > /opt/site/helper_of_tests.py\n```",
    ]
    heard: list[dict[str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append(await request.json())
        content = answers[min(len(heard), len(answers)) - 1]
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})

    async def act() -> BuildReport:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        server = web.AppRunner(app)
        await server.setup()
        site = web.TCPSite(server, "127.0.0.1", 0)
        await site.start()
        port = server.addresses[0][1]
        try:
            installer = InstallerOptions(
                url=f"http://127.0.0.1:{port}/v1", model="scripted", allow=(), mounts={"/wheels": wheels}
            )
            repo = package(tmp_path / "repo", "import helper_of_tests\n" + TESTS, '["no-such-package-at-all"]')
            options = BuildOptions(reference=str(repo), out=tmp_path / "out", limit=1, installer=installer)
            return await build(options, provider, say=lambda line: None)
        finally:
            await server.cleanup()

    report = runner.run(act())
    assert report.kept == 1
    texts = [json.dumps(request["messages"]) for request in heard]
    assert len(heard) == 3
    assert "no block of commands" in texts[1]
    assert "were undone" in texts[2]


def test_commands_are_the_last_block() -> None:
    assert commands_in("```sh\na\n```\nor\n```bash\nb\nc\n```") == "b\nc"
    assert commands_in("just words") is None
    assert commands_in("```sh\n\n```") is None
