"""A recipe's judge: its trusted endpoints, its cache, and the command line."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import aiohttp
import orjson
import pytest

from etude.cli.actions.ask_judge import JudgeCheck, calibrate_beside, check
from etude.cli.main import main
from etude.config.loading import default_recipe, load_recipe
from etude.config.recipe import RunConfig
from etude.config.reward import RewardConfig
from etude.errors import ConfigError, DamagedError, JudgeLost, JudgeUnavailable
from etude.protocols import HarnessResult
from etude.rewards.judge.budget import Spend, SpendFile
from etude.rewards.judge.calibration import parse_calibration
from etude.rewards.transcript import SpokenTurn
from etude.run.folder import RunFolder
from etude.run.judge_votes import votes_about
from etude.run.judging import JudgeState, check_judge, judge_fingerprints, open_judge, rubrics_of
from etude.telemetry.events import JudgeAlarm
from etude.types import AnswerChecks, Split, Task, TurnKind
from judges import NONCE
from scripted_model import ScriptedModel, serving

RECIPE = Path(__file__).parents[3] / "recipes" / "summaries"
UNTRUSTED = "judge.calibrations={}"
TASK = Task(
    task_id="t",
    family="summaries",
    template="m",
    split=Split.TRAIN,
    prompt="sum up\ndef area(w, h):\n    return w * h",
    files={},
    checks=AnswerChecks(answer="area returns w * h"),
)


def recipe(*overrides: str) -> RunConfig:
    return load_recipe(RECIPE, overrides)


def test_the_recipe_s_judge_is_the_one_that_was_calibrated() -> None:
    config = recipe()
    check_judge(config)
    assert sorted(judge_fingerprints(config)) == ["factuality", "style"]
    assert judge_fingerprints(recipe(UNTRUSTED)) == judge_fingerprints(config)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (UNTRUSTED, "never calibrated"),
        ("judge.options.max_tokens=99", "not the one that was calibrated"),
        ("judge.min_agreement=0.99", "judge.min_agreement is 0.99"),
    ],
)
def test_an_uncalibrated_judge_is_refused_unless_the_recipe_allows_it(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_judge(recipe(override))
    check_judge(recipe(override, "judge.allow_uncalibrated=true"))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["judge.options.calls_per_rollout=1"],
            r"calls_per_rollout = 1, .* judged in 2 calls \(judge\.options\.votes = 1 on each of 2",
        ),
        (
            ["judge.options.tokens_per_rollout=40000"],
            r"judge\.options\.tokens_per_rollout = 40000: .*judge\.options\.text_characters = 20000",
        ),
        (["judge.options.calls_per_run=1"], "judge.options.calls_per_run = 1"),
        (
            ["judge.options.cost_per_run=0.01", "judge.options.prices=[1.0, 0.0]"],
            r"judge\.options\.cost_per_run = 0\.01: a rollout",
        ),
    ],
)
def test_a_budget_that_cannot_hold_one_judgement_is_refused(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_judge(recipe(*overrides))


def test_an_aspect_that_no_part_names_needs_no_calibration_and_is_not_asked_about(tmp_path: Path) -> None:
    config = recipe(UNTRUSTED, "judge.allow_uncalibrated=true")
    alone = config.model_copy(update={"reward": RewardConfig(parts=config.reward.parts[:1])})

    async def scenario() -> None:
        async with aiohttp.ClientSession() as http, open_judge(alone, http, state=JudgeState(tmp_path)) as opened:
            assert opened is not None
            result = await opened.parts.parts(TASK, HarnessResult(reason="submit", counts={}, answer="a"), "")
            assert sorted(result) == ["addresses_judge", "style", "unreadable_votes"]

    asyncio.run(scenario())
    check_judge(config.model_copy(update={"reward": RewardConfig(), "judge": recipe(UNTRUSTED).judge}))


def test_a_rubric_under_another_name_is_refused() -> None:
    config = recipe()
    style = config.judge.rubrics["style"]
    wrong = config.judge.model_copy(update={"rubrics": {"tone": style}})
    with pytest.raises(ConfigError, match=r"judge\.rubrics\.tone is about 'style'"):
        rubrics_of(wrong)


def test_rules_are_for_families_that_bring_some() -> None:
    config = load_recipe(RECIPE.parent / "quickstart", ["judge.kind=rules"])
    with pytest.raises(ConfigError, match="'bugfix' has none"):
        judge_fingerprints(config)


def test_a_rollout_is_judged_and_the_run_remembers(tmp_path: Path) -> None:
    config = recipe()
    right = "area returns w * h"
    alarms: list[JudgeAlarm] = []

    async def play(answer: str) -> dict[str, float]:
        async with (
            aiohttp.ClientSession() as http,
            open_judge(config, http, state=JudgeState(tmp_path), alarm=alarms.append) as opened,
        ):
            assert opened is not None
            result = HarnessResult(reason="submit", counts={}, answer=answer)
            return dict(await opened.parts.parts(TASK, result, ""))

    good = asyncio.run(play(right))
    assert good == {"style": 1.0, "factuality": 1.0, "addresses_judge": 0.0, "unreadable_votes": 0.0}
    spent = SpendFile(tmp_path).load()
    assert spent.calls == 2
    assert asyncio.run(play(right)) == good
    assert SpendFile(tmp_path).load() == spent
    bad = asyncio.run(play("hm, maybe it is something!"))
    assert bad["style"] < 0.6
    assert SpendFile(tmp_path).load().calls == 4
    assert alarms == []


def test_processes_of_a_run_live_on_one_budget(tmp_path: Path) -> None:
    recipe_of_three = recipe()
    judge = recipe_of_three.judge.model_copy(
        update={"options": recipe_of_three.judge.required_options.model_copy(update={"calls_per_run": 3})}
    )
    config = recipe_of_three.model_copy(update={"judge": judge})

    async def play(worker: int, answer: str) -> dict[str, float]:
        state = JudgeState(tmp_path, worker)
        async with aiohttp.ClientSession() as http, open_judge(config, http, state=state) as opened:
            assert opened is not None
            return dict(await opened.parts.parts(TASK, HarnessResult(reason="submit", counts={}, answer=answer), ""))

    assert len(asyncio.run(play(0, "area returns w * h"))) == 4
    with pytest.raises(JudgeUnavailable, match=r"judge\.options\.calls_per_run = 3, .*; 3 calls and"):
        asyncio.run(play(1, "area returns w + h"))
    assert (SpendFile(tmp_path).load().calls, SpendFile(tmp_path, 1).load().calls) == (2, 1)


def test_a_recipe_without_a_judge_has_none() -> None:
    async def scenario() -> None:
        async with (
            aiohttp.ClientSession() as http,
            open_judge(load_recipe(RECIPE.parent / "quickstart"), http) as judge,
        ):
            assert judge is None

    asyncio.run(scenario())
    assert judge_fingerprints(load_recipe(RECIPE.parent / "quickstart")) == {}


def test_a_rule_that_changed_is_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = recipe()
    older = {
        aspect: text.replace('"identity": "etude-rules-1"', '"identity": "etude-rules-0"')
        for aspect, text in config.judge.calibrations.items()
    }
    alarms: list[JudgeAlarm] = []

    async def scenario(on_alarm: str) -> None:
        judge = config.judge.model_copy(
            update={
                "calibrations": older,
                "options": config.judge.required_options.model_copy(update={"on_alarm": on_alarm}),
            }
        )
        async with (
            aiohttp.ClientSession() as http,
            open_judge(
                config.model_copy(update={"judge": judge}), http, state=JudgeState(tmp_path), alarm=alarms.append
            ) as opened,
        ):
            assert opened is not None
            await opened.parts.parts(TASK, HarnessResult(reason="submit", counts={}, answer="a"), "")

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario("warn"))
    assert [alarm.kind for alarm in alarms] == ["model"]
    assert "etude-rules-1" in caplog.text
    for _ in range(2):
        with pytest.raises(JudgeLost, match=r"'etude-rules-1' now; .* remove .*judge-held\.txt"):
            asyncio.run(scenario("hold"))
    assert SpendFile(tmp_path).load().calls == 3
    asyncio.run(scenario("warn"))


def test_spending_is_remembered_and_a_damaged_record_is_not_a_fresh_start(tmp_path: Path) -> None:
    file = SpendFile(tmp_path)
    assert file.load() == Spend()
    file.save(Spend(calls=3, prompt_tokens=5, completion_tokens=7))
    assert file.load() == Spend(calls=3, prompt_tokens=5, completion_tokens=7)
    for damage in (b"", b"{", b'{"calls": -1}', b'{"money": 1}', b"[]"):
        (tmp_path / "judge-spend-0.json").write_bytes(damage)
        with pytest.raises(DamagedError, match="remove it to begin at 0"):
            file.load()


def test_the_command_line_calibrates_checks_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run.toml", "style.toml", "factuality.toml", "style.jsonl", "factuality.jsonl"):
        (tmp_path / name).write_text((RECIPE / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["judge", "calibrate", str(tmp_path)]) == 0
    assert "weighted kappa" in capsys.readouterr().out
    for aspect in ("style", "factuality"):
        fresh = parse_calibration((tmp_path / f"{aspect}.calibration.json").read_text(encoding="utf-8"), aspect)
        shipped = parse_calibration((RECIPE / f"{aspect}.calibration.json").read_text(encoding="utf-8"), aspect)
        assert (fresh.pin, fresh.agreement, fresh.bias, fresh.items) == (
            *(shipped.pin, shipped.agreement, shipped.bias, shipped.items),
        )
    assert main(["judge", "check", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("; trusted;") == 2
    assert "2 calls: " in shown
    assert main(["judge", "check", str(tmp_path), "--set", "judge.options.max_tokens=99"]) == 2
    assert "not trusted" in capsys.readouterr().out
    assert main(["judge", "check", str(tmp_path), "--set", "judge.options.calls_per_rollout=1"]) == 2
    assert "judge.options.calls_per_rollout = 1" in capsys.readouterr().err
    (tmp_path / "task").write_text("def area(w, h):\n    return w * h", encoding="utf-8")
    (tmp_path / "work").write_text("I think area returns w * h!", encoding="utf-8")
    arguments = ["--aspect", "style", "--task", str(tmp_path / "task"), "--work", str(tmp_path / "work")]
    assert main(["judge", "score", str(tmp_path), *arguments]) == 0
    assert orjson.loads(capsys.readouterr().out)["score"] == 2


def checked(say: Callable[[str], str], *overrides: str) -> tuple[JudgeCheck, int]:
    """The check of a judge that only gives hints, and its number of calls."""
    model = ScriptedModel(lambda messages: say(str(messages[-1]["content"])))

    async def scenario() -> JudgeCheck:
        async with serving(model) as session:
            recipe = [
                "judge.kind=model",
                f"judge.options.url={session.base_url}",
                "judge.options.model=m",
                "hints.weight=1.0",
                "hints.judge=true",
            ]
            return await asyncio.to_thread(check, default_recipe([*recipe, *overrides]))

    return asyncio.run(scenario()), len(model.requests)


def test_a_judge_of_hints_alone_is_asked_for_some_and_told_what_that_cost() -> None:
    def none(question: str) -> str:
        return orjson.dumps({"hints": [], "nonce": NONCE.findall(question)[-1]}).decode()

    result, calls = checked(none, "judge.options.prices=[2.0, 8.0]")
    assert (result.passed, calls) == (True, 1)
    assert result.lines == [
        "hints: readable",
        "1 calls: 1 tokens read, 1 written; 1e-05 at the recipe's prices",
    ]
    result, calls = checked(lambda _question: "what?")
    assert (result.passed, calls) == (False, 2)
    assert "hints: its reply could not be read: it was not one JSON object and nothing else" in result.lines


def test_a_check_that_would_ask_nothing_or_gets_no_answer_does_not_pass() -> None:
    no_one = [
        "judge.kind=model",
        "judge.options.url=http://127.0.0.1:9/v1",
        "judge.options.model=m",
        "judge.options.timeout_s=0.3",
    ]
    with pytest.raises(ConfigError, match="asks its judge nothing: write judge"):
        check(default_recipe(no_one))
    with pytest.raises(ConfigError, match="nothing to calibrate"):
        calibrate_beside(default_recipe(no_one), RECIPE, [])
    with pytest.raises(JudgeUnavailable, match=r"'hints' within 0\.3 s"):
        check(default_recipe([*no_one, "hints.weight=1.0", "hints.judge=true"]))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["judge", "check", str(RECIPE.parent / "quickstart")], "has no judge"),
        (["judge", "calibrate", str(RECIPE), "--aspect", "tone"], "rubrics of factuality, style"),
        (["judge", "score", str(RECIPE), "--aspect", "style", "--task", "/none", "--work", "/none"], "--task /none"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert complaint in text
    assert text.count("\n") == 1


def test_votes_about_a_rollout_are_found_again_with_their_reasons(tmp_path: Path) -> None:
    config, right = recipe(), "area returns w * h"

    async def play() -> None:
        async with aiohttp.ClientSession() as http, open_judge(config, http, state=JudgeState(tmp_path)) as opened:
            assert opened is not None
            await opened.parts.parts(TASK, HarnessResult(reason="submit", counts={}, answer=right), "")

    asyncio.run(play())
    spoken = [
        SpokenTurn(heard="what?", text=text, answered="", kind=TurnKind.ACT, continues=None) for text in ("hm", right)
    ]
    votes = votes_about(RunFolder(tmp_path), config, TASK, spoken)
    assert sorted(vote.aspect for vote in votes) == ["factuality", "style"]
    assert all(vote.score == vote.highest and vote.reason for vote in votes)
    assert votes_about(RunFolder(tmp_path), config, TASK, spoken[:1]) == ()
    assert votes_about(RunFolder(tmp_path / "none"), config, TASK, spoken) == ()
