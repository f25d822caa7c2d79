"""The judge itself, with scripted endpoints."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import JudgeLost, JudgeUnavailable
from etude.rewards.judge.budget import BudgetLimit, JudgePause, Spend
from etude.rewards.judge.endpoint import ChatReply, JudgeCall
from etude.rewards.judge.judge import JudgeLimits, needed_for
from etude.rewards.judge.prompts import JudgeInput, JudgeParams, ReplyFault, judge_fingerprint
from etude.rewards.judge.votes import Judgement
from judges import Court, Scripted, court, scoring, style_rubric, verdict

JUDGE_INPUT = JudgeInput(task="do it", work="done")
THREE = JudgeParams(model="m", votes=3, temperature=0.7)


class Down:
    """An endpoint that is down until it gets replies; implements ``ChatEndpoint``."""

    trouble = "scripted"

    def __init__(self) -> None:
        self.calls = 0
        self.up: Scripted | None = None

    async def ask(self, call: JudgeCall) -> ChatReply:
        self.calls += 1
        if self.up is None:
            raise JudgeUnavailable("scripted: down")
        return await self.up.ask(call)


class Silent:
    """Never answers; implements ``ChatEndpoint``."""

    trouble = "HTTP 429"

    async def ask(self, call: JudgeCall) -> ChatReply:
        await asyncio.Event().wait()
        raise AssertionError(call)


def judge(judging: Court, work: str = "done", *, fresh: bool = False) -> Judgement:
    async def scenario() -> Judgement:
        judged = replace(JUDGE_INPUT, work=work)
        return await judging.judge.judge(style_rubric(), judged, judging.deps.budget, fresh=fresh)

    return asyncio.run(scenario())


def test_votes_are_taken_apart_and_counted() -> None:
    endpoint = scoring(2, 5, 4)
    judgement = judge(court(endpoint, params=THREE))
    assert (judgement.score, judgement.value, len(judgement.votes), judgement.invalid) == (4, 0.75, 3, ())
    assert len({call.seed for call in endpoint.calls}) == 3
    shown = [call.messages[-1]["content"].split("Scale:\n")[1][0] for call in endpoint.calls]
    assert sorted(shown) == ["1", "1", "5"]
    assert [vote.descending for vote in judgement.votes] == [False, True, False]
    nonces = {call.messages[-1]["content"].split('"nonce": "')[1][:32] for call in endpoint.calls}
    assert len(nonces) == 3


def test_a_reply_that_cannot_be_read_is_asked_for_once_more_without_a_word_of_it() -> None:
    replies = iter(["five, obviously", ""])
    endpoint = Scripted(lambda call: next(replies) or verdict(call.messages[-1]["content"], 3))
    judgement = judge(court(endpoint))
    assert (judgement.score, len(endpoint.calls)) == (3, 2)
    again = endpoint.calls[1].messages[-1]["content"]
    assert ReplyFault.NOT_JSON.value in again
    assert "obviously" not in again
    assert endpoint.calls[0].seed != endpoint.calls[1].seed


def test_a_vote_that_stays_unreadable_is_counted_and_is_no_score() -> None:
    judgement = judge(court(Scripted(lambda _call: "garbage \ud800 \x00"), params=THREE))
    assert (judgement.score, judgement.value) == (None, None)
    assert judgement.invalid == (ReplyFault.NOT_JSON,) * 3


def test_a_judge_that_cannot_tell_has_no_verdict() -> None:
    assert judge(court(scoring(None, None, 5), params=THREE)).value is None


def test_votes_come_from_the_cache_unless_fresh_ones_are_required() -> None:
    endpoint = scoring(4)
    judging = court(endpoint, params=THREE)
    first = judge(judging)
    assert judge(judging) == first
    assert len(endpoint.calls) == 3
    judge(judging, "something else")
    assert len(endpoint.calls) == 6
    judge(judging, fresh=True)
    assert len(endpoint.calls) == 9


def test_unreadable_votes_are_not_cached() -> None:
    endpoint = Scripted(lambda _call: "no")
    judging = court(endpoint)
    judge(judging)
    judge(judging)
    assert len(endpoint.calls) == 4


def test_a_spent_budget_makes_the_judge_unavailable_and_does_not_open_the_circuit() -> None:
    endpoint = scoring(4)
    judging = court(endpoint, allowance=BudgetLimit(calls=2, tokens=10**9))
    judge(judging, "a")
    judge(judging, "b")
    for _ in range(9):
        with pytest.raises(
            JudgeUnavailable, match=r"spent: judge\.options\.calls_per_run = 2, .*; 2 calls and 30 tokens"
        ):
            judge(judging, "c")
    assert judging.deps.circuit.ask(0.0) == "closed"
    assert judging.spent[-1] == Spend(calls=2, prompt_tokens=20, completion_tokens=10)
    assert judge(judging, "a").score == 4


def test_votes_that_could_be_afforded_are_kept_for_the_next_time() -> None:
    endpoint = scoring(4)
    judging = court(endpoint, params=THREE, allowance=BudgetLimit(calls=2, tokens=10**9))
    with pytest.raises(JudgeUnavailable, match="budget"):
        judge(judging)
    assert len(endpoint.calls) == 2
    assert len(judging.deps.cache) == 2
    assert judging.spent[-1] == Spend(calls=2, prompt_tokens=20, completion_tokens=10)
    assert judging.deps.circuit.ask(0.0) == "closed"


def test_what_it_may_cost_is_set_aside_before_the_call() -> None:
    endpoint = scoring(4)
    with pytest.raises(
        JudgeUnavailable, match=r"judge\.options\.tokens_per_run = 300; 0 calls .* may take 1[0-9]{3} tokens"
    ):
        judge(court(endpoint, allowance=BudgetLimit(calls=9, tokens=300)))
    assert endpoint.calls == []


class Counting(Scripted):
    """A slow endpoint that counts one token per four bytes, and records the number of concurrent calls."""

    def __init__(self) -> None:
        super().__init__(lambda call: verdict(call.messages[-1]["content"], 3))
        self.busy = self.most = 0

    async def ask(self, call: JudgeCall) -> ChatReply:
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0.001)
        self.busy -= 1
        read = sum(len(message["content"]) for message in call.messages) // 4
        return replace(await super().ask(call), used=Spend(calls=1, prompt_tokens=read, completion_tokens=40))


def test_votes_wait_for_what_others_had_set_aside_and_did_not_use() -> None:
    """All five together would set aside two million tokens; one after the other they use half a million."""
    endpoint = Counting()
    params = replace(THREE, votes=5, text_characters=200_000)
    judging = court(endpoint, params=params)
    judged = JudgeInput(task="t" * 200_000, work="w" * 200_000)

    async def scenario() -> Judgement:
        budget = judging.deps.budget.portion(BudgetLimit(per="rollout", calls=5, tokens=1_000_000))
        return await judging.judge.judge(style_rubric(), judged, budget)

    assert asyncio.run(scenario()).score == 3
    assert endpoint.most == 2
    assert needed_for([style_rubric()], params).tokens < 1_000_000


def test_rollouts_wait_for_one_another_s_calls_but_not_for_what_is_spent() -> None:
    endpoint = Counting()
    judging = court(endpoint, allowance=BudgetLimit(calls=3, tokens=2_500))

    async def scenario() -> list[Judgement | BaseException]:
        portion = judging.deps.budget.portion
        of_rollout = BudgetLimit(per="rollout", calls=1, tokens=10_000)
        judged = [
            judging.judge.judge(style_rubric(), replace(JUDGE_INPUT, work=f"work {n}"), portion(of_rollout))
            for n in range(4)
        ]
        return await asyncio.gather(*judged, return_exceptions=True)

    *judgements, turned_down = asyncio.run(scenario())
    assert [getattr(judgement, "score", judgement) for judgement in judgements] == [3, 3, 3]
    assert "judge.options.calls_per_run = 3" in str(turned_down)
    assert endpoint.most == 1


def test_a_call_that_never_had_a_permit_costs_nothing() -> None:
    judging = court(Silent(), params=THREE, bounds=JudgeLimits(timeout_s=0.02, concurrency=1))
    with pytest.raises(JudgeUnavailable, match="within"):
        judge(judging)
    assert judging.spent[-1].calls == 1


def test_a_budget_is_needed_for_every_vote_on_every_aspect() -> None:
    rubrics = [style_rubric(), style_rubric(aspect="tone")]
    needed = needed_for(rubrics, replace(THREE, text_characters=10_000))
    assert (needed.calls, needed.completion_tokens) == (6, 6 * THREE.max_tokens)
    assert 6 * 20_000 // 4 + 15_000 < needed.prompt_tokens < 6 * 24_000 // 4 + 18_000
    assert needed_for([], THREE) == Spend()


def test_no_answer_in_time_is_no_judgement_and_counts_as_if_all_had_been_used() -> None:
    judging = court(Silent(), bounds=JudgeLimits(timeout_s=0.02))
    with pytest.raises(JudgeUnavailable, match=r"'style' within 0\.02 s: HTTP 429"):
        judge(judging)
    assert judging.spent[-1].completion_tokens == judging.judge.params.max_tokens
    assert judging.spent[-1].prompt_tokens > 500


def test_an_endpoint_that_is_down_is_left_alone_and_then_tried_by_one() -> None:
    endpoint = Down()
    judging = court(endpoint)
    for _ in range(5):
        with pytest.raises(JudgeUnavailable, match="scripted"):
            judge(judging)
    with pytest.raises(JudgeUnavailable, match="failed repeatedly"):
        judge(judging)
    assert endpoint.calls == 5
    judging.clock.advance(2.0)
    endpoint.up = scoring(3)
    assert judge(judging).score == 3
    assert judging.deps.circuit.ask(judging.clock.now()) == "closed"


def test_a_judge_that_has_been_down_for_too_long_is_not_waited_for_until_it_is_back() -> None:
    endpoint = Down()
    judging = court(endpoint)
    for _ in range(12):
        judging.clock.advance(20.0)
        with pytest.raises(JudgeUnavailable, match="scripted"):
            judge(judging)
    with pytest.raises(JudgeLost, match="failed repeatedly and is not called for a while: scripted: down"):
        judge(judging)
    judging.clock.advance(20.0)
    endpoint.up = scoring(3)
    assert [judge(judging, work).score for work in ("a", "b")] == [3, 3]
    assert not judging.deps.circuit.gave_up


def test_an_empty_budget_is_no_sign_of_life_of_an_endpoint_that_is_down() -> None:
    endpoint = Down()
    judging = court(endpoint)
    for _ in range(5):
        with pytest.raises(JudgeUnavailable, match="scripted"):
            judge(judging)
    judging.clock.advance(2.0)

    async def without_money() -> None:
        budget = judging.deps.budget.portion(BudgetLimit(per="rollout", calls=0, tokens=0))
        await judging.judge.judge(style_rubric(), JUDGE_INPUT, budget)

    with pytest.raises(JudgeUnavailable, match="budget"):
        asyncio.run(without_money())
    assert judging.deps.circuit.ask(judging.clock.now()) == "probing"
    endpoint.up = scoring(3)
    assert judge(judging).score == 3
    assert judging.deps.circuit.ask(judging.clock.now()) == "closed"


def test_cached_votes_are_had_while_the_endpoint_is_down() -> None:
    endpoint = Down()
    endpoint.up = scoring(3)
    judging = court(endpoint)
    judge(judging, "known")
    endpoint.up = None
    for _ in range(6):
        with pytest.raises(JudgeUnavailable):
            judge(judging, "unknown")
    assert judge(judging, "known").score == 3


def test_one_failed_vote_ends_the_others() -> None:
    async def scenario() -> None:
        waiting = 0

        class OneFails:
            trouble = ""

            async def ask(self, call: JudgeCall) -> ChatReply:
                nonlocal waiting
                if call.seed == 0:
                    await asyncio.sleep(0)
                    raise JudgeUnavailable("scripted")
                waiting += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    waiting -= 1
                raise AssertionError

        judging = court(OneFails(), params=THREE)
        with pytest.raises(JudgeUnavailable, match="scripted"):
            await judging.judge.judge(style_rubric(), JUDGE_INPUT, judging.deps.budget)
        assert waiting == 0

    asyncio.run(scenario())


def test_no_more_calls_are_under_way_than_allowed() -> None:
    async def scenario() -> int:
        endpoint = Counting()
        judging = court(endpoint, params=replace(THREE, votes=9), bounds=JudgeLimits(concurrency=2))
        await judging.judge.judge(style_rubric(), JUDGE_INPUT, judging.deps.budget)
        return endpoint.most

    assert asyncio.run(scenario()) == 2


def test_another_model_behind_the_name_is_an_alarm_and_pauses_everything_until_a_person_has_looked(
    tmp_path: Path,
) -> None:
    endpoint, pause = scoring(3), JudgePause(tmp_path / "held")
    judging = court(endpoint, vouched=["scripted-1"], pause=pause)
    judge(judging, "a")
    assert judging.alarms == []
    endpoint.identity = "scripted-2"
    for _ in range(6):
        with pytest.raises(JudgeLost, match="held after an alarm: the endpoint says that it is 'scripted-2' now; look"):
            judge(judging, "b")
    assert [alarm.kind for alarm in judging.alarms] == ["model"]
    assert (len(endpoint.calls), len(judging.deps.cache)) == (2, 1)
    assert judging.deps.circuit.ask(0.0) == "closed"
    restarted = court(scoring(3), vouched=["scripted-1"], pause=pause)
    with pytest.raises(JudgeLost, match=r"then remove .*held"):
        judge(restarted, "b")
    (tmp_path / "held").unlink()
    assert judge(restarted, "b").score == 3


def test_votes_that_were_under_way_when_the_model_changed_do_not_count(tmp_path: Path) -> None:
    endpoint = Counting()
    endpoint.identity = "scripted-2"
    judging = court(endpoint, params=THREE, vouched=["scripted-1"], pause=JudgePause(tmp_path / "held"))
    with pytest.raises(JudgeLost, match="held"):
        judge(judging)
    assert (endpoint.most, len(judging.deps.cache)) == (3, 0)


def test_verdicts_of_a_changed_model_are_never_kept() -> None:
    endpoint = scoring(3)
    judging = court(endpoint)
    judge(judging, "a")
    endpoint.identity = "scripted-2"
    assert [judge(judging, "b").score for _ in range(2)] == [3, 3]
    endpoint.identity = "scripted-1"
    judge(judging, "b")
    judge(judging, "b")
    assert (len(endpoint.calls), len(judging.deps.cache), len(judging.alarms)) == (4, 2, 1)


def test_a_pin_changes_with_everything_that_decides_a_verdict() -> None:
    base = JudgeParams(model="m")
    changes = [
        *(replace(base, model="n"), replace(base, votes=3), replace(base, temperature=0.5)),
        *(replace(base, max_tokens=99), replace(base, text_characters=300), replace(base, structured=True)),
    ]
    pins = {judge_fingerprint(style_rubric(), params) for params in (base, *changes)}
    pins.add(judge_fingerprint(style_rubric(version="2"), base))
    assert len(pins) == len(changes) + 2
    assert judge_fingerprint(style_rubric(), JudgeParams(model="m")) in pins
