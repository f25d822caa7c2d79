"""Scores of a run: the data collected for them, and the time limit for a judge."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from etude.clock import VirtualClock
from etude.config.recipe import RunConfig
from etude.config.reward import RewardConfig
from etude.errors import ConfigError, JudgeDeclined, JudgeLost, JudgeUnavailable
from etude.ledger.ledger import Ledger
from etude.protocols import Grade, HarnessResult, RewardInput, Score, SpokenCall
from etude.rewards.score import ScorePolicy
from etude.rewards.shaping.parts import reward_spec
from etude.rewards.transcript import SpokenTurn, read_turns, spoken_turns
from etude.rollouts.breaker import MAX_PAUSE_S
from etude.rollouts.worker import GradedRollout, ScoredRollout
from etude.run.scoring import RewardScorer, freeze_reward, open_scorer, transcript_of
from etude.tokens.chat import ChatTemplate
from etude.types import AnswerChecks, Finish, Split, Task, Turn, TurnKind
from records import CHECKS

TASK = Task(task_id="t", family="f", template="t", split=Split.TRAIN, prompt="", files={"a.py": ""}, checks=CHECKS)
RESULT = HarnessResult(reason="submit", counts={"read": 1, "malformed": 1}, measures={"todo_opened": 2, "todo_open": 1})
GRADED = Grade(value=1.0, parts={"hidden_passed": 1.0, "cheat_canary": 0.0})
WORDS = ["fix f in a.py", "reda a.py", "bad call", "read a.py", "which line do you mean?", "<think>hm</think>"]
"""What a token is, by its id."""
LAST, THOUGHT = "which line do you mean?", 5
TESTS: dict[str, Any] = {"name": "tests", "source": "grader", "version": 1, "weight": 1.0, "range": (0.0, 1.0)}
MALFORMED = {**TESTS, "name": "malformed", "source": "behaviour.malformed_calls", "weight": -0.5, "missing": 0.0}
STYLE = {**TESTS, "name": "style", "source": "judge.style", "weight": 0.25, "missing": "wait"}


def turn(prompt: list[int], text_of: int) -> Turn:
    one = np.ones(1, np.int32)
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=text_of * one,
        logprobs=-one.astype(np.float32),
        versions=one,
        finish=Finish.STOP,
    )


TURNS = (turn([0], 1), turn([0, 1, 2], 3), turn([0, 1, 2, 3, 2], 4))


class Judge:
    """A judge with scripted values, or that is away for a number of calls; records its inputs."""

    def __init__(
        self, values: Mapping[str, float], *, away: int = 0, error: type[JudgeUnavailable] = JudgeUnavailable
    ) -> None:
        self.values = values
        self.away = away
        self.error = error
        self.shown: list[str] = []
        self.answers: list[str] = []

    async def parts(self, task: Task, result: HarnessResult, transcript: str) -> Mapping[str, float]:
        self.shown.append(transcript)
        self.answers.append(result.answer)
        if len(self.shown) <= self.away:
            raise self.error("down")
        return self.values


def reward(*parts: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"parts": parts})


def read(turns: Sequence[Turn]) -> Sequence[SpokenTurn]:
    return read_turns(turns, lambda ids: " ".join(WORDS[i] for i in ids))


ROLLOUT = GradedRollout(task=TASK, result=RESULT, grade=GRADED, turns=TURNS)


def scored(config: RewardConfig, judge: Judge | None = None) -> Score:
    scorer = RewardScorer(policy=ScorePolicy(reward=config), read=read, judge=judge, clock=VirtualClock())
    return asyncio.run(scorer.score(ROLLOUT)).score


def test_without_parts_the_graders_word_stands_untouched() -> None:
    scorer = open_scorer(RunConfig(), ChatTemplate.train(["a"], 300), None)  # which cannot read these tokens
    whole = ScoredRollout(score=Score(value=GRADED.value, parts=GRADED.parts))
    assert asyncio.run(scorer.score(ROLLOUT)) == whole


def test_the_parts_are_added_up_and_all_that_is_known_is_recorded() -> None:
    score = scored(reward(TESTS, MALFORMED))
    assert score.value == 1.0 - 0.5 * 0.5
    assert score.parts == {
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
    score = scored(reward(TESTS, STYLE), judge)
    assert score.value == 1.125
    assert (score.parts["style"], score.parts["judge.tone"]) == (0.5, 0.25)
    (shown,) = judge.shown
    assert all(shown.count(word) >= 1 for word in WORDS[:THOUGHT])
    assert shown.count(WORDS[0]) == 1
    scored(reward(TESTS), judge)
    assert len(judge.shown) == 1


def test_a_judge_reads_agents_side_by_side_one_after_the_other() -> None:
    calls = [("both", None), ("a", None), ("b", None), ("b is 1", 2), ("a is 1", 1), ("done\nboth", 0)]
    spoken = spoken_turns([SpokenCall(heard=heard, text="ok", continues=before) for heard, before in calls])
    assert [line for line in transcript_of(spoken).splitlines() if "said" not in line] == [
        "turn 0 heard| both",
        "turn 5 heard| done",
        "turn 5 heard| both",
        "conversation 2 turn 1 heard| a",
        "conversation 2 turn 4 heard| a is 1",
        "conversation 3 turn 2 heard| b",
        "conversation 3 turn 3 heard| b is 1",
    ]


def count_turns(rollout: RewardInput) -> float:
    return float(len(rollout.turns))


async def count_turn_marks(rollout: RewardInput) -> float:
    return float(rollout.transcript.count("turn "))


def raises(rollout: RewardInput) -> float:
    raise RuntimeError("no")


@pytest.mark.parametrize(("name", "value"), [("count_turns", 3.0), ("count_turn_marks", 6.0), ("raises", -7.0)])
def test_a_part_may_be_a_function_and_one_that_raises_says_nothing(name: str, value: float) -> None:
    source = f"{__name__}:{name}"
    own = {**TESTS, "name": "own", "source": source, "range": (-9.0, 9.0), "missing": -7.0}
    config = RunConfig(reward=reward(TESTS, own))
    scorer = open_scorer(config, ChatTemplate.train(["a"], 300), None)
    assert isinstance(scorer, RewardScorer)
    score = asyncio.run(replace(scorer, read=read).score(ROLLOUT)).score
    assert score.value == 1.0 + value
    assert score.parts["own"] == value
    assert source not in score.parts


PROMPT = replace(TASK, checks=AnswerChecks(answer="42"))


@pytest.mark.parametrize(
    ("task", "answer", "turns", "shown"),
    [
        (TASK, "", TURNS, LAST),  # a harness that hands nothing over
        (TASK, "done", TURNS, "done"),
        (TASK, "", (*TURNS, turn([0], THOUGHT)), LAST),  # the last turn only thought
        (TASK, "", (*TURNS, replace(turn([0], 3), kind=TurnKind.SUMMARY)), LAST),
        (TASK, "", (turn([0], THOUGHT),), ""),
        (PROMPT, "", TURNS, ""),  # was asked for an answer, and never gave one
    ],
)
def test_a_judge_of_the_answer_reads_the_last_words(
    task: Task, answer: str, turns: tuple[Turn, ...], shown: str
) -> None:
    judge = Judge({"style": 0.5})
    scorer = RewardScorer(policy=ScorePolicy(reward=reward(TESTS, STYLE)), read=read, judge=judge)
    rollout = GradedRollout(task=task, result=replace(RESULT, answer=answer), grade=GRADED, turns=turns)
    asyncio.run(scorer.score(rollout))
    assert judge.answers == [shown]


def test_a_judge_that_is_down_is_waited_for_or_masked_but_never_a_zero() -> None:
    back = Judge({"style": 0.5}, away=9)
    assert scored(reward(TESTS, STYLE), back).value == 1.125
    assert len(back.shown) == 10
    gone = Judge({}, away=1_000)
    with pytest.raises(JudgeUnavailable):
        scored(reward(TESTS, STYLE), gone)
    assert 300 / MAX_PAUSE_S < len(gone.shown) < 30
    down = Judge({}, away=1_000)
    masked = scored(reward(TESTS, STYLE | {"missing": "mask"}), down)
    assert (masked.masked, len(down.shown)) == ("reward part 'style' is missing", 1)
    with pytest.raises(ValidationError, match="set missing = 'wait' or 'mask'"):
        reward(TESTS, STYLE | {"missing": 0.0})


def test_no_one_waits_for_what_timeout_does_not_bring() -> None:
    spent = Judge({}, away=1_000, error=JudgeLost)
    with pytest.raises(JudgeLost):
        scored(reward(TESTS, STYLE), spent)
    declined, undecided = Judge({}, away=1_000, error=JudgeDeclined), Judge({"unreadable_votes": 1.0})
    for judge in (declined, undecided):
        assert scored(reward(TESTS, STYLE), judge).masked == "reward part 'style' is missing"
    assert [len(judge.shown) for judge in (spent, declined, undecided)] == [1, 1, 1]


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(ConfigError, match=r"'hidden_passed' is of 'grader', but the grader or the harness records"):
        scored(reward(TESTS | {"name": "hidden_passed"}))
    same = scored(reward(TESTS | {"name": "hidden_passed", "source": "grader.hidden_passed"}))
    assert same.value == 1.0


def test_a_run_keeps_the_reward_that_it_began_with(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        made = reward_spec(reward(TESTS, STYLE), {"style": "abc"})
        for _ in range(2):
            freeze_reward(ledger.facts, made)
        for other, text in (
            (reward_spec(reward(TESTS, STYLE), {"style": "abd"}), "'style' has rubric = 'abd' instead of 'abc'"),
            (
                reward_spec(reward(TESTS | {"weight": 0.5}, STYLE), {"style": "abc"}),
                r"'tests' has weight = 0\.5 instead",
            ),
            ({}, "'style' is gone; 'tests' is gone"),
        ):
            with pytest.raises(ConfigError, match=text):
                freeze_reward(ledger.facts, other)
        freeze_reward(ledger.facts, made)
