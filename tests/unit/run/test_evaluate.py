"""Evaluation finds earlier results again, whatever is missing and however many tries are requested."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config.loading import default_recipe
from etude.errors import ConfigError, RunFolderError
from etude.ledger.archive import Archive
from etude.ledger.ledger import Ledger
from etude.run.evaluate import (
    EVALUATIONS,
    EvalRequest,
    evaluate,
    ledger_of_tries,
    missing,
    one_pass,
    rounds,
    tries,
)
from etude.run.folder import LEDGER_URL, RunFolder
from etude.run.kept_files import KeptFiles
from etude.run.weight_log import open_log
from etude.run.working_folder import RECIPE_FILES, WORK_VARIABLE, create_run, keep, open_run_folder
from etude.types import Disposition, Split, Task, Verdict
from etude.weights.publish import Publisher
from etude.weights.tensors import to_stored
from ledgers import rollout, task


def play(ledger: Ledger, label: str, number: int, broken: set[int]) -> None:
    """One evaluation of ``number`` tasks, in which those that are ``broken`` fail by infrastructure for good."""

    async def try_all(name: str, tasks: Sequence[Task]) -> None:
        for expected in tasks[ledger.progress(name).admitted :]:
            group = ledger.admit_group(expected, name, 1, 0)
            assert group is not None
            if int(expected.task_id) in broken:
                ledger.record(rollout(group, 0, reward=None, name=f"{name}/{group}"), name)
                ledger.lose_slot(name, group, 0, "infra")
            else:
                ledger.record(rollout(group, 0, reward=float(expected.task_id), name=f"{name}/{group}"), name)

    asyncio.run(one_pass(ledger, try_all, label, [task(index, Split.HELDOUT) for index in range(number)]))


@pytest.mark.parametrize(
    "calls",
    [
        [(4, set()), (6, set())],  # more tasks
        [(6, {0, 3, 5}), (6, {3}), (6, set())],  # some missing, then one of them again
        [(3, {0, 2}), (6, {2, 4}), (6, set())],  # more tasks while some are missing
        [(6, {1, 4}), (2, {1}), (6, {4}), (6, set())],  # fewer tasks in between
    ],
)
def test_every_task_keeps_its_own_try(tmp_path: Path, calls: list[tuple[int, set[int]]]) -> None:
    place = tmp_path / "ledger.db"
    tried: set[int] = set()
    with Ledger.open(place) as ledger, Archive.open(place) as archive:
        for number, broken in calls:
            play(ledger, "sampled-0", number, broken)
            result = tries(archive, "sampled-0", 6)
            now = {index for index, attempt in enumerate(result) if attempt is not None}
            assert all(attempt.task_id == str(index) for index, attempt in enumerate(result) if attempt is not None)
            assert all(attempt.reward == index for index, attempt in enumerate(result) if attempt is not None)
            assert now >= tried | (set(range(number)) - broken)
            assert missing(archive, "sampled-0", number) == sorted(set(range(number)) - now)
            tried = now
    assert tried == set(range(6))


def test_a_missing_task_gets_one_more_round_with_every_call(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        for expected in (["greedy"], ["greedy", "greedy.again-1"], ["greedy", "greedy.again-1", "greedy.again-2"]):
            play(ledger, "greedy", 3, {1})
            assert [
                name for name, _ in zip(rounds("greedy"), range(5), strict=False) if ledger.progress(name).admitted
            ] == expected


SEEN_THROUGH = Verdict(disposition=Disposition.ZERO, reason="spy", flags=("spy",), hacked=True, graded=1.0)


@pytest.mark.parametrize(
    ("message", "graded"),
    [
        ({"reward": 0.2, "reward_parts": {"grader": 0.0, "style": 1.0}}, 0.0),
        ({"reward": 1.2, "reward_parts": {"grader": 1.0, "style": 1.0}}, 1.0),
        ({"reward": 0.2, "verdict": replace(SEEN_THROUGH, disposition=Disposition.KEEP, graded=0.0)}, 0.0),
        ({"reward": 0.0, "reward_parts": {"grader": 1.0, "style": 1.0}, "verdict": SEEN_THROUGH}, 0.0),
        ({"reward": 0.5, "reward_parts": {"hidden_passed": 0.5}}, 0.5),  # of a recipe without parts
    ],
)
def test_a_try_is_graded_by_its_grader(tmp_path: Path, message: dict[str, Any], graded: float) -> None:
    place = tmp_path / "ledger.db"
    with Ledger.open(place) as ledger, Archive.open(place) as archive:
        group = ledger.admit_group(task(0, Split.HELDOUT), "greedy", 1, 0)
        assert group is not None
        ledger.record(replace(rollout(group, 0), **message), "greedy")
        (attempt,) = tries(archive, "greedy", 1)
        assert attempt is not None
        assert (attempt.graded, attempt.reward) == (graded, message["reward"])
        assert attempt.parts == message.get("reward_parts", {})


def test_other_tasks_under_the_same_label_are_refused(tmp_path: Path) -> None:
    async def nothing(name: str, tasks: Sequence[Task]) -> None: ...

    with Ledger.open(tmp_path / "ledger.db") as ledger:
        play(ledger, "greedy", 2, set())
        with pytest.raises(
            RunFolderError, match=r"was 0 when it was tried and is 9 now.*remove the run's evaluations/"
        ):
            asyncio.run(one_pass(ledger, nothing, "greedy", [task(9, Split.HELDOUT)]))


def test_versions_with_the_same_weights_share_their_tries(tmp_path: Path) -> None:
    folder, digest = RunFolder(tmp_path), "ab" * 32
    first = ledger_of_tries(folder, 3, digest)
    first.parent.mkdir()
    first.touch()
    assert ledger_of_tries(folder, 7, digest) == first
    assert ledger_of_tries(folder, 7, digest, "own").name == f"v000007-{digest[:12]}-own.db"
    assert ledger_of_tries(folder, 7, "cd" * 32).name == f"v000007-{'cd' * 6}.db"


def test_another_machine_has_the_tries_of_a_run_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "url")
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "here"))
    folder = create_run(url, default_recipe(["ledger.url=postgresql:///app"]))
    (folder.path / LEDGER_URL).write_text(str(tmp_path / "ledger.db"))
    keep(folder, *RECIPE_FILES)
    with Publisher(open_log(folder)) as publisher:
        record = publisher.publish(to_stored({"w": torch.ones(3)}), version=0, step=0).result()
    place = folder.path / EVALUATIONS / f"v000000-{record.digest[:12]}.db"
    place.parent.mkdir()
    with Ledger.open(place) as ledger:
        for label in ("sampled-0", "greedy"):
            play(ledger, label, 2, set())
    KeptFiles(folder, EVALUATIONS).keep(EVALUATIONS)

    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "there"))
    evaluation = evaluate(open_run_folder(url), EvalRequest(tasks=2))
    assert [[one and one.reward for one in each] for each in evaluation.tries["greedy"]] == [[0.0, 1.0]]


def test_what_is_wanted_is_checked() -> None:
    assert EvalRequest(passes=2).labels() == {"sampled": ["sampled-0", "sampled-1"], "greedy": ["greedy"]}
    assert EvalRequest(greedy=False).labels() == {"sampled": ["sampled-0"]}
    with pytest.raises(ConfigError, match="--passes 0"):
        EvalRequest(passes=0)
