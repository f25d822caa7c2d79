"""What the trainer makes of payloads before it trusts them."""

from pathlib import Path

import numpy as np
import pytest

from etude.errors import DamagedError
from etude.ledger.payloads import Payloads
from etude.run.trainer import fetch_payloads, payload_refs
from etude.types import (
    Finish,
    Group,
    Rollout,
    RolloutStatus,
    Routes,
    RouteSpace,
    Turn,
)
from records import TASK

SPACE = RouteSpace(layers=1, slots=2, experts=4)
GOOD = np.tile(np.array([[1, 3]], np.uint16), (3, 1, 1))


def make_group(*turns: Turn) -> Group:
    rollout = Rollout(
        rollout_id="r7", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=turns
    )
    return Group(index=0, task=TASK, admitted_version=0, rollouts=(rollout,))


def make_turn(routes: Routes | None) -> Turn:
    ids = np.array([1, 2], np.int32)
    return Turn(
        prompt_ids=ids,
        completion_ids=ids,
        logprobs=-ids.astype(np.float32),
        versions=ids,
        finish=Finish.STOP,
        routes=routes,
    )


def test_payloads_come_back_into_memory_and_can_be_dropped(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    group = make_group(payloads.stow(make_turn(GOOD), "s"), make_turn(None))
    refs = payload_refs([group])
    assert len(refs) == 1
    (fetched,) = fetch_payloads([group], payloads, None)
    first, second = fetched.rollouts[0].turns
    assert first.routes is not None
    assert np.array_equal(first.routes, GOOD)
    assert second.routes is None
    payloads.drop(refs)
    with pytest.raises(DamagedError, match=refs[0].digest):
        fetch_payloads([group], payloads, None)


def test_routes_that_do_not_fit_the_model_are_refused_once_more(tmp_path: Path) -> None:
    payloads = Payloads(tmp_path)
    fine = payloads.stow(make_turn(GOOD), "s")
    fetch_payloads([make_group(fine)], payloads, SPACE)
    wrong = payloads.stow(make_turn(GOOD + np.uint16(1)), "s")
    with pytest.raises(DamagedError, match=r"rollout r7, turn 2 cannot be replayed: .* beyond the 4 there are"):
        fetch_payloads([make_group(fine, wrong)], payloads, SPACE)
    with pytest.raises(DamagedError, match="rollout r7, turn 1 has no routes to replay"):
        fetch_payloads([make_group(make_turn(None))], payloads, SPACE)
