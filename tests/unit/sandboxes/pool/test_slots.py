"""What makes sandboxes alike, which bounds make sense, and that no slot is used twice."""

import math
from pathlib import Path

import pytest

from etude.sandbox_spec import Image, SandboxLimits, SandboxSpec
from etude.sandboxes.pool.slots import SLOT_MOVES, Key, PoolLimits, Slots, SlotState


def test_a_key_is_what_makes_a_difference_inside() -> None:
    spec = SandboxSpec(environment={"A": "1", "B": "2"}, mounts={"/m": Path("/x")})
    same = SandboxSpec(environment={"B": "2", "A": "1"}, mounts={"/m": Path("/x")})
    others = [
        SandboxSpec(),
        SandboxSpec(user="root"),
        SandboxSpec(ttl_s=1.0),
        SandboxSpec(allow=("a:1",)),
        SandboxSpec(image=Image(layers=(Path("/l"),))),
        SandboxSpec(limits=SandboxLimits(processes=3)),
        SandboxSpec(mounts={"/m": Path("/y")}),
    ]
    assert Key.of(spec) == Key.of(same)
    assert len({Key.of(one) for one in (spec, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "fields",
    [
        {"live": 0},
        {"reserved": 256},
        {"starting": 0},
        {"wait_s": 0.0},
        {"linger_s": math.inf},
        {"reserve_bytes": -1},
        {"tries": 0},
    ],
)
def test_bounds_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        PoolLimits(**fields)  # type: ignore[arg-type]  # what is wrong differs


def test_no_used_slot_is_given_to_anybody() -> None:
    assert SlotState.WARM not in SLOT_MOVES[SlotState.LEASED] | SLOT_MOVES[SlotState.DRAINING]
    slots = Slots(PoolLimits())
    slot = slots.add(Key.of(SandboxSpec()), 0.0, urgent=False)
    slots.move(slot, SlotState.WARM, 0.0)
    slots.lend(slot, 0.0, urgent=False)
    with pytest.raises(AssertionError, match="from leased to warm"):
        slots.move(slot, SlotState.WARM, 0.0)
