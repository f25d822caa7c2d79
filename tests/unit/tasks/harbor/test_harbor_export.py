"""étude's tasks in Harbor's format: read back unchanged, with the same grades."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.sandbox_spec import EnvironmentSpec, Image, SandboxLimits, Service, ServiceKind
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.harbor.export import export_task
from etude.tasks.harbor.folder import read_task
from etude.tasks.harbor.images import plain_files
from etude.tasks.harbor.settings import TaskFolderError
from etude.types import Case, FunctionChecks, Query, QueryChecks, ScriptChecks, Split, Task, TestChecks
from harbor_folders import write_folder

SPEC = EnvironmentSpec(
    workdir="/srv/project",
    allow=("pypi.internal:443", "mirror.internal:8080"),
    variables={"A": "b c"},
    limits=SandboxLimits(memory_bytes=300 << 20, disk_bytes=100 << 20, processes=77, cpus=0.5),
)


def task_with(
    checks: ScriptChecks | FunctionChecks | TestChecks | QueryChecks, environment: EnvironmentSpec = SPEC
) -> Task:
    return Task(
        task_id="0123456789abcdef",
        family="bugfix",
        template="sum of two",
        split=Split.HELDOUT,
        prompt="fix add in util.py",
        files={"util.py": "def add(a, b):\n    return a - b\n", "notes/n.txt": "é"},
        checks=checks,
        environment=environment,
    )


SCRIPT = ScriptChecks(
    files={"test.sh": "#!/bin/bash\n", "data/x.json": "[]"},
    artefacts=("util.py", "out"),
    environment={"MODE": "hard"},
    timeout_s=12.5,
)


def read_back(folder: Path) -> Task:
    source = read_task(folder)
    assert source.origin.split is not None
    return source.task(source.origin.split, image=Image(), files=plain_files(source))


@pytest.mark.parametrize("artefacts", [("util.py", "out"), (".",)])
def test_a_task_comes_back_as_it_was(artefacts: tuple[str, ...], tmp_path: Path) -> None:
    checks = ScriptChecks(files=SCRIPT.files, artefacts=artefacts, environment={"MODE": "hard"}, timeout_s=12.5)
    task = task_with(checks)
    export_task(task, tmp_path / "task", solution={"solve.sh": "#!/bin/bash\n"})
    assert read_back(tmp_path / "task") == task
    assert (tmp_path / "task" / "tests" / "test.sh").stat().st_mode & 0o100
    assert read_task(tmp_path / "task").solution == {"solve.sh": "#!/bin/bash\n"}


def test_a_folder_of_others_survives_the_round_trip(tmp_path: Path) -> None:
    source = read_task(write_folder(tmp_path / "first"))
    task = source.task(Split.TRAIN, image=Image(), files=plain_files(source))
    export_task(task, tmp_path / "second", solution=source.solution)
    assert read_back(tmp_path / "second") == task


def test_layers_of_an_image_become_archives(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    layer = tmp_path / "layer"
    (layer / "opt" / "tool").mkdir(parents=True)
    (layer / "opt" / "tool" / "run.sh").write_text("#!/bin/sh\n", encoding="utf-8")
    (layer / "opt" / "link").symlink_to("tool")
    image = store.add([store.add_layer(layer)], environment={"TOOL": "/opt/tool"})
    task = task_with(SCRIPT, EnvironmentSpec(image=image.digest, workdir="/app"))
    with pytest.raises(TaskFolderError, match="name the store"):
        export_task(task, tmp_path / "task")
    with pytest.raises(ConfigError, match="is not in"):
        export_task(task, tmp_path / "task", images=ImageStore(tmp_path / "other"))
    export_task(task, tmp_path / "task", images=store)
    dockerfile = (tmp_path / "task" / "environment" / "Dockerfile").read_text(encoding="utf-8")
    assert "ADD layer-0.tar /\nENV TOOL=" in dockerfile
    (tmp_path / "again").mkdir()
    with tarfile.open(tmp_path / "task" / "environment" / "layer-0.tar") as archive:
        archive.extractall(tmp_path / "again", filter="tar")
    assert store.add_layer(tmp_path / "again") == image.layers[0].name
    assert plain_files(read_task(tmp_path / "task")) is None


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (task_with(QueryChecks(path="m.sql", queries=(Query(sql="select 1", rows=()),))), "QueryChecks"),
        (task_with(SCRIPT, EnvironmentSpec(services=(Service(kind=ServiceKind.REDIS),))), "services"),
        (task_with(ScriptChecks(files={}, command=("make",))), "graded by"),
    ],
)
def test_what_the_format_cannot_say_is_refused_and_leaves_nothing(task: Task, words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskFolderError, match=words):
        export_task(task, tmp_path / "task")
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_written_over(tmp_path: Path) -> None:
    export_task(task_with(SCRIPT), tmp_path / "task")
    with pytest.raises(TaskFolderError, match="there already"):
        export_task(task_with(SCRIPT), tmp_path / "task")


def grade(folder: Path, sandbox: Path) -> str:
    """Run an exported verifier as it is, in ``world``."""
    reward = sandbox.parent / "reward.json"
    command = [sys.executable, str(folder / "tests" / "grade.py"), str(reward)]
    subprocess.run(command, cwd=sandbox, check=True, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    return reward.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return a + b", '{"reward": 1.0, "hidden_passed": 1.0}'),
        ("return a * b", '{"reward": 0.0, "hidden_passed": 0.5}'),
        ("return float(a + b)", '{"reward": 0.0, "hidden_passed": 0.0}'),
        ("import os; os._exit(0)", '{"reward": 0.0, "hidden_passed": 0.0}'),
    ],
)
def test_a_function_is_asked_case_by_case(body: str, reward: str, tmp_path: Path) -> None:
    cases = (Case(arguments=(2, 2), expected=4), Case(arguments=(2, 3), expected=5))
    checks = FunctionChecks(path="util.py", function="add", visible=(), hidden=cases)
    export_task(task_with(checks), tmp_path / "task")
    sandbox = tmp_path / "world"
    sandbox.mkdir()
    (sandbox / "util.py").write_text(f"def add(a, b):\n    {body}\n", encoding="utf-8")
    assert grade(tmp_path / "task", sandbox) == reward
    assert not (tmp_path / "task" / "tests" / "cases.json").exists()


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return a + b", '{"reward": 1.0, "about_passed": 1.0}'),
        ("return a - b", '{"reward": 0.0, "about_passed": 0.0}'),
        ("import os; os._exit(0)", '{"reward": 0.0, "about_passed": 0.0}'),
        ("import pytest; pytest.skip()", '{"reward": 0.0, "about_passed": 0.0}'),
    ],
)
def test_named_tests_are_seen_to_pass(body: str, reward: str, tmp_path: Path) -> None:
    test = "from util import add\n\ndef test_add():\n    assert add(2, 3) == 5\n\ndef test_other():\n    assert False\n"
    checks = TestChecks(
        files={"hidden/test_add.py": test},
        must_pass=("hidden/test_add.py::test_add",),
        about=1,
        artefacts=("util.py",),
        command=(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    )
    export_task(task_with(checks), tmp_path / "task")
    sandbox = tmp_path / "world"
    sandbox.mkdir()
    (sandbox / "util.py").write_text(f"def add(a, b):\n    {body}\n", encoding="utf-8")
    assert grade(tmp_path / "task", sandbox) == reward
