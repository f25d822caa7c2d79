"""Images of Harbor tasks, built from their Dockerfiles, and tasks that are checked before they are used."""

import asyncio
import io
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.rewards.graders.script import ScriptGrader
from etude.sandbox_spec import Capability
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.services import sandbox_spec
from etude.taskgen.harbor.soundness import SoundnessCheck, faults_of
from etude.tasks.harbor.dockerfile import Copy
from etude.tasks.harbor.family import HarborTasks
from etude.tasks.harbor.folder import HarborTask, read_task
from etude.tasks.harbor.images import Builds, HarborImages, base_of, copy_script, find_image, plain_files
from etude.tasks.harbor.settings import TaskFolderError
from etude.types import Split
from harbor_folders import write_folder

EXAMPLES = Path(__file__).parents[4] / "examples" / "tasks"
BUILT = """FROM debian:12
WORKDIR /app
COPY start/ .
COPY --chmod=700 *.sh tools/
ADD tree.tar /opt/
ENV TONGUE=en
RUN echo "$TONGUE $(id -u) $PWD" > said.txt && chmod 600 said.txt && ln -s /app/said.txt /opt/link
"""


def source_of(tmp_path: Path, changes: Mapping[str, str | None], name: str = "task") -> HarborTask:
    return read_task(write_folder(tmp_path / name, changes))


# --- Without a sandbox ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dockerfile", "files"),
    [
        ("WORKDIR /app", {}),
        ("WORKDIR /app\nCOPY start .", {"notes/a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start /app/deep", {"deep/notes/a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start/notes/a.txt .", {"a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start/notes/a.txt b.txt", {"b.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start/notes/a.txt sub/", {"sub/a.txt": "a note\n"}),
        ("WORKDIR /app\nCOPY start /elsewhere", None),
        ("WORKDIR /app\nCOPY start/* .", None),
        ("WORKDIR /app\nCOPY --chmod=755 start .", None),
        ("WORKDIR /other\nWORKDIR /app", None),
        ("WORKDIR /app\nRUN true", None),
    ],
)
def test_a_dockerfile_that_only_puts_text_in_place_needs_no_image(
    dockerfile: str, files: dict[str, str] | None, tmp_path: Path
) -> None:
    assert plain_files(source_of(tmp_path, {"environment/Dockerfile": f"FROM debian:12\n{dockerfile}"})) == files


def test_programs_bytes_and_links_are_more_than_text(tmp_path: Path) -> None:
    source = source_of(tmp_path, {})
    file = source.context / "start" / "notes" / "a.txt"
    file.chmod(0o755)
    assert plain_files(source) is None
    file.chmod(0o644)
    file.write_bytes(b"\xff")
    assert plain_files(source) is None
    file.unlink()
    file.symlink_to("../notes")
    assert plain_files(source) is None


def test_an_image_that_nothing_stands_for_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"environment/Dockerfile": "FROM registry.org/x:1\nWORKDIR /app"})
    with pytest.raises(TaskFolderError, match=r"registry\.org/x:1"):
        base_of(source, {"debian*": "", "python*": "py"})
    assert base_of(source, {"registry.org/*": "debian"}) == "debian"
    ready = source_of(tmp_path, {"environment/Dockerfile": None, "task.toml": "environment.docker_image='x:1'"}, "b")
    assert (base_of(ready, {"x:*": ""}), ready.workdir) == ("", "/work")


def test_names_with_spaces_and_dashes_are_copied_as_they_are() -> None:
    script = copy_script(Copy(line=1, sources=("-a b",), target="/x y/"), {"-a b": False})
    assert script.splitlines()[1:] == [
        "mkdir -p -- /",
        "mkdir -p -- '/x y/'",
        "cp -RP --preserve=mode -- '/mnt/etude-context/-a b' '/x y/'",
    ]


@pytest.mark.parametrize(
    ("untouched", "solved", "words"),
    [
        ([0.0, 0.5], [1.0, 1.0], "unequally"),
        ([1.0, 1.0], [1.0, 1.0], "doing nothing passes"),
        ([0.0, 0.0], [1.0, 0.9], "its own solution fails"),
        ([0.0, 0.0], [], ""),
        ([0.2, 0.2], [1.0, 1.0], ""),
    ],
)
def test_a_sound_task_fails_untouched_and_passes_solved_each_time(
    untouched: list[float], solved: list[float], words: str
) -> None:
    faults = faults_of(untouched, solved, has_solution=True, log="")
    assert any(words in fault for fault in faults) if words else faults == ()


def test_a_task_needs_a_solution_and_a_check_that_ends() -> None:
    assert len(faults_of([0.0], [], has_solution=False, log="")) == 1
    assert len(faults_of([0.0], [], has_solution=True, log="SandboxError: …")) == 1


# --- In sandboxes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Yard:
    """Where images are built."""

    runner: asyncio.Runner
    sandboxes: NamespaceSandboxes
    store: ImageStore
    images: HarborImages

    def build_all(self, *tasks: HarborTask) -> Builds:
        return self.runner.run(self.images.build_all(tasks))

    def look(self, task: HarborTask, script: str) -> str:
        """What a script says in the agent's world."""

        async def act() -> str:
            image = await self.images.build(task)
            environment = task.environment_spec(image)
            spec = sandbox_spec(environment, self.store.open(image) if image else None)
            sandbox = await self.sandboxes.create({} if image else plain_files(task) or {}, spec)
            try:
                done = await sandbox.exec(["bash", "-c", script], timeout_s=20)
                assert done.exit_code == 0, done
                return done.stdout
            finally:
                await sandbox.close()

        return self.runner.run(act())


@pytest.fixture(scope="module")
def yard() -> Iterator[Yard]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        sandboxes = NamespaceSandboxes()
        try:
            if Capability.SNAPSHOT not in runner.run(sandboxes.capabilities()):
                pytest.skip("no sandbox with namespaces can be made here")
            store = ImageStore(Path(folder))
            yield Yard(runner, sandboxes, store, HarborImages(store, sandboxes))
        finally:
            runner.run(sandboxes.close())


def with_archive(source: HarborTask) -> HarborTask:
    with tarfile.open(source.context / "tree.tar", "w") as archive:
        info = tarfile.TarInfo("leaf")
        info.size, info.uid = 4, 4321
        archive.addfile(info, io.BytesIO(b"leaf"))
    return source


def test_every_step_of_a_dockerfile_is_seen_by_the_agent(yard: Yard, tmp_path: Path) -> None:
    files = {"environment/Dockerfile": BUILT, "environment/one.sh": "1", "environment/two.sh": "2"}
    source = with_archive(source_of(tmp_path, files))
    assert find_image(source, yard.store) is None
    output = yard.look(
        source, "cat said.txt notes/a.txt /opt/leaf /opt/link; stat -c '%a %u' tools/*.sh /opt/leaf; echo $TONGUE"
    )
    assert output == "en 0 /app\na note\nleafen 0 /app\n700 1000\n700 1000\n644 0\nen\n"
    assert yard.look(source, "echo more >> said.txt && touch notes/new tools/new && echo mine") == "mine\n"
    assert find_image(source, yard.store)


def test_equal_contexts_are_built_once(yard: Yard, tmp_path: Path) -> None:
    changes = {"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nRUN head -c8 /dev/urandom > chance"}
    first, second = (source_of(tmp_path, {**changes, "instruction.md": name}, name) for name in ("a", "b"))
    builds = yard.build_all(first, second)
    assert builds.images["a"] == builds.images["b"]
    assert not builds.refused


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("RUN echo on the way; pip install no-such-thing >&2; exit 7", "exit code 7"),
        ("RUN sleep 30", "raise environment.build_timeout_sec"),
        ("COPY nothing .", "there is no 'nothing'"),
        ("RUN no-such-program", "exit code 127"),
    ],
)
def test_a_build_that_fails_sets_its_task_aside_with_line_and_log(
    step: str, words: str, yard: Yard, tmp_path: Path
) -> None:
    changes = {
        "environment/Dockerfile": f"FROM debian:12\nWORKDIR /app\n{step}",
        "task.toml": "[environment]\nbuild_timeout_sec = 5.0" if "sleep" in step else "",
    }
    builds = yard.build_all(source_of(tmp_path, changes, "bad"), source_of(tmp_path, {}, "good"))
    assert builds.images == {"good": ""}
    assert "environment/Dockerfile:3: " in builds.refused["bad"]
    assert words in builds.refused["bad"]


def test_a_base_system_that_is_not_stored_is_named(yard: Yard, tmp_path: Path) -> None:
    images = HarborImages(yard.store, yard.sandboxes, bases={"*": "nowhere"})
    with pytest.raises(ConfigError, match="nowhere"):
        yard.runner.run(images.build(source_of(tmp_path, {})))


def test_the_examples_are_sound_and_broken_ones_are_not(yard: Yard, tmp_path: Path) -> None:
    broken = source_of(tmp_path, {"tests/test.sh": "#!/bin/bash\necho no verdict"}, "broken")
    easy = source_of(tmp_path, {"tests/grade.py": "open('/logs/verifier/reward.txt', 'w').write('1')"}, "easy")
    wrong = source_of(tmp_path, {"solution/solve.sh": "#!/bin/bash\necho no > answer.txt"}, "wrong")
    stuck = source_of(tmp_path, {"solution/solve.sh": "#!/bin/bash\necho tried; exit 5"}, "stuck")
    examples = [read_task(EXAMPLES / name) for name in ("greeting", "word-count")]
    tasks = [*examples, broken, easy, wrong, stuck]
    builds = yard.build_all(*tasks)
    stored = {digest: yard.store.open(digest) for digest in builds.images.values() if digest}
    grader = ScriptGrader(yard.sandboxes, yard.store)
    check = SoundnessCheck(yard.sandboxes, grader, images=stored, repeats=2)
    matches = {report.name: report for report in yard.runner.run(check.check_all(tasks, builds))}
    for example in examples:
        report = matches[example.name]
        assert (report.is_sound, report.untouched, report.solved) == (True, (0.0, 0.0), (1.0, 1.0)), report
    assert "no verdict" in matches["broken"].log
    assert matches["easy"].faults == ("doing nothing passes: rewards [1.0, 1.0]",)
    assert matches["wrong"].faults == ("its own solution fails: rewards [0.0, 0.0]",)
    assert "exit code 5" in matches["stuck"].log
    assert "tried" in matches["stuck"].log


def test_a_family_of_built_tasks_names_their_images(yard: Yard) -> None:
    builds = yard.build_all(*(read_task(EXAMPLES / name) for name in ("greeting", "word-count")))
    family = HarborTasks(EXAMPLES, images=yard.store)
    tasks = [family.task(split, index) for split in Split for index in range(len(family.sources(split)))]
    environments = {task.template: task.environment for task in tasks}
    assert not family.refused
    for name, image in builds.images.items():
        environment = environments[name]
        assert environment is not None
        assert environment.image == image
