"""The trainer checks payloads before it trusts them, and handles steps without a rollout that it can trust."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ledgers
from etude.config.loading import default_recipe
from etude.config.training import DualClippedOptions, LossConfig
from etude.errors import DamagedError, UserError
from etude.ledger.changes import LOAD
from etude.ledger.ledger import TRAIN, Ledger, Loads
from etude.ledger.payloads import Payloads
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.objects import ObjectStore
from etude.run.folder import RunFolder, start_from
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.step_commits import payload_refs, sweep_payloads
from etude.run.store_outages import StoreOutages
from etude.run.stores import open_feedback
from etude.run.trainer import (
    MAX_EMPTY_STEPS,
    TrainerProcess,
    fetch_payloads,
    group_metrics,
    run_trainer,
    scored,
    selection_distance,
)
from etude.run.weight_log import open_log
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventLog, EventReader
from etude.trainer.batching.batch import build_batch
from etude.trainer.checkpoint import Checkpoints
from etude.types import (
    Disposition,
    Finish,
    Group,
    Json,
    Rollout,
    RolloutStatus,
    Routes,
    RouteSpace,
    Turn,
    Verdict,
)
from etude.weights.records import commit_key, pack_key
from etude.weights.retention import collect
from live_sessions import answer, live_session
from records import TASK, make_rollout
from records import make_turn as turn_of

torch.set_num_threads(1)

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
    payloads = Payloads(ObjectStore(str(tmp_path)))
    group = make_group(payloads.store(make_turn(GOOD), "s"), make_turn(None))
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
    payloads = Payloads(ObjectStore(str(tmp_path)))
    fine = payloads.store(make_turn(GOOD), "s")
    fetch_payloads([make_group(fine)], payloads, SPACE)
    wrong = payloads.store(make_turn(GOOD + np.uint16(1)), "s")
    with pytest.raises(DamagedError, match=r"rollout r7, turn 2 cannot be replayed: .* beyond the 4 there are"):
        fetch_payloads([make_group(fine, wrong)], payloads, SPACE)
    with pytest.raises(DamagedError, match="rollout r7, turn 1 has no routes to replay"):
        fetch_payloads([make_group(make_turn(None))], payloads, SPACE)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of batches of one group, two rollouts each, that has published version 0."""
    batches = ("rollouts.groups_per_step=1", "rollouts.group_size=2", "rollouts.concurrency=4")
    trainer = ("trainer.device=cpu", "trainer.mismatch_share=0", f"trainer.steps={MAX_EMPTY_STEPS + 2}")
    config = default_recipe([*batches, *trainer, "engine.device=cpu", "numerics.replay=off"])
    folder = RunFolder.create(tmp_path / "run", config)
    model = Decoder(TINY)
    model.initialise(0, std=0.2)
    save_checkpoint(folder.model, TINY, state_of(model), end_id=1, pad_id=0)
    log = open_log(folder)
    with EventLog(folder.events, "test") as events, WeightPublishing(log, config.name, events) as publishing:
        publishing.start(published_state(model, config.numerics), 0)
        publishing.land()
    return folder


def admit(folder: RunFolder, number: int, verdict: Verdict | None = None) -> None:
    """A group of two rollouts, one of which got it right."""
    with Ledger.open(folder.ledger) as ledger:
        index = ledger.admit_group(replace(TASK, task_id=f"t{number}"), TRAIN, 2, 0)
        assert index is not None
        for slot, reward in enumerate((0.0, 1.0)):
            turns = turn_of([1, 2], [3, 4 + slot])
            name = f"{number}.{slot}"
            ledger.record(
                make_rollout(name, turns, group=index, slot=slot, reward=0.0 if verdict else reward, verdict=verdict),
                TRAIN,
            )


def test_steps_without_a_rollout_to_trust_are_done_and_then_training_stops_and_can_go_on(run: RunFolder) -> None:
    masked = Verdict(disposition=Disposition.QUARANTINE, reason="no judge.style", flags=(), hacked=False, graded=0.0)
    for number in range(MAX_EMPTY_STEPS):
        admit(run, number, masked)
    with pytest.raises(UserError, match=f"step {MAX_EMPTY_STEPS}: every rollout was masked or quarantined"):
        run_trainer(run)
    for number in range(MAX_EMPTY_STEPS, MAX_EMPTY_STEPS + 2):
        admit(run, number)
    run_trainer(run)
    with Ledger.open(run.ledger) as ledger:
        assert ledger.progress().steps_done == MAX_EMPTY_STEPS + 2
    done = [logged.event for logged in EventReader(run.events).new() if isinstance(logged.event, StepDone)]
    assert [event.step for event in done] == list(range(1, MAX_EMPTY_STEPS + 3))
    assert [event.metrics["loss_tokens"] for event in done] == [0] * MAX_EMPTY_STEPS + [4, 4]
    assert [event.metrics["reward_mean"] for event in done] == [0.0] * MAX_EMPTY_STEPS + [0.5, 0.5]


def test_a_batch_is_scored_by_whom_the_loss_asks_for(run: RunFolder) -> None:
    """Both by version 0: the weights that sampled, and the reference."""
    admit(run, 0)
    config = run.config()
    loss = LossConfig(kind="grpo", options=DualClippedOptions(old_policy="recomputed"), kl_coef=0.1)
    question = RunFolder.create(run.path.with_name("asked"), config.model_copy(update={"loss": loss}))
    start_from(run, question)
    model, ids = Decoder(TINY), [1, 2, 3, 4]
    model.initialise(0, std=0.2)
    with torch.no_grad():
        expected = model.logits(model.forward_packed(torch.tensor(ids)))[1:3].log_softmax(-1)[[0, 1], ids[2:]].numpy()
    with Ledger.open(run.ledger) as ledger, EventLog(question.events, "test") as events:
        groups = ledger.claim_batch(1, 1)
        assert groups is not None
        batch = build_batch(1, groups)
        for folder, rows in ((question, [expected, expected]), (run, [None, None])):
            process = TrainerProcess(folder, events, ledger, None, StoreOutages(folder.store, 0.0))
            first = scored(batch, folder.config(), process._probe, process._reference)[0]
            for result, row in zip((first.old_logprobs, first.reference_logprobs), rows, strict=True):
                if row is None:
                    assert result is None
                else:
                    assert result is not None
                    np.testing.assert_allclose(result, [0, 0, *row], atol=2e-2)  # published in bfloat16


def train_until(run: RunFolder, step: int) -> None:
    """Run the trainer as if ``step`` were the recipe's last one."""
    recipe = run.config_file.read_text(encoding="utf-8")
    last = f"steps = {run.config().trainer.steps}\n"
    assert recipe.count(last) == 1
    run.config_file.write_text(recipe.replace(last, f"steps = {step}\n"), encoding="utf-8")
    run_trainer(run)
    run.config_file.write_text(recipe, encoding="utf-8")


def test_a_trainer_goes_on_from_its_checkpoint_when_version_0_is_no_longer_kept(run: RunFolder) -> None:
    for number in range(5):
        admit(run, number)
    log = open_log(run)
    log.request_full()  # so that version 1 is whole, and nothing below it is needed
    train_until(run, 3)
    collect(log, keep=0, grace_s=0, lease_s=0)
    assert log.versions() == [1, 2, 3]
    run_trainer(run)
    assert log.versions() == [1, 2, 3, 4, 5]


def test_a_trainer_that_cannot_read_recent_versions_measures_less_and_goes_on(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        admit(run, number)
    train_until(run, 3)
    log = open_log(run)
    record = log.read(2)
    assert record is not None
    (Path(run.store) / pack_key(record.packs[0].digest)).unlink()
    run_trainer(run)
    assert "the mismatch of weight version 2 is not measured: " in caplog.text
    assert (whole := log.read(4)) is not None
    assert whole.base is None, "what cannot be read back is published whole"


def test_payloads_that_nothing_will_be_learnt_from_go_when_they_are_old(run: RunFolder) -> None:
    payloads = Payloads(ObjectStore(run.payloads))
    of_no_one, of_a_group = (payloads.store(make_turn(GOOD), name) for name in ("evaluation", "rollout"))
    for number in range(6):
        admit(run, number)
    with Ledger.open(run.ledger) as ledger:
        assert ledger.admit_group(replace(TASK, task_id="open"), TRAIN, 2, 0) == 6
        ledger.record(make_rollout("open.0", of_a_group, group=6), TRAIN)
    for file in Path(run.payloads).glob("*/*"):
        os.utime(file, (0, 0))
    run_trainer(run)
    assert of_a_group.payload is not None
    assert of_no_one.payload is not None
    assert [file.stem for file in Path(run.payloads).glob("*/*")] == [of_a_group.payload.digest]


def test_payloads_of_live_sessions_that_are_not_taken_yet_stay(run: RunFolder) -> None:
    lines = run.config_file.read_text(encoding="utf-8")
    run.config_file.write_text(lines.replace("window_s = 0.0", "window_s = 60.0"), encoding="utf-8")
    payloads, session = Payloads(ObjectStore(run.payloads)), live_session("s")
    turn = payloads.store(make_turn(GOOD), "live")
    with open_feedback(run) as feedback:
        feedback.keep(replace(answer(session), turns=(turn,)), "gateway", 1.0)
    for file in Path(run.payloads).glob("*/*"):
        os.utime(file, (0, 0))
    sweep_payloads(run, 0)
    assert payloads.fetch([turn])[0].routes is not None
    with open_feedback(run) as feedback:
        feedback.end(["s"], 2.0)
        assert feedback.close_windows(100.0, 10) == 1
        feedback.taken({"s": "dropped"}, {}, 100.0)
    sweep_payloads(run, 0)
    assert not list(Path(run.payloads).glob("*/*"))


def test_a_newest_version_that_no_one_will_publish_again_ends_the_run(run: RunFolder) -> None:
    for number in range(MAX_EMPTY_STEPS + 2):
        admit(run, number)
    run_trainer(run)
    open_log(run).store.delete(commit_key(MAX_EMPTY_STEPS + 2))
    with pytest.raises(UserError, match=f"weight version {MAX_EMPTY_STEPS + 2} is not published"):
        run_trainer(run)


class Killed(Exception):
    """Stands for ``kill -9``: nothing that comes after it happens."""


class DyingLoads(Loads):
    """Dies after writing."""

    def claim(self, step: int) -> dict[str, Json] | None:
        if super().claim(step) is not None:
            raise Killed
        return None


class DyingLedger(Ledger):
    """Dies before it commits a step that loads."""

    def commit_step(self, step: int) -> None:
        if self.loads.claim(step) is not None:
            raise Killed
        super().commit_step(step)


@pytest.mark.parametrize("dies_at", ["claimed", "published", ""])
def test_a_step_that_loads_released_weights_trains_on_nothing_and_survives_a_kill(run: RunFolder, dies_at: str) -> None:
    for number in range(4):
        admit(run, number)
    train_until(run, 2)
    with Ledger.open(run.ledger) as ledger:
        ledger.facts.set(LOAD, json.dumps({"id": "a", "version": 1}))
    kind = DyingLedger if dies_at == "published" else Ledger
    with kind.open(run.ledger) as ledger, EventLog(run.events, "test") as events:
        if dies_at == "claimed":
            ledger.loads = DyingLoads(ledger._db)
        process = TrainerProcess(run, events, ledger, None, StoreOutages(run.store, 0.0))
        with contextlib.suppress(Killed), process.publishing, process.copies, process.trainer_group:
            process.run()
            assert not dies_at
    run_trainer(run)
    log = open_log(run)
    digests = {version: record.digest for version in range(6) if (record := log.read(version)) is not None}
    assert len(digests) == 6
    assert digests[3] == digests[1] != digests[2]
    assert len(set(digests.values())) == 5, "the others were trained"
    with Ledger.open(run.ledger) as ledger:
        assert (ledger.progress().consumed, ledger.progress().steps_done) == (4, 5)
    moments = [name for name in Checkpoints(run.checkpoints).load(4) if name.startswith("optimiser/")]
    assert moments


class DyingCommit(Ledger):
    """Dies before it commits a step."""

    dies_at = 0

    def commit_step(self, step: int) -> None:
        if step == self.dies_at:
            raise Killed
        super().commit_step(step)


def checkpointed(run: RunFolder, path: Path, every: int) -> RunFolder:
    """A run like ``run`` from its version 0, with six batches and a checkpoint every ``every`` steps."""
    trainer = run.config().trainer.model_copy(update={"checkpoint_steps": every, "steps": 6})
    loss = LossConfig(kind="grpo", options=DualClippedOptions(old_policy="recomputed"))
    rollouts = run.config().rollouts.model_copy(update={"max_staleness": 6})  # all of version 0
    changes = {"trainer": trainer, "loss": loss, "rollouts": rollouts}
    folder = RunFolder.create(path, run.config().model_copy(update=changes))
    start_from(run, folder)
    for number in range(6):
        admit(folder, number)
    return folder


def digests(run: RunFolder) -> list[str]:
    log = open_log(run)
    return [record.digest for version in log.versions() if (record := log.read(version)) is not None]


def train_and_die(run: RunFolder, step: int) -> None:
    """Train until a step is published and not committed."""
    with DyingCommit.open(run.ledger) as ledger, EventLog(run.events, "test") as events:
        ledger.dies_at = step
        process = TrainerProcess(run, events, ledger, None, StoreOutages(run.store, 0.0))
        with pytest.raises(Killed), process.publishing, process.copies, process.trainer_group:
            process.run()


def test_steps_between_checkpoints_are_done_again_to_the_same_bits(run: RunFolder, tmp_path: Path) -> None:
    undisturbed, killed = checkpointed(run, tmp_path / "a", 1), checkpointed(run, tmp_path / "b", 3)
    run_trainer(undisturbed)
    for step, saved in ((2, []), (3, [3]), (5, [3]), (6, [3, 6])):
        train_and_die(killed, step)
        assert Checkpoints(killed.checkpoints).steps() == saved
    run_trainer(killed)
    assert len(digests(killed)) == 7
    assert digests(killed) == digests(undisturbed)
    last, same = (Checkpoints(folder.checkpoints).load(6) for folder in (undisturbed, killed))
    assert last.keys() == same.keys()
    assert all(torch.equal(tensor, same[name]) for name, tensor in last.items()), "moments, too"
    with Ledger.open(killed.ledger) as ledger:
        assert (ledger.progress().consumed, ledger.progress().steps_done) == (6, 6)


def test_a_step_that_ends_in_other_bits_when_it_is_done_again_is_named(run: RunFolder, tmp_path: Path) -> None:
    folder = checkpointed(run, tmp_path / "a", 3)
    train_and_die(folder, 6)
    recipe = folder.config_file.read_text(encoding="utf-8")
    shutil.rmtree(folder.checkpoints / "step-00000006")
    assert recipe.count("learning_rate = 0.0005") == 1
    folder.config_file.write_text(recipe.replace("learning_rate = 0.0005", "learning_rate = 0.0006"), encoding="utf-8")
    with pytest.raises(DamagedError, match=r"^step 4, repeated from a checkpoint, ended in the weights"):
        run_trainer(folder)


def test_payloads_stay_until_their_step_need_not_be_done_again(run: RunFolder, tmp_path: Path) -> None:
    folder = checkpointed(run, tmp_path / "a", 3)
    payloads = Payloads(ObjectStore(folder.payloads))
    with Ledger.open(folder.ledger) as ledger:
        assert ledger.admit_group(replace(TASK, task_id="routed"), TRAIN, 2, 0) == 6
        for slot in range(2):
            turn = payloads.store(make_turn(GOOD), f"routed.{slot}")
            ledger.record(make_rollout(f"routed.{slot}", turn, group=6, slot=slot, reward=float(slot)), TRAIN)
        for step in range(1, 8):
            assert ledger.claim_batch(step, 1)
            ledger.commit_step(step)
    for file in Path(folder.payloads).glob("*/*"):
        os.utime(file, (0, 0))
    sweep_payloads(folder, 6)
    assert list(Path(folder.payloads).glob("*/*"))
    sweep_payloads(folder, 7)
    assert not list(Path(folder.payloads).glob("*/*"))


def test_the_spread_of_a_group_and_its_rollouts_that_were_cut_are_measured() -> None:
    rewards = [(0.0, 1.0), (0.5, 0.5)]
    groups = [
        Group(
            index=index,
            task=TASK,
            admitted_version=0,
            rollouts=tuple(ledgers.rollout(index, slot, reward=reward) for slot, reward in enumerate(of_group)),
        )
        for index, of_group in enumerate(rewards)
    ]
    assert group_metrics(groups, {"length": 3, "submit": 1}) == {"reward_std": 0.25, "cut_short": 0.75}
    assert group_metrics([], {}) == {}


def test_the_distance_of_draws_counts_tasks_that_are_never_drawn() -> None:
    """Four tasks, drawn with chances ½, ¼, ¼ and 0: a quarter of the draws would have to be others."""
    chances = [0.5, 0.25, 0.25, 0.0]
    drawn = [
        selection_distance([Group(index=0, task=TASK, admitted_version=0, rollouts=(), weight=1 / (4 * chance))])
        for chance in chances[:3]
    ]
    expected = sum(chance * distance for chance, distance in zip(chances, drawn, strict=False))
    assert expected == pytest.approx(0.5 * sum(abs(chance - 1 / 4) for chance in chances))
    assert selection_distance([]) == 0


def test_a_quarantined_rollout_has_no_part_in_the_spread_of_its_group() -> None:
    cheated = Verdict(disposition=Disposition.QUARANTINE, reason="test", flags=(), hacked=True, graded=1.0)
    rollouts = [ledgers.rollout(0, slot, reward=reward) for slot, reward in enumerate((1.0, 1.0, 0.0))]
    rollouts[2] = replace(rollouts[2], verdict=cheated)
    group = Group(index=0, task=TASK, admitted_version=0, rollouts=tuple(rollouts))
    assert group_metrics([group], {}) == {"reward_std": 0.0}
