"""Requests of users: each line is checked, and all are held out."""

import json
from pathlib import Path

import pytest

from etude.config.loading import default_recipe, load_suite
from etude.errors import ConfigError
from etude.rewards.judge.calibration import parse_items
from etude.run.judging import rubrics_of
from etude.run.suite import TryLimits, open_suite, tasks_of, try_config
from etude.run.task_families import open_family
from etude.tasks.requests import FILE, read_requests
from etude.types import Split, Task

ASK = {"template": "question", "prompt": "why two loops?", "files": {"a.py": "x = 1\n"}, "keep": ["a.py"]}
SIDES = sorted((Path(__file__).parents[3] / "examples" / "suites" / "side").glob("*/suite.toml"))


def write(folder: Path, *lines: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text('name = "side"\n[tasks]\nfamily = "requests"\n[sandboxes]\nkind = "local"\n')
    (folder / FILE).write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return folder


def tasks_in(folder: Path) -> list[Task]:
    suite = open_suite(folder)
    return tasks_of(open_family(try_config(suite, {"kind": "shell"}, TryLimits())), None)


def test_all_requests_are_held_out(tmp_path: Path) -> None:
    before = [{"role": "user", "content": "add a cache"}, {"role": "assistant", "content": "Half of it is there."}]
    tasks = tasks_in(write(tmp_path, ASK, {"template": "stop", "prompt": "no, undo that", "history": before}))
    assert [(task.template, task.prompt, task.split) for task in tasks] == [
        ("question", "why two loops?", Split.HELDOUT),
        ("stop", "no, undo that", Split.HELDOUT),
    ]
    assert tasks[0].files == {"a.py": "x = 1\n"}
    assert [message.content for message in tasks[1].history] == ["add a cache", "Half of it is there."]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([ASK, {**ASK, "keep": ["b.py"]}], r"line 2: .*keep names 'b\.py', which is none of its files: a\.py"),
        ([{**ASK, "prompt": ""}], r"line 1: prompt: "),
        ([{**ASK, "promt": "x"}], r"line 1: promt: "),
        ([ASK, ASK], r"line 2 is line 1 once more"),
        ([], r"has no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tasks_in(write(tmp_path, *lines))


def test_nothing_is_trained_on_them(tmp_path: Path) -> None:
    config = default_recipe(['tasks.family="requests"', f"tasks.folder={str(write(tmp_path, ASK))!r}"])
    assert open_family(config).size(Split.TRAIN) == 0


@pytest.mark.parametrize("file", SIDES, ids=lambda file: file.parent.name)
def test_the_side_suites_of_the_examples_are_whole(file: Path) -> None:
    suite, aspect = load_suite(file.parent), file.parent.name
    rubric = rubrics_of(suite.judge)[aspect]
    requests = list(read_requests(file.parent / FILE))
    assert len({request.template for request in requests}) >= 3
    items = parse_items((file.parent / f"{aspect}.jsonl").read_text(), rubric, aspect)
    assert {item.label for item in items} == {anchor.score for anchor in rubric.scale}
