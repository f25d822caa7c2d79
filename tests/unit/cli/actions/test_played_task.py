"""``etude play``: turns as they happen, the verdict, and the choice of the task."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from etude.cli.actions.played_task import Transcript, heading, side_by_side, task_of, turn_block, verdict
from etude.config.loading import default_recipe
from etude.errors import ConfigError
from etude.protocols import Completion
from etude.run.folder import RunFolder
from etude.tokens.chat import ChatTemplate
from etude.types import Finish, Split
from ledgers import rollout

CHAT = ChatTemplate.train(["return total\n"] * 4, vocab_size=300)


def sampled(text: str, version: int) -> Completion:
    ids = np.array(CHAT.encode(text), np.int32)
    return Completion(
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), version, np.int32),
        finish=Finish.STOP,
    )


def drawn(*parts: object, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(*parts)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_turn_is_what_is_new_and_what_was_said() -> None:
    transcript = Transcript(CHAT)
    first = CHAT.encode("fix total")
    assert transcript.add(first, sampled("read it", 3)).added == "fix total"
    second = transcript.add([*first, *CHAT.encode("read it"), *CHAT.encode("one line")], sampled("submit", 4))
    assert (second.number, second.added, second.reply, second.versions) == (1, "one line", "submit", (4,))
    fresh = transcript.add(CHAT.encode("a new context"), sampled("go", 4))
    assert fresh.added == "a new context"
    text = drawn(turn_block(second))
    assert "turn 1" in text and "< one line" in text and "> submit" in text


def test_two_versions_stand_side_by_side() -> None:
    (line,) = [line for line in drawn(side_by_side([heading(0), heading(60)])).splitlines() if line.strip()]
    assert line.index("v0") < 50 < line.index("v60")


def test_the_verdict_is_the_graders() -> None:
    assert "graded 1.000 · passed" in drawn(verdict(rollout(0, 0, reward=1.0), 1.0))
    assert "graded 0.400 · not passed" in drawn(verdict(rollout(0, 0, reward=0.4), 1.0))
    assert "graded 0.400 · passed" in drawn(verdict(rollout(0, 0, reward=0.4), 0.4))
    assert "failed" in drawn(verdict(rollout(0, 0, reward=None), 1.0))


def test_a_held_out_task_is_played(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    first, second = (task_of(folder, number) for number in (0, 1))
    assert first.split is Split.HELDOUT and first.task_id != second.task_id
    with pytest.raises(ConfigError, match=r"--task -1: this run has held-out tasks 0 to"):
        task_of(folder, -1)
