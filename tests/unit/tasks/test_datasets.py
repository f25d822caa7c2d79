"""A user's files as tasks: each kind of file and column, and what is refused before anything starts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from etude.config.loading import default_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.tasks import DatasetOptions
from etude.errors import ConfigError
from etude.run.resolve import with_absolute_paths
from etude.run.task_families import open_demonstrations, open_family
from etude.run.task_plan import plan_tasks
from etude.tasks.corpora.conversations import parse
from etude.types import AnswerChecks, PromptMessage, Split, Task

SUMS = [{"prompt": f"{number} + {number} =", "answer": 2 * number} for number in range(60)]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe(path: Path, *, heldout_every: int = 6, **options: Any) -> RunConfig:
    tasks = {"family": "dataset", "heldout_every": heldout_every, "options": {"path": str(path)} | options}
    return parse_config({"tasks": tasks, "harness": {"kind": "single_turn"}}, source="t")


def tasks_of(config: RunConfig, split: Split = Split.TRAIN) -> list[Task]:
    family = open_family(config)
    return [family.task(split, index) for index in range(family.size(split) or 0)]


def answer_of(task: Task) -> str:
    assert isinstance(task.checks, AnswerChecks)
    return task.checks.answer


def test_rows_are_tasks_and_the_held_out_ones_are_those_of_any_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", [*SUMS, SUMS[3], {**SUMS[4], "source": "a copy"}])
    train, heldout = (tasks_of(recipe(path), split) for split in Split)
    assert len(train) + len(heldout) == len(SUMS)
    assert 4 <= len(heldout) <= 18
    assert {task.task_id for task in heldout}.isdisjoint(task.task_id for task in train)
    assert tasks_of(recipe(path).model_copy(update={"seed": 7}), Split.HELDOUT) == heldout
    assert [(task.prompt, answer_of(task)) for task in train if task.prompt == "7 + 7 ="] in ([("7 + 7 =", "14")], [])


def test_another_file_is_held_out_and_no_question_is_in_both(tmp_path: Path) -> None:
    path, others = write(tmp_path / "a.jsonl", SUMS[:40]), write(tmp_path / "b.jsonl", SUMS[40:])
    config = recipe(path, heldout_path=str(others))
    assert plan_tasks(config).describe()[-1] == "20 held-out tasks"
    write(others, [*SUMS[40:], {"prompt": "3 + 3 =", "answer": 7}])
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 21 asks what .*a\.jsonl, line 4 asks"):
        open_family(config)
    with pytest.raises(ConfigError, match=r"tasks\.heldout_every would have no effect with tasks\.options\.heldout_p"):
        recipe(path, heldout_every=3, heldout_path=str(others))


def test_parquet_and_what_save_to_disk_made_are_the_same_tasks(tmp_path: Path) -> None:
    """The two files of a saved set are written here as the ``datasets`` package writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(SUMS)
    pq.write_table(table, tmp_path / "sums.parquet", row_group_size=7)
    saved = tmp_path / "sets" / "train"
    saved.mkdir(parents=True)
    names = [f"data-0000{shard}-of-00002.arrow" for shard in range(2)]
    for shard, name in enumerate(names):
        part = table.slice(30 * shard, 30)
        with pa.OSFile(str(saved / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as stream:
            stream.write_table(part, max_chunksize=8)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    expected = tasks_of(recipe(write(tmp_path / "sums.jsonl", SUMS)))
    assert tasks_of(recipe(tmp_path / "sums.parquet")) == tasks_of(recipe(saved)) == expected
    (tmp_path / "sets" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"has 1 splits, train: name one, such as '.*sets/train'"):
        open_family(recipe(tmp_path / "sets"))
    with pytest.raises(ConfigError, match=r"sums\.parquet has no column 'question', it has prompt, answer"):
        open_family(recipe(tmp_path / "sums.parquet", prompt="question"))
    (saved / names[1]).write_bytes(b"no arrow stream")
    with pytest.raises(ConfigError, match=rf"{names[1]} is damaged"):
        open_family(recipe(saved))


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", SUMS[:30])
    write(tmp_path / "2.jsonl", SUMS[30:])
    assert sum(len(tasks_of(recipe(tmp_path), split)) for split in Split) == len(SUMS)


def test_a_conversation_comes_before_the_prompt_and_may_bring_its_answer(tmp_path: Path) -> None:
    """SFT reads the same line."""
    talk = [("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "1 + 1 ="), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in talk]
    path = write(tmp_path / "talk.jsonl", [{"messages": messages}, {"messages": [*messages[:3], *SFT]}])
    task = tasks_of(recipe(path, messages="messages", answer="", heldout_every=50))[0]
    assert task.history == tuple(PromptMessage(role=role, content=content) for role, content in talk[:3])  # type: ignore[arg-type]  # roles
    assert (task.prompt, answer_of(task)) == ("1 + 1 =", "2")
    assert len(parse(path.read_bytes().splitlines()[0]).messages) == len(talk)
    with pytest.raises(
        ConfigError, match=r"harness\.kind = 'coding' cannot take up: set harness\.kind = 'single_turn'"
    ):
        default_recipe(["tasks.family=dataset", f"tasks.options.path={path}", "tasks.options.messages=messages"])


SFT = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]


def test_choices_are_written_behind_the_prompt_and_the_answer_is_a_letter(tmp_path: Path) -> None:
    choices = ["red", "green", "blue"]
    rows = [{"q": f"which, {answer}?", "key": answer, "choices": choices} for answer in ("B", 2, "red")]
    options: dict[str, Any] = {"prompt": "q", "answer": "key", "choices": "choices", "match": "choice"}
    tasks = [task for split in Split for task in tasks_of(recipe(write(tmp_path / "c.jsonl", rows), **options), split)]
    assert {task.prompt.splitlines()[0]: answer_of(task) for task in tasks} == {
        "which, B?": "B",
        "which, 2?": "C",
        "which, red?": "A",
    }
    assert tasks[0].prompt.endswith("\nA. red\nB. green\nC. blue")


def test_the_answer_is_what_stands_behind_a_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm.jsonl", [{"question": "how many?", "answer": "3 + 4 is 7\n#### 7"}])
    (task,) = (
        task for split in Split for task in tasks_of(recipe(path, prompt="question", answer_after="####"), split)
    )
    assert task.checks == AnswerChecks(answer="7", match="normalised", after="####")


@pytest.mark.parametrize(
    ("row", "options", "fault"),
    [
        ({"prompt": "x"}, {}, "there is no column 'answer', but prompt"),
        ({"prompt": " ", "answer": 1}, {}, "column 'prompt' is empty"),
        ({"prompt": ["x"], "answer": 1}, {}, "column 'prompt' is not a text or number"),
        ({"prompt": "x", "answer": None}, {}, "column 'answer' is not a text or number: None"),
        ({"prompt": "x", "answer": "so #### "}, {"answer_after": "####"}, "column 'answer' has no answer"),
        ({"prompt": "x", "answer": "Z9"}, {"match": "choice"}, "column 'answer' is not a letter of a choice: 'Z9'"),
        ({"prompt": "x", "answer": 3, "c": ["a", "b"]}, {"match": "choice", "choices": "c"}, "none of the 2 answers"),
        ({"prompt": "x", "answer": 1, "c": "ab"}, {"match": "choice", "choices": "c"}, "'c' is not a list of 2 to 26"),
        ({"m": "x", "answer": 1}, {"messages": "m"}, "column 'm' is not a list of messages"),
        ({"m": [{"role": "me", "content": "x"}], "answer": 1}, {"messages": "m"}, "'m', message 1 has no role out of"),
        ({"m": [{"role": "user", "content": ""}], "answer": 1}, {"messages": "m"}, "message 1 has no text"),
        ({"m": SFT, "answer": 1}, {"messages": "m"}, "ends with a message of assistant, which asks nothing"),
        ({"m": SFT[:1]}, {"messages": "m", "answer": ""}, "does not end with the assistant's answer"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_column(
    tmp_path: Path, row: Mapping[str, Any], options: dict[str, Any], fault: str
) -> None:
    good = {"prompt": "y", "answer": "A", "c": ["p", "q"], "m": SFT if options.get("answer") == "" else SFT[:1]}
    path = write(tmp_path / "bad.jsonl", [good, row])
    with pytest.raises(ConfigError) as caught:
        open_family(recipe(path, **options))
    assert "bad.jsonl, line 2: " in str(caught.value)
    assert fault in str(caught.value)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x", "answer": 1}\n{"prompt": \n[1]\n')
    with pytest.raises(ConfigError, match=r"(?s)line 2: it is not JSON.*line 3: it is not an object of columns"):
        open_family(recipe(tmp_path / "broken.jsonl"))
    for path, fault in ((tmp_path / "none", "there is no"), (tmp_path / "x.csv", "expected one of .jsonl")):
        (tmp_path / "x.csv").write_text("a,b")
        with pytest.raises(ConfigError, match=f"tasks.options.path.*{fault}"):
            open_family(recipe(path))
    faults: list[tuple[dict[str, Any], str]] = [
        ({"choices": "c"}, "would have no effect with tasks.options.match = 'normalised'"),
        ({"messages": "m", "prompt": "p"}, "tasks.options.prompt would have no effect"),
        ({"answer": ""}, "tasks.options.answer is empty"),
        ({"pth": "x"}, "did you mean 'tasks.options.path'"),
    ]
    for options, fault in faults:
        with pytest.raises(ConfigError, match=fault):
            recipe(tmp_path, **options)
    with pytest.raises(ConfigError, match="single_turn' can answer and change no file"):
        default_recipe(["harness.kind=single_turn"])


def test_a_run_keeps_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", SUMS)
    options = with_absolute_paths(recipe(Path("sums.jsonl"))).tasks.options
    assert isinstance(options, DatasetOptions)
    assert (options.path, options.heldout_path) == (str(tmp_path / "sums.jsonl"), "")


def test_mid_training_is_shown_rows_of_its_side_with_as_many_mistakes_as_asked_for(tmp_path: Path) -> None:
    config = recipe(write(tmp_path / "sums.jsonl", SUMS), right_answer=0.5, answer_after="= ")
    demonstrations, rng = open_demonstrations(config), Random(0)
    sessions = [demonstrations.session(rng) for _ in range(400)]
    right = sum(reply.content == f"= {2 * int(question.content.split()[0])}" for question, reply in sessions)
    assert 160 <= right <= 250
    prompts = {task.prompt for task in tasks_of(config)}
    assert {question.content for question, _ in sessions} <= prompts
    for _ in range(20):
        exercise = demonstrations.code(rng)
        assert not isinstance(exercise, str)
        assert exercise[1].content == f"= {2 * int(exercise[0].content.split()[0])}"
