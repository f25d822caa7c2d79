"""Hints of rollouts become examples: the reply as it was sampled, in two contexts."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from etude.config.loading import default_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.models.spec import TINY
from etude.run.distillation import DistillationBatcher, distillation_example
from etude.run.hints import reminders_of
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import Checkpoint, JinjaFormat
from etude.tokens.messages import ChatMessage
from etude.tokens.reminders import Reminders
from etude.types import (
    NO_ROUTE,
    Branch,
    Disposition,
    Finish,
    Group,
    Hint,
    Rollout,
    RolloutStatus,
    Turn,
    TurnKind,
    Verdict,
)
from records import TASK

CHAT = ChatTemplate.train(["fix f in f.py", "edit FILE N"], 300)
REMINDERS = Reminders(CHAT)
HINT = "edit FILE N"
SUSPECT = Verdict(disposition=Disposition.QUARANTINE, reason="spy", flags=("spy",), hacked=True, graded=1.0)


def make_turn(*text_of: str, kind: TurnKind = TurnKind.ACT) -> Turn:
    """The last turn of a conversation in which user and assistant alternate, the user first."""
    roles = ("user", "assistant")
    messages = [ChatMessage(role=roles[n % 2], content=text) for n, text in enumerate(text_of[:-1])]  # type: ignore[arg-type]
    completion = [*CHAT.encode(text_of[-1]), CHAT.end_id]
    return Turn(
        prompt_ids=np.array(CHAT.open(messages), np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(len(completion), -1.0, np.float32),
        versions=np.full(len(completion), 3, np.int32),
        finish=Finish.STOP,
        kind=kind,
        temperature=0.7,
    )


TURNS = (make_turn("fix f", "edit f.py:3"), make_turn("fix f", "edit f.py:3", "bad call", "submit"))


def make_rollout(name: str, *turns: int, verdict: Verdict | None = None, branch: Branch | None = None) -> Rollout:
    return Rollout(
        rollout_id=name,
        group_index=0,
        slot=0,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=1.0,
        turns=TURNS,
        hints=tuple(Hint(turn=turn, text=HINT, source="style") for turn in turns),
        verdict=verdict,
        branch=branch,
    )


def make_group(*rollouts: Rollout) -> Group:
    return Group(index=0, task=TASK, admitted_version=3, rollouts=rollouts)


def make_config(*overrides: str) -> RunConfig:
    return default_recipe(["hints.weight=1.0", *overrides])


def plan(*overrides: str) -> DistillationBatcher:
    return DistillationBatcher(make_config(*overrides), TINY, REMINDERS)


@pytest.mark.parametrize("turn", [0, 1])
def test_an_example_is_the_turn_and_the_turn_with_the_hint_in_its_context(turn: int) -> None:
    example = distillation_example(make_rollout("r", turn), turn, HINT, REMINDERS)
    sampled = TURNS[turn]
    for view in (example.student, example.teacher):
        assert view.token_ids[view.loss_mask].tolist() == sampled.completion_ids.tolist()
        assert view.logprobs[view.loss_mask].tolist() == sampled.logprobs.tolist()
        assert set(view.temperatures[view.loss_mask].tolist()) == {np.float32(0.7)}
        assert not view.advantages.any()
    reply = len(sampled.completion_ids)
    assert example.student.token_ids[:-reply].tolist() == sampled.prompt_ids.tolist()
    assert example.teacher.token_ids[:-reply].tolist() == REMINDERS.insert(sampled.prompt_ids, HINT).tolist()


def test_routes_of_the_context_before_the_hint_are_kept_and_no_others() -> None:
    read = len(TURNS[0].prompt_ids) + len(TURNS[0].completion_ids) - 1
    routes = np.tile(np.array([[0, 1]], np.uint16), (read, 2, 1))
    rollout = replace(make_rollout("r", 0), turns=(replace(TURNS[0], routes=routes), TURNS[1]))
    example = distillation_example(rollout, 0, HINT, REMINDERS)
    assert example.student.routes is not None
    assert example.teacher.routes is not None
    place = REMINDERS.place(TURNS[0].prompt_ids)
    assert (example.student.routes[:read] != NO_ROUTE).all()
    assert (example.teacher.routes[:place] != NO_ROUTE).all()
    assert (example.teacher.routes[place:] == NO_ROUTE).all()


def test_every_hint_of_trusted_rollouts_is_one_example() -> None:
    group = make_group(make_rollout("a", 0, 1), make_rollout("b"), make_rollout("c", 0, verdict=SUSPECT))
    distillation = plan().distillation([group, make_group(make_rollout("d", 1))], shares=1)
    assert [example.student.rollout_id for example in distillation.examples] == ["a", "a", "d"]
    assert sorted(index for chunk in distillation.shares[0] for index in chunk) == [0, 1, 2]


def test_a_turn_that_rollouts_share_is_distilled_once() -> None:
    parent = make_rollout("a", 0)
    forked = make_rollout("b", 0, 1, branch=Branch(rollout_id="a", turns=1))
    distillation = plan().distillation([make_group(parent, forked)], shares=1)
    assert [example.student.rollout_id for example in distillation.examples] == ["a", "b"]
    assert len(distillation.examples[1].student.token_ids) > len(distillation.examples[0].student.token_ids)


def test_summaries_that_are_not_trained_are_not_distilled() -> None:
    summary = (TURNS[0], replace(TURNS[1], kind=TurnKind.SUMMARY))
    group = make_group(replace(make_rollout("a", 0, 1), turns=summary))
    summaries = ("harness.options.context=summary", "harness.options.summary_at_tokens=100", "engine.max_length=400")
    for choice, examples in (("train", 2), ("mask", 1)):
        chosen = plan(*summaries, f"credit.summaries={choice}")
        assert len(chosen.distillation([group], shares=1).examples) == examples


def test_examples_are_dealt_out_evenly_in_chunks_that_fit() -> None:
    group = make_group(*(make_rollout(f"r{n}", 0, 1) for n in range(5)))
    distillation = plan("trainer.microbatch_tokens=64").distillation([group], shares=2)
    lengths = [len(example.teacher.token_ids) for example in distillation.examples]
    assert len({len(share) for share in distillation.shares}) == 1
    assert len(distillation.shares) == 2
    assert all(sum(lengths[index] for index in chunk) <= 64 for share in distillation.shares for chunk in share)
    assert sorted(i for share in distillation.shares for chunk in share for i in chunk) == list(range(10))


def test_a_batch_without_hints_has_no_distillation_batch() -> None:
    distillation = plan().distillation([make_group(make_rollout("a"))], shares=4)
    assert (distillation.examples, distillation.shares) == ((), ())


def test_a_template_that_takes_no_hint_is_refused_by_name() -> None:
    source = (
        "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_str(CHAT._tokenizer.to_str())
    variables = {"eos_token": "<|end|>"}
    chat = JinjaFormat(
        Checkpoint(tokenizer=tokenizer, templates={"default": source}, variables=variables, stop_ids=(CHAT.end_id,))
    )
    with pytest.raises(ConfigError, match=r"hints.weight cannot be above 0 with this model: .*roles must alternate"):
        reminders_of(chat)
