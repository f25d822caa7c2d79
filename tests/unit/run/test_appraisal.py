"""What a rollout is worth, all considered."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from etude.config.recipe import RunConfig
from etude.config.reward import RewardConfig
from etude.errors import ConfigError, JudgeUnavailable
from etude.ledger.ledger import Ledger
from etude.protocols import Appraisal, HarnessResult, Reward
from etude.rewards.parts import make_up
from etude.run.appraisal import RolloutAppraiser, hold_reward, open_appraiser
from etude.run.folder import RunFolder
from etude.types import Finish, Split, Task, Turn
from records import CHECKS

TASK = Task(task_id="t", family="f", template="t", split=Split.TRAIN, prompt="", files={"a.py": ""}, checks=CHECKS)
RESULT = HarnessResult(reason="submit", counts={"read": 1, "malformed": 1}, measures={"todo_opened": 2, "todo_open": 1})
GRADED = Reward(value=1.0, parts={"hidden_passed": 1.0, "cheat_canary": 0.0})
WORDS = ["fix f in a.py", "reda a.py", "bad call", "read a.py", "which line do you mean?"]
"""What a token is, by its id."""
TESTS: dict[str, Any] = {"name": "tests", "source": "grader", "version": 1, "weight": 1.0, "range": (0.0, 1.0)}
MALFORMED = {**TESTS, "name": "malformed", "source": "behaviour.malformed_calls", "weight": -0.5, "missing": 0.0}
STYLE = {**TESTS, "name": "style", "source": "judge.style", "weight": 0.25, "missing": "wait"}


def turn(prompt: list[int], said: int) -> Turn:
    one = np.ones(1, np.int32)
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=said * one,
        logprobs=-one.astype(np.float32),
        versions=one,
        finish=Finish.STOP,
    )


TURNS = (turn([0], 1), turn([0, 1, 2], 3), turn([0, 1, 2, 3, 2], 4))


class Judge:
    """Says what the test wants, or that it is down; remembers what it was shown."""

    def __init__(self, values: Mapping[str, float] | None) -> None:
        self.values = values
        self.shown: list[str] = []

    async def parts(self, task: Task, result: HarnessResult, transcript: str) -> Mapping[str, float]:
        self.shown.append(transcript)
        if self.values is None:
            raise JudgeUnavailable("down")
        return self.values


def reward(*parts: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"parts": parts})


def appraise(config: RewardConfig, judge: Judge | None = None, graded: Reward = GRADED) -> Appraisal:
    appraiser = RolloutAppraiser(reward=config, decode=lambda ids: " ".join(WORDS[i] for i in ids), judge=judge)
    return asyncio.run(appraiser.appraise(TASK, RESULT, graded, TURNS))


def test_without_parts_the_graders_word_stands_untouched(tmp_path: Path) -> None:
    assert appraise(RewardConfig()) == Appraisal(reward=GRADED)
    assert open_appraiser(RunConfig(), RunFolder(tmp_path), lambda ids: "", None) is None


def test_the_parts_are_added_up_and_all_that_is_known_is_recorded() -> None:
    found = appraise(reward(TESTS, MALFORMED)).reward
    assert found.value == 1.0 - 0.5 * 0.5
    assert found.parts == {
        "hidden_passed": 1.0,
        "cheat_canary": 0.0,
        "grader": 1.0,
        "tests": 1.0,
        "malformed": 0.5,
        "behaviour.open_todos": 0.5,
        "behaviour.excess_comments": 0.0,
        "behaviour.thinking_comments": 0.0,
        "behaviour.tool_monoculture": 0.0,
        "behaviour.malformed_calls": 0.5,
        "behaviour.asking": pytest.approx(1 / 3),
        "behaviour.sampled_tokens": 3.0,
        "effort.thinking_tokens": 0.0,
        "effort.call_tokens": 2.0,
        "effort.output_tokens": 2.0,
        "effort.final_tokens": 1.0,
        "effort.calls": 2.0,
        "effort.turns": 3.0,
        "clipped": 0.0,
        "assumed": 0.0,
    }


def test_a_judge_is_asked_where_a_part_wants_it_and_reads_all_of_it() -> None:
    judge = Judge({"style": 0.5, "tone": 0.25})
    found = appraise(reward(TESTS, STYLE), judge).reward
    assert found.value == 1.125
    assert (found.parts["style"], found.parts["judge.tone"]) == (0.5, 0.25)
    (shown,) = judge.shown
    assert all(shown.count(word) >= 1 for word in WORDS)
    assert shown.count(WORDS[0]) == 1
    appraise(reward(TESTS), judge)
    assert len(judge.shown) == 1


def test_a_judge_that_is_down_is_waited_for_or_masked_but_never_a_zero() -> None:
    with pytest.raises(JudgeUnavailable):
        appraise(reward(TESTS, STYLE), Judge(None))
    masked = appraise(reward(TESTS, STYLE | {"missing": "mask"}), Judge(None))
    assert masked.masked == "reward part 'style' is missing"
    with pytest.raises(ValidationError, match="set missing = 'wait' or 'mask'"):
        reward(TESTS, STYLE | {"missing": 0.0})


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(ConfigError, match=r"'hidden_passed' is of 'grader', but the grader or the harness records"):
        appraise(reward(TESTS | {"name": "hidden_passed"}))
    same = appraise(reward(TESTS | {"name": "hidden_passed", "source": "grader.hidden_passed"}))
    assert same.reward.value == 1.0


def test_a_run_keeps_the_reward_that_it_began_with(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        made = make_up(reward(TESTS, STYLE), {"style": "abc"})
        for _ in range(2):
            hold_reward(ledger.facts, made)
        for other, said in (
            (make_up(reward(TESTS, STYLE), {"style": "abd"}), "'style' has rubric = 'abd' instead of 'abc'"),
            (make_up(reward(TESTS | {"weight": 0.5}, STYLE), {"style": "abc"}), r"'tests' has weight = 0\.5 instead"),
            ({}, "'style' is gone; 'tests' is gone"),
        ):
            with pytest.raises(ConfigError, match=said):
                hold_reward(ledger.facts, other)
        hold_reward(ledger.facts, made)
