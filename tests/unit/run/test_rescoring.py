"""Scoring again measures an engine's error, and reports where it cannot."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from etude.config.loading import default_recipe
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.invariant import InvariantArithmetic
from etude.models.spec import TINY
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.rescoring import Rescoring
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.types import Finish, Floats, Rollout, RolloutStatus, Turn

torch.set_num_threads(1)


def make_model(version: int) -> Decoder:
    model = Decoder(TINY, InvariantArithmetic())
    model.initialise(version, std=0.2)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that has published versions 0 and 1."""
    config = default_recipe(["engine.device=cpu", "trainer.device=cpu"])
    made = RunFolder.create(tmp_path_factory.mktemp("rescoring") / "run", config)
    save_checkpoint(made.model, TINY, state_of(make_model(0)), end_id=1, pad_id=0)
    with (
        EventLog(made.events, "test") as events,
        WeightPublishing(open_log(made), config.name, events) as publishing,
    ):
        for version in (0, 1):
            publishing.start(published_state(make_model(version), config.numerics), version)
            publishing.land()
    return made


def make_turn(prompt: list[int], text_of: list[int], version: int, off_by: float = 0.0) -> Turn:
    """A turn as an engine with the weights of ``version`` records it, with logprobs that are ``off_by`` too low."""
    model, ids = make_model(version), torch.tensor([*prompt, *text_of])
    with torch.no_grad():
        rows = model.logits(model.forward_packed(ids)[len(prompt) - 1 : -1]).log_softmax(-1)
    logprobs: Floats = rows[range(len(text_of)), text_of].numpy() - np.float32(off_by)
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(text_of, np.int32),
        logprobs=logprobs,
        versions=np.full(len(text_of), version, np.int32),
        finish=Finish.STOP,
    )


def rollout_of(*turns: Turn) -> Rollout:
    return Rollout(
        rollout_id="r", group_index=0, slot=0, attempt=0, status=RolloutStatus.GRADED, reward=1.0, turns=turns
    )


def test_every_turn_is_scored_under_the_version_that_sampled_it(folder: RunFolder) -> None:
    turns = (
        make_turn([1, 2, 3], [4, 5], 0),
        make_turn([1, 2, 3, 4, 5, 6], [7], 1),
        make_turn([9, 8], [7, 6, 5], 1, off_by=0.25),
    )
    differences, reasons = Rescoring(folder, folder.config()).differences(rollout_of(*turns))
    assert reasons == []
    assert [len(differences_C) for differences_C in differences] == [2, 1, 3]
    np.testing.assert_allclose(np.concatenate(differences), [0, 0, 0, 0.25, 0.25, 0.25], atol=1e-5)


def test_what_cannot_be_scored_is_named(folder: RunFolder) -> None:
    mixed = make_turn([1, 2, 3], [4, 5], 0)
    mixed = replace(mixed, versions=np.array([0, 1], np.int32))
    gone = replace(make_turn([9, 8], [7], 0), versions=np.array([7], np.int32))
    differences, reasons = Rescoring(folder, folder.config()).differences(rollout_of(mixed, gone))
    assert np.isnan(np.concatenate(differences)).all()
    assert len(reasons) == 2
    assert "no mismatch for tokens of v7" in reasons[0]
    assert "several weight versions" in reasons[1]
