"""Forked sessions: the shared turns are replayed exactly, and only then come new ones."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from etude.errors import SessionLost
from etude.gateway.capture.sessions import SessionLimits, SessionStore
from etude.gateway.routing.admission import TrafficClass
from etude.types import Json, Turn
from gateways import (
    ADMIN_KEY,
    OTHER_KEY,
    PRODUCT_KEY,
    QUESTION,
    Answer,
    Caller,
    Setting,
    fake_engine,
    gateway,
    template,
)

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def text(answer: Answer) -> Json:
    return answer.at("choices", 0, "message", "content")


def same(one: Turn, other: Turn) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("prompt_ids", "completion_ids", "logprobs", "versions")
    )


async def fork(caller: Caller, session_id: str, key: str = ADMIN_KEY) -> Answer:
    return await caller.send("POST", "/sessions", key, {"fork_of": session_id})


async def go_on(caller: Caller, key: str, history: list[Json], calls: int) -> list[Json]:
    """The replies of ``calls`` calls; appends to ``history``."""
    output = []
    for _ in range(calls):
        answer = await caller.chat(key, list(history), request_id=f"{len(history)}")
        assert answer.status == 200, answer.raw
        output.append(text(answer))
        history += [{"role": "assistant", "content": output[-1]}, {"role": "user", "content": "on"}]
    return output


def test_a_fork_says_the_same_again_and_then_goes_its_own_way() -> None:
    async def main() -> None:
        async with gateway(Setting(engine=fake_engine(), max_length=400)) as caller:
            parent_id, parent_key = await caller.open_session()
            parent: list[Json] = [*QUESTION]
            output = await go_on(caller, parent_key, parent, 2)
            answer = await fork(caller, parent_id)
            assert (answer.status, answer.at("turns")) == (200, 2)
            branch_id, branch_key = str(answer.at("session_id")), str(answer.at("api_key"))
            branch: list[Json] = [*QUESTION]
            again = await go_on(caller, branch_key, branch, 2)
            assert again == output
            await go_on(caller, branch_key, branch, 2)
            await go_on(caller, parent_key, parent, 1)
            ours, theirs = await caller.close(parent_id), await caller.close(branch_id)
            assert (len(ours), len(theirs)) == (3, 4)
            assert all(map(same, ours[:2], theirs[:2]))
            assert not same(ours[2], theirs[2])
            assert np.array_equal(ours[2].prompt_ids, theirs[2].prompt_ids)
            continued = np.concatenate([theirs[1].prompt_ids, theirs[1].completion_ids])
            assert np.array_equal(theirs[2].prompt_ids[: len(continued)], continued)

    run(main())


def test_an_answer_that_got_lost_comes_again_in_a_fork_too() -> None:
    async def main() -> None:
        async with gateway(Setting(engine=fake_engine(), max_length=400)) as caller:
            parent_id, parent_key = await caller.open_session()
            output = await go_on(caller, parent_key, [*QUESTION], 2)
            answer = await fork(caller, parent_id)
            branch_key = str(answer.at("api_key"))
            first = [await caller.chat(branch_key, QUESTION, request_id="r") for _ in range(3)]
            assert [text(one) for one in first] == output[:1] * 3
            assert len(await caller.close(str(answer.at("session_id")))) == 2

    run(main())


def test_a_fork_that_is_asked_something_else_refuses() -> None:
    async def main() -> None:
        async with gateway(Setting(engine=fake_engine(), max_length=400)) as caller:
            parent_id, parent_key = await caller.open_session()
            await go_on(caller, parent_key, [*QUESTION], 1)
            answer = await fork(caller, parent_id)
            refused = await caller.chat(str(answer.at("api_key")), [{"role": "user", "content": "else"}])
            assert refused.error[::2] == (409, "another_call")
            assert len(await caller.close(str(answer.at("session_id")))) == 1

    run(main())


def test_a_fork_of_a_fork_begins_with_all_that_was_said() -> None:
    async def main() -> None:
        async with gateway(Setting(engine=fake_engine(), max_length=400)) as caller:
            parent_id, parent_key = await caller.open_session()
            await go_on(caller, parent_key, [*QUESTION], 1)
            child = await fork(caller, parent_id)
            output = await go_on(caller, str(child.at("api_key")), [*QUESTION], 2)
            grandchild = await fork(caller, str(child.at("session_id")))
            assert grandchild.at("turns") == 2
            assert await go_on(caller, str(grandchild.at("api_key")), [*QUESTION], 2) == output

    run(main())


@pytest.mark.parametrize(("key", "status"), [(ADMIN_KEY, 404), (PRODUCT_KEY, 404), (OTHER_KEY, 404)])
def test_a_session_that_is_closed_or_of_another_key_cannot_be_forked(key: str, status: int) -> None:
    async def main() -> None:
        async with gateway(Setting(engine=fake_engine())) as caller:
            session_id, _ = await caller.open_session()
            fork_request = "nothing" if key == ADMIN_KEY else session_id
            assert (await fork(caller, fork_request, key)).status == status

    run(main())


def test_sessions_count_forks_and_keep_them_apart() -> None:
    sessions = SessionStore(template(), SessionLimits(max_rollouts=2, idle_s=10))
    assert sessions.open("trunk", "owner", TrafficClass.ROLLOUT, 0.0) is not None
    forked = sessions.fork("branch", "trunk", 5.0)
    assert forked is not None
    assert (forked.session_id, sessions.owner("branch"), len(sessions)) == ("branch", "owner", 2)
    assert sessions.fork("another", "trunk", 5.0) is None
    with pytest.raises(ValueError, match="'branch' is open already"):
        sessions.fork("branch", "trunk", 5.0)
    with pytest.raises(SessionLost, match="no session 'gone' is open"):
        sessions.fork("another", "gone", 5.0)
    sessions.close("trunk", 5.0)
    assert not forked.closed
