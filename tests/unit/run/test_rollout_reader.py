"""The view of a rollout agrees with the trainer's use of it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config.loading import default_recipe
from etude.dashboard.rollouts import to_json
from etude.errors import UserError
from etude.ledger.archive import Archive
from etude.ledger.ledger import TRAIN, Ledger, TaskDraw
from etude.rewards.shaping.effort import effort_penalty
from etude.run.folder import RunFolder
from etude.run.rollout_reader import RolloutReader
from etude.tokens.chat import ChatTemplate
from etude.trainer.batching.batch import build_batch, shuffle_rewards
from etude.types import (
    AnswerChecks,
    Branch,
    Disposition,
    Finish,
    Hint,
    Observation,
    ObservedSession,
    Rollout,
    RolloutStatus,
    Split,
    Task,
    Turn,
    TurnKind,
    Verdict,
)

TASK = Task(
    task_id="t1", family="lookup", template="sum", split=Split.TRAIN, prompt="add tax and fee", files={},
    checks=AnswerChecks(answer="49", facts=("tax 42", "fee 7", "rate 3", "tax 4")),
)  # fmt: skip
SUMMARISES = (
    "harness.options.context=summary",
    "harness.options.summary_at_tokens=100",
    "harness.options.max_tokens_per_summary=20",
)
SUSPECT = Verdict(disposition=Disposition.QUARANTINE, reason="spy", flags=("spy",), hacked=True, graded=1.0)


class Scribe:
    """Writes conversations in the tokens of a run."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat

    def turn(self, before: Turn | None, heard: str, text_of: str, **fields: Any) -> Turn:
        """A turn that continues ``before``, or begins a conversation."""
        context = [] if before is None else [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
        said_ids = self._chat.encode(text_of)
        seen: dict[str, Any] = {"versions": np.full(len(said_ids), 3, np.int32), "finish": Finish.STOP}
        return Turn(
            prompt_ids=np.array(context + self._chat.encode(heard), np.int32),
            completion_ids=np.array(said_ids, np.int32),
            logprobs=np.full(len(said_ids), -0.5, np.float32),
            **(seen | fields),
        )

    def summarised(self) -> tuple[Turn, ...]:
        """Two acts, a summary of them, and an answer from it."""
        first = self.turn(None, "add tax and fee", "read a")
        second = self.turn(first, "tax 42", "read b")
        question = self.turn(second, "fee 7 summarise", "so far so good\nsummary\ntax 42", kind=TurnKind.SUMMARY)
        return first, second, question, self.turn(None, "add tax and fee\nsummary 1\ntax 42", "answer 42")


def ended(slot: int, reward: float | None, *turns: Turn, **fields: Any) -> Rollout:
    return Rollout(
        rollout_id=f"r{slot}.{fields.get('attempt', 0)}",
        group_index=0,
        slot=slot,
        status=RolloutStatus.FAILED_INFRA if reward is None else RolloutStatus.GRADED,
        reward=reward,
        turns=turns,
        **({"attempt": 0} | fields),
    )


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate.train(["add tax and fee, read summary answer"], 300)


@pytest.fixture
def scribe(chat: ChatTemplate) -> Scribe:
    return Scribe(chat)


def reader_of(
    path: Path,
    chat: ChatTemplate,
    rollouts: Sequence[Rollout],
    *settings: str,
    size: int | None = None,
    lose: int | None = None,
    purpose: str = TRAIN,
    task: Task = TASK,
    tokens: bool = False,
    weight: float | None = None,
) -> Iterator[RolloutReader]:
    folder = RunFolder.create(path, default_recipe(settings))
    chat.save(folder.model)
    task = task if purpose == TRAIN else replace(task, split=Split.HELDOUT)
    with Ledger.open(folder.ledger) as ledger:
        if weight is None:
            ledger.admit_group(task, purpose, size or len(rollouts), 3)
        else:
            draw = TaskDraw(task=task, epoch=1, weight=weight)
            ledger.admit_next(lambda _: draw, size=size or len(rollouts), version=3, kept_below=1)
        for rollout in rollouts:
            ledger.record(rollout, purpose)
        slots = range(len(rollouts), size or 0)
        for slot in slots if lose is None else slots[:lose]:
            ledger.lose_slot(purpose, 0, slot, "infra")
    with Archive.open(folder.ledger) as archive:
        yield RolloutReader(folder, archive, tokens=tokens)


def test_a_rollout_is_told_in_words_and_figures(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    message = ended(
        0, 1.0, *scribe.summarised(), reason="submit", counts={"read": 2}, reward_parts={"tests": 1.0},
        turn_rewards=(0.0, 0.5, 0.0, -1.0), hints=(Hint(turn=1, text="mind the fee", source="rule"),), seconds=2.5,
        branch=Branch(rollout_id="r9", turns=1),
    )  # fmt: skip
    settings = ("credit.kind=shared_prefix", "credit.options.branches=2", "sandboxes.kind=ns")
    for reader in reader_of(tmp_path / "run", chat, [message, ended(1, 0.0, *scribe.summarised())], *settings):
        read = reader.rollout("r0")
        assert (read.reward, read.reason, read.seconds, read.branch_of, read.branch_turns) == (
            1.0,
            "submit",
            2.5,
            "r9",
            1,
        )
        assert [turn.heard for turn in read.turns] == [
            "add tax and fee", "tax 42", "fee 7 summarise", "add tax and fee\nsummary 1\ntax 42",
        ]  # fmt: skip
        assert [turn.continues for turn in read.turns] == [None, 0, 1, None]
        assert [turn.reward for turn in read.turns] == [0.0, 0.5, 0.0, -1.0]
        assert [turn.hint and turn.hint.text for turn in read.turns] == [None, "mind the fee", None, None]
        assert sum(turn.new_tokens for turn in read.turns) == sum(len(chat.encode(turn.heard)) for turn in read.turns)
        assert read.turns[1].versions == {3: read.turns[1].sampled_tokens}


def test_calls_are_told_with_what_they_changed(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    first = scribe.turn(None, "fix f", "edit f.py 1\nnew")
    second = scribe.turn(
        first, "ok", '<tool_call>{"name": "write", "arguments": {"path": "g", "lines": [1]}}</tool_call> so'
    )
    third = scribe.turn(second, "nothing", "no call at all")
    task = replace(TASK, files={"f.py": "old\nrest\n"})
    for reader in reader_of(tmp_path / "run", chat, [ended(0, 1.0, first, second, third)], task=task):
        read = reader.rollout("r0")
        edit, write = read.turns[0].calls[0], read.turns[1].calls[0]
        assert (edit.tool, edit.arguments) == ("edit", {"path": "f.py", "line": "1", "text": "new"})
        assert [(line.mark, line.text) for line in edit.diff] == [("-", "old"), ("+", "new"), (" ", "rest")]
        assert (write.tool, write.arguments, write.diff) == ("write", {"path": "g", "lines": "[1]"}, ())
        assert read.turns[1].content.strip() == "so"
        assert (read.turns[2].calls, read.turns[2].content) == ((), "no call at all")
        assert [(file.path, file.diff) for file in read.files] == [("f.py", edit.diff)]


def test_tokens_are_told_with_advantage_and_loss_without_a_model(
    tmp_path: Path, chat: ChatTemplate, scribe: Scribe
) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    for reader in reader_of(tmp_path / "run", chat, rollouts, "credit.summaries=mask", *SUMMARISES, tokens=True):
        turns = reader.rollout("r1").turns
        tokens = [token for turn in turns for token in turn.tokens or ()]
        assert [token.token_id for token in tokens] == [
            one for turn in rollouts[1].turns for one in turn.completion_ids.tolist()
        ]
        assert "".join(token.text for token in turns[0].tokens or ()) == "read a"
        assert {(token.advantage, token.has_loss) for token in turns[0].tokens or ()} == {(0.5, True)}
        assert {token.has_loss for token in turns[2].tokens or ()} == {False}
        assert {token.mismatch for token in tokens} == {None}


def test_a_summary_is_told_with_what_it_lost(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    for reader in reader_of(
        tmp_path / "run", chat, [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    ):
        summary = reader.rollout("r0").turns[2].summary
        assert summary is not None
        assert (summary.scratch, summary.text) == ("so far so good", "tax 42")
        assert summary.facts == {"tax 42": True, "fee 7": False, "rate 3": None, "tax 4": None}
        assert summary.tokens_before == len(scribe.summarised()[2].prompt_ids)
        assert summary.tokens_after == len(scribe.summarised()[3].prompt_ids)
        assert reader.rollout("r0").turns[1].summary is None


def test_advantages_and_loss_tokens_are_those_of_the_batch(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    rollouts = [
        ended(0, 1.0, *scribe.summarised()),
        ended(1, 0.0, *scribe.summarised()[:2]),
        ended(2, 1.0, *scribe.summarised(), verdict=SUSPECT),
    ]
    for reader in reader_of(tmp_path / "run", chat, rollouts, "effort.weight=0.1", "effort.prices.turns=1.0", size=4):
        read = {rollout.rollout_id: rollout for rollout in reader.group(TRAIN, 0)}
        config = reader._config
        group = reader._archive.group(TRAIN, 0)
        penalties = {rollout.rollout_id: effort_penalty(rollout, config.effort) for rollout in group.rollouts}
        batch = build_batch(1, [group], config.loss.baseline, penalties, config.credit)
        assert {t.rollout_id for t in batch.trajectories} == {"r0.0", "r1.0"}
        message = [turn for rollout in read.values() for turn in rollout.turns]
        assert sum(turn.loss_tokens or 0 for turn in message) == batch.num_loss_tokens
        assert sum((turn.advantage or 0) * (turn.loss_tokens or 0) for turn in message) == pytest.approx(
            sum(float(trajectory.advantages.sum()) for trajectory in batch.trajectories), abs=1e-4
        )
        compared = read["r0.0"].comparison
        assert compared is not None
        assert compared.penalty == pytest.approx(penalties["r0.0"])
        assert (compared.rollouts, compared.lost, compared.has_signal) == (2, 1, True)
        assert compared.weight == pytest.approx(2)  # 4 planned, 3 graded, 2 of them compared: 3/4 · 2 · 4/3
        assert read["r2.0"].comparison is None
        assert {turn.loss_tokens for turn in read["r2.0"].turns} == {0}


@pytest.mark.parametrize(("weighs", "factor"), [("true", 2.5), ("false", 1.0)])
def test_a_task_that_was_chosen_weighs_as_the_recipe_says(
    tmp_path: Path, chat: ChatTemplate, scribe: Scribe, weighs: str, factor: float
) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    family = ("tasks.family=repository", f"tasks.folder={tmp_path}", "sandboxes.kind=ns")  # its tasks come again
    keys = ("tasks.selection.kind=pools", f"tasks.selection.importance_weights={weighs}")
    for reader in reader_of(tmp_path / "run", chat, rollouts, *family, *keys, weight=2.5):
        read = reader.rollout("r1")
        assert read.comparison is not None
        assert read.comparison.weight == factor
        assert {turn.advantage for turn in read.turns} == {0.5 * factor}


def test_a_control_is_told_with_the_rewards_that_it_trains_on(
    tmp_path: Path, chat: ChatTemplate, scribe: Scribe
) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in range(4)]
    for reader in reader_of(tmp_path / "run", chat, rollouts, "reward.shuffled=true"):
        shown = {rollout.rollout_id: rollout for rollout in reader.group(TRAIN, 0)}
        shuffled = shuffle_rewards(reader._archive.group(TRAIN, 0), seed=reader._config.seed)
        given = {rollout.rollout_id: rollout.reward for rollout in shuffled.rollouts}
        assert list(given.values()) != [0.0, 1.0, 2.0, 3.0]
        for rollout_id, reward in given.items():
            assert reward is not None
            comparison = shown[rollout_id].comparison
            assert comparison is not None and comparison.compared == reward
            assert {turn.advantage for turn in shown[rollout_id].turns} == {reward - 1.5}


def test_a_group_without_signal_is_told_to_be(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    for reader in reader_of(tmp_path / "run", chat, [ended(slot, 1.0, *scribe.summarised()) for slot in (0, 1)]):
        read = reader.rollout("r1")
        assert read.comparison is not None
        assert not read.comparison.has_signal
        assert {(turn.advantage, turn.loss_tokens) for turn in read.turns} == {(0.0, 0)}


def test_masked_summaries_carry_no_loss(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    for reader in reader_of(tmp_path / "run", chat, rollouts, "credit.summaries=mask", *SUMMARISES):
        turns = reader.rollout("r1").turns
        assert [bool(turn.loss_tokens) for turn in turns] == [True, True, False, True]


def test_an_evaluation_has_no_advantages(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    for reader in reader_of(tmp_path / "run", chat, [ended(0, 1.0, *scribe.summarised())], purpose="after-greedy"):
        (read,) = reader.group("after-greedy", 0)
        assert {turn.advantage for turn in read.turns} == {None}
        assert read.notes == ("not trained on: of an evaluation",)


def test_what_cannot_be_told_without_a_model_is_said(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    for reader in reader_of(tmp_path / "run", chat, rollouts, "loss.reference_beta=0.1"):
        beta, weights = reader.rollout("r0").notes
        assert "without loss.reference_beta = 0.1" in beta
        assert "counted without their weights: for these, [loss] correction = 'tis'" in weights
    for reader in reader_of(tmp_path / "clip", chat, rollouts, "loss.kind=grpo", "loss.sequence_mask=ratio"):
        (weights,) = reader.rollout("r0").notes
        assert "[loss] kind = 'grpo', sequence_mask = 'ratio' needs the trainer's" in weights
    for reader in reader_of(tmp_path / "plain", chat, rollouts, "loss.correction=none"):
        assert reader.rollout("r0").notes == ()


def test_an_open_group_is_told_as_if_it_ended_now(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    for reader in reader_of(tmp_path / "run", chat, rollouts, size=8, lose=0):
        read = reader.rollout("r1")
        assert (read.group_state, read.turns[0].advantage) == ("open", 0.5)
        assert "if it ended now, with 2 compared" in read.notes[0]


def test_a_dropped_group_is_told_without_advantages(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    rollouts = [ended(slot, float(slot), *scribe.summarised()) for slot in (0, 1)]
    for reader in reader_of(tmp_path / "run", chat, rollouts, size=8, lose=5):
        read = reader.rollout("r1")
        assert (read.group_state, read.comparison) == ("dropped", None)
        assert {(turn.advantage, turn.loss_tokens) for turn in read.turns} == {(None, None)}
        assert read.notes == ("not trained on: its group was dropped",)


def test_the_loss_of_a_hinted_turn_is_told_to_come_on_top(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    hint = Hint(turn=1, text="mind the fee", source="rule")
    rollouts = [ended(0, 1.0, *scribe.summarised(), hints=(hint,)), ended(1, 1.0, *scribe.summarised())]
    settings = ("hints.weight=0.1", "loss.correction=none")
    for reader in reader_of(tmp_path / "run", chat, rollouts, *settings):
        assert reader.rollout("r0").notes == ("the loss of hinted turns, by hints.weight = 0.1, comes on top",)
        assert reader.rollout("r1").notes == ()


def test_every_attempt_of_a_group_is_told(tmp_path: Path, chat: ChatTemplate, scribe: Scribe) -> None:
    rollouts = [
        ended(0, None, reason="SandboxError: gone"),
        ended(0, 1.0, *scribe.summarised(), attempt=1),
        ended(1, 0.0, *scribe.summarised()),
    ]
    for reader in reader_of(tmp_path / "run", chat, rollouts, size=2):
        assert [read.rollout_id for read in reader.group(TRAIN, 0)] == ["r0.0", "r0.1", "r1.0"]
        assert [read.rollout_id for read in reader.group(TRAIN, 0, slot=0)] == ["r0.0", "r0.1"]
        assert reader.rollout("r0.0").turns == ()
        with pytest.raises(UserError, match="slot 7 has ended"):
            list(reader.group(TRAIN, 0, slot=7))
        with pytest.raises(UserError, match=r"no group 5.*its purposes are train"):
            list(reader.group(TRAIN, 5))


def test_a_live_session_is_told_with_who_asked_and_what_was_said(
    tmp_path: Path, chat: ChatTemplate, scribe: Scribe
) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    chat.save(folder.model)
    observation = Observation(user="u-1f", day=3, template="chat", arm="live", prompt_tokens=9)
    observed = ObservedSession(
        session_id="r0.0", observation=observation, ended_at=1.0, sampled_tokens=(2,), answers={"kept": (1.0,)}
    )
    with Ledger.open(folder.ledger) as ledger:
        session = ended(0, 1.0, scribe.turn(None, "add tax", "answer 49"), observation=observation)
        ledger.live.admit(session, observed, version=3, kept_below=9)
    with Archive.open(folder.ledger) as archive:
        read = RolloutReader(folder, archive).rollout("r0.0")
    assert read.observed == observed
    assert "u-1f" in json.dumps(to_json(read))
