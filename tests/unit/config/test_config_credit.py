"""``[credit]``: allowed combinations, and options that are refused because they would have no effect."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from etude.config.credit import CREDIT_OPTIONS, CreditKind
from etude.config.recipe import RunConfig
from etude.trainer.batching.credit import CREDITS, SHARES

SOUND: dict[CreditKind, dict[str, Any]] = {
    "rollout": {},
    "discounted": {"discount": 0.9},
    "shaped": {"shaping": 0.1, "discount": 0.9},
    "shared_prefix": {"branches": 2, "branch_within": 7},
}


def error_of(tree: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(tree)
    return str(caught.value)


def test_by_default_all_turns_have_their_rollouts_advantage() -> None:
    credit = RunConfig().credit
    assert (credit.kind, credit.branches, credit.summaries) == ("rollout", 1, "train")
    assert not credit.is_by_turn


def test_every_kind_is_in_the_tables() -> None:
    assert set(CREDITS) == set(CREDIT_OPTIONS.classes) == set(get_args(CreditKind)) - {"rollout"}


@pytest.mark.parametrize("kind", get_args(CreditKind))
def test_a_sound_kind_is_taken(kind: CreditKind) -> None:
    assert RunConfig.model_validate({"credit": {"kind": kind, "options": SOUND[kind]}}).credit.is_by_turn == (
        kind != "rollout"
    )


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ({"options": {"discount": 0.9}}, "no effect with credit.kind = 'rollout', it goes with 'discounted' or"),
        ({"options": {"branches": 2}}, "no effect with credit.kind = 'rollout', it goes with 'shared_prefix'"),
        ({"kind": "discounted", "options": {"discount": 0.9, "shaping": 0.1}}, "'credit.options.shaping'"),
        ({"kind": "discounted"}, "credit.options.discount"),
        ({"kind": "shaped"}, "credit.options.shaping"),
        ({"kind": "shared_prefix"}, "credit.options.branches"),
        (
            {"kind": "shared_prefix", "options": {"branches": 2, "branch_at": "error", "branch_within": 5}},
            "credit.options.branch_within",
        ),
        (
            {"kind": "shared_prefix", "options": {"branches": 3}},
            "credit.options.branches = 3 must divide rollouts.group_size = 8",
        ),
        ({"kind": "shared_prefix", "options": {"branches": 8}}, "be below it"),
        ({"summaries": "mask"}, "no context of harness.options.context = 'grow' is ever summarised"),
        ({"kind": "discounted", "options": {"discount": 1.0}}, "less than 1"),
    ],
)
def test_what_would_have_no_effect_is_refused(credit: dict[str, Any], message: str) -> None:
    assert message in error_of({"credit": credit})


@pytest.mark.parametrize("kind", ["discounted", "shaped", "shared_prefix"])
@pytest.mark.parametrize("loss", ["grpo", "cispo", "gspo"])
def test_losses_that_divide_by_a_deviation_know_rollouts_only(kind: CreditKind, loss: str) -> None:
    assert "mean_std" not in SHARES
    message = error_of({"credit": {"kind": kind, "options": SOUND[kind]}, "loss": {"kind": loss}})
    assert f"credit.kind = '{kind}' does not go with loss.baseline = 'mean_std' (loss.kind = '{loss}')" in message


@pytest.mark.parametrize("kind", ["shaped", "shared_prefix"])
def test_programs_of_other_people_have_no_turns_to_tell_apart(kind: CreditKind) -> None:
    options = {"command": ("agent", "{prompt}", "{temperature}"), "timeout_s": 10.0}
    message = error_of(
        {"credit": {"kind": kind, "options": SOUND[kind]}, "harness": {"kind": "command", "options": options}}
    )
    assert f"credit.kind = '{kind}' needs the built-in harness" in message
