"""Brief tasks: one line of code, requested in one line; a held-out function is in no training text."""

import sysconfig
from pathlib import Path
from random import Random

import pytest

from etude.config.tasks import RepositoryOptions
from etude.errors import ConfigError
from etude.harnesses import tools
from etude.sandbox_spec import EnvironmentSpec
from etude.sandboxes.images.store import ImageStore
from etude.tasks.repositories.family import BriefTasks, RepairDemonstrations, ask
from etude.tasks.repositories.folder import PackageFolder, RepositoryTasks, split_of
from etude.types import Split, Task, TestChecks

FILLER = "".join(f"# {number}\n" for number in range(tools.WINDOW_LINES))
RIGHT = (
    "def first(a, b):\n"
    '    """Add."""\n'
    "    if a < b:\n"
    "        return a + b\n"
    "    return a - b\n\n\n"
    f"{FILLER}"
    "def second(a):\n"
    "    if a > 3:\n"
    "        return a * 7\n"
    "    return a\n"
)
PATH = "pkg/calc.py"


def prefix_for(required: dict[str, Split]) -> str:
    """A module name that puts its functions on the required sides of the hold-out."""
    return next(
        module
        for module in (f"pkg:pkg.calc{number}" for number in range(10_000))
        if all(split_of(f"{module}:{name}") is split for name, split in required.items())
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tasks: ``first`` is practised, ``second`` held out."""
    module = prefix_for({"first": Split.TRAIN, "second": Split.HELDOUT})
    add(tmp_path, "t1", f"{module}:first", RIGHT.replace("a < b", "a <= b"))
    add(tmp_path, "t2", f"{module}:second", RIGHT.replace("a > 3", "a > 4"))
    add(tmp_path, "t3", f"{module}:first", RIGHT.replace("    if a < b:\n        return a + b\n", ""))
    return tmp_path


def add(folder: Path, task_id: str, template: str, broken: str) -> None:
    tree = folder / "trees" / task_id
    (tree / "work" / PATH).parent.mkdir(parents=True)
    (tree / "work" / PATH).write_text(broken)
    store = ImageStore(folder / "images")
    image = store.add([store.add_layer(tree)])
    package = PackageFolder(folder / "pkg-1")
    package.add(
        Task(
            task_id=task_id,
            family="repository",
            template=template,
            split=split_of(template),
            prompt="Something stopped working.",
            files={},
            checks=TestChecks(files={}, must_pass=("test_calc.py::test_it",), about=1, artefacts=("pkg",)),
            environment=EnvironmentSpec(image=image.digest),
        ),
        {PATH: RIGHT},
    )


def brief(folder: Path) -> BriefTasks:
    family = RepositoryTasks(folder)
    return BriefTasks(family, ImageStore(family.images))


def test_only_tasks_of_one_line_are_asked_for_in_a_line(folder: Path) -> None:
    tasks = brief(folder)
    assert [(task.task_id, task.prompt) for task in tasks.tasks(Split.TRAIN)] == [("t1", ask("first", PATH, 3))]
    assert [task.task_id for task in tasks.tasks(Split.HELDOUT)] == ["t2"]
    assert [tasks.size(split) for split in Split] == [1, 1]


def test_what_is_read_shows_the_code_behind_the_docstring(folder: Path) -> None:
    line = int(brief(folder).task(Split.TRAIN, 0).prompt.split()[-1])
    assert tools.number_lines(RIGHT, line).startswith("3     if a < b:\n4         return a + b")


def test_nothing_held_out_is_learnt_from(folder: Path) -> None:
    demonstrations = RepairDemonstrations(brief(folder), RepositoryOptions())
    rng = Random(0)
    texts = [demonstrations.code(rng) for _ in range(50)]
    texts += [message.content for _ in range(200) for message in demonstrations.session(rng)]
    assert any("a + b" in text for text in texts)
    assert not any("second" in text or "a * 7" in text for text in texts)


def test_the_held_out_side_shows_held_out_functions_alone(folder: Path) -> None:
    demonstrations = RepairDemonstrations(brief(folder), RepositoryOptions(), Split.HELDOUT)
    rng = Random(0)
    requested = {demonstrations.session(rng)[0].content.split()[1] for _ in range(50)}
    assert requested == {"second"}
    assert "a * 7" in demonstrations.code(rng)


def test_sessions_are_edits_of_one_line_some_of_them_right(folder: Path) -> None:
    demonstrations = RepairDemonstrations(brief(folder), RepositoryOptions(right_edit=0.5))
    rng = Random(1)
    lines = RIGHT.split("\n")
    right = 0
    for _ in range(200):
        messages = demonstrations.session(rng)
        edit = next(
            call for call in (tools.parse_call(m.content) for m in messages) if isinstance(call, tools.EditFile)
        )
        assert messages[-1].content == tools.SUBMIT
        assert edit.path == PATH
        right += lines[edit.line - 1] == edit.text
    assert 60 < right < 140


def test_documents_elsewhere_are_about_the_standard_library(folder: Path) -> None:
    options = RepositoryOptions(elsewhere=1.0, read_first=1.0, right_edit=1.0)
    demonstrations = RepairDemonstrations(brief(folder), options)
    rng = Random(2)
    for _ in range(20):
        prompt, read, shown, edit, ok, submit = demonstrations.session(rng)
        call = tools.parse_call(edit.content)
        assert isinstance(call, tools.EditFile)
        right = library_lines(call.path)
        first = int(prompt.content.split()[-1])
        assert prompt.content == ask(prompt.content.split()[1], call.path, first)
        assert read.content == f"read {call.path} {first}"
        assert (ok.content, submit.content) == (tools.OK, tools.SUBMIT)
        assert differing(shown.content, right, first) == [call.line]
        assert call.text == right[call.line - 1]


def test_an_exercise_writes_every_line_of_a_function_with_several_bugs(folder: Path) -> None:
    demonstrations = RepairDemonstrations(brief(folder), RepositoryOptions(elsewhere=1.0))
    rng = Random(3)
    bugs = set[int]()
    for _ in range(20):
        exercise = demonstrations.code(rng)
        assert not isinstance(exercise, str)
        edits = [call for message in exercise if isinstance(call := tools.parse_call(message.content), tools.EditFile)]
        right = library_lines(edits[0].path)
        shown = exercise[2].content
        wrong = differing(shown, right, int(exercise[1].content.split()[-1]))
        assert {edit.line: edit.text for edit in edits}.items() >= {line: right[line - 1] for line in wrong}.items()
        assert all(edit.text == right[edit.line - 1] for edit in edits)
        assert len(edits) == sum(bool(line.partition(" ")[2].strip()) for line in shown.split("\n"))
        bugs.add(len(wrong))
    assert max(bugs) > 1


def test_held_out_documents_are_never_elsewhere(folder: Path) -> None:
    demonstrations = RepairDemonstrations(brief(folder), RepositoryOptions(elsewhere=1.0), Split.HELDOUT)
    rng = Random(0)
    assert {demonstrations.session(rng)[0].content.split()[3] for _ in range(20)} == {PATH}


def library_lines(path: str) -> list[str]:
    return (Path(sysconfig.get_paths()["stdlib"]) / path).read_text(encoding="utf-8").split("\n")


def differing(shown: str, right: list[str], first: int) -> list[int]:
    """The numbers of the shown lines that differ from those of the file."""
    lines = [line.partition(" ")[2] for line in shown.split("\n")]
    return [number for number, line in enumerate(lines, start=first) if line != right[number - 1]]


def test_a_side_without_tasks_is_refused(tmp_path: Path) -> None:
    module = prefix_for({"first": Split.TRAIN})
    add(tmp_path, "t1", f"{module}:first", RIGHT.replace("a < b", "a <= b"))
    with pytest.raises(ConfigError, match="no heldout task of one wrong line"):
        brief(tmp_path)
