"""The planted-bug family: reproducible, telling, and held out without a leak."""

from random import Random

import pytest

from etude.config.tasks import BugfixOptions
from etude.tasks.bugfix import BugfixFamily, behaviour, run_program
from etude.tasks.corpora.corpus import demonstration_sources, tokenizer_texts
from etude.tasks.corpora.mixture import Side
from etude.tasks.corpora.texts import PlainText
from etude.tasks.corpora.transcripts import BugfixDemonstrations, transcript
from etude.tasks.programs import KINDS
from etude.tokens.chat import ChatTemplate
from etude.types import Split

ALL_KINDS = BugfixOptions(kinds=("arith", "slice", "comp", "loop", "range"))


def stripped_lines(text: str) -> set[str]:
    """Lines as a leak would show: without indent, and without the number that ``read`` puts in front."""
    lines = [line.strip() for line in text.splitlines()]
    return {*lines, *(line.partition(" ")[2].strip() for line in lines)}


def test_the_same_index_gives_the_same_task() -> None:
    one, other = BugfixFamily(BugfixOptions(), seed=3), BugfixFamily(BugfixOptions(), seed=3)
    assert [one.task(Split.TRAIN, i) for i in range(20)] == [other.task(Split.TRAIN, i) for i in range(20)]


def test_heldout_tasks_do_not_depend_on_the_seed_and_training_tasks_do() -> None:
    one, other = BugfixFamily(BugfixOptions(), seed=1), BugfixFamily(BugfixOptions(), seed=2)
    assert one.task(Split.HELDOUT, 5) == other.task(Split.HELDOUT, 5)
    assert one.task(Split.TRAIN, 5) != other.task(Split.TRAIN, 5)


def test_there_are_thousands_of_different_training_tasks() -> None:
    family = BugfixFamily(BugfixOptions(), seed=0)
    ids = {family.task(Split.TRAIN, index).task_id for index in range(2_000)}
    assert len(ids) > 1_800


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_an_answer_line_belongs_to_one_template(kind: object) -> None:
    owners: dict[str, str] = {}
    for other in KINDS.values():
        for template in other.templates:
            for naming in other.namings:
                line = other.answer_line(template, naming).strip()
                assert owners.setdefault(line, other.title(template)) == other.title(template)


def test_the_planted_bug_shows_and_the_right_program_passes() -> None:
    family = BugfixFamily(ALL_KINDS, seed=0)
    rng = Random(0)
    for _ in range(200):
        problem, checks = family.graded_problem(Split.HELDOUT, rng)
        cases = (*checks.visible, *checks.hidden)
        assert all(run_program(problem.right, problem.function, case.arguments) == case.expected for case in cases)
        broken = [run_program(problem.broken, problem.function, case.arguments) != case.expected for case in cases]
        assert sum(broken) >= 3
        assert any(broken[: len(checks.visible)])
        assert any(broken[len(checks.visible) :])


@pytest.mark.parametrize("config", [BugfixOptions(), ALL_KINDS], ids=["quick", "full"])
def test_no_heldout_answer_is_in_any_training_task(config: BugfixOptions) -> None:
    family = BugfixFamily(config, seed=0)
    for index in range(3_000):
        task = family.task(Split.TRAIN, index)
        for text in task.files.values():
            assert not stripped_lines(text) & family.forbidden


@pytest.mark.parametrize("config", [BugfixOptions(), ALL_KINDS], ids=["quick", "full"])
def test_no_heldout_answer_is_in_any_transcript(config: BugfixOptions) -> None:
    family = BugfixFamily(config, seed=0)
    rng = Random("transcripts")
    for _ in range(3_000):
        problem, checks = family.graded_problem(Split.TRAIN, rng)
        for message in transcript(problem, checks, BugfixOptions(), rng):
            assert not stripped_lines(message.content) & family.forbidden


def test_no_heldout_answer_is_in_the_decoded_midtraining_stream() -> None:
    """Checks the real token stream, decoded again: library, domain code and transcripts together."""
    family = BugfixFamily(BugfixOptions(), seed=0)
    demonstrations = BugfixDemonstrations(family, BugfixOptions())
    chat = ChatTemplate.train(tokenizer_texts(demonstrations, 0), 576)
    sources = demonstration_sources(demonstrations, PlainText(chat), Side(seed=0, one_in=20), context_weight=0.3)
    read = 0
    for source, documents in (("stdlib", 100), ("code", 200), ("sessions", 440)):
        for index in range(documents):
            document = sources[source].document(index)
            read += len(document.token_ids)
            assert not stripped_lines(chat.decode(document.token_ids.tolist())) & family.forbidden
    assert read > 100_000


def test_the_leak_test_can_fail() -> None:
    family = BugfixFamily(BugfixOptions(), seed=0)
    rng = Random(0)
    problem = family.problem(Split.HELDOUT, rng)
    assert stripped_lines("\n".join(problem.right)) & family.forbidden


@pytest.mark.parametrize("config", [BugfixOptions(), ALL_KINDS], ids=["quick", "full"])
def test_nothing_trained_on_computes_what_is_held_out(config: BugfixOptions) -> None:
    """Otherwise training would reward the held-out line, which passes its twin's hidden tests."""
    family = BugfixFamily(config, seed=0)
    sides = {
        split: {behaviour(kind, parts) for kind in family.kinds for parts in family.templates(kind, split)}
        for split in Split
    }
    assert not sides[Split.TRAIN] & sides[Split.HELDOUT]


def test_whole_templates_are_held_out() -> None:
    family = BugfixFamily(BugfixOptions(), seed=0)
    for kind in family.kinds:
        train, heldout = set(family.templates(kind, Split.TRAIN)), set(family.templates(kind, Split.HELDOUT))
        assert heldout
        assert not train & heldout
        assert train | heldout == set(kind.templates)


def test_of_an_untrained_kind_rl_has_no_task_and_mid_training_and_evaluations_have_some() -> None:
    options = BugfixOptions(kinds=("arith", "range"), untrained=("range",))
    family = BugfixFamily(options, seed=0)
    assert {family.task(Split.TRAIN, index).template.partition("|")[0] for index in range(60)} == {"arith"}
    assert "range" in {family.task(Split.HELDOUT, index).template.partition("|")[0] for index in range(60)}
    demonstrations, rng = BugfixDemonstrations(family, options), Random(0)
    shown = "".join(message.content for _ in range(30) for message in demonstrations.session(rng))
    assert "range(" in shown and "return (" in shown


@pytest.mark.parametrize(("untrained", "fault"), [("comp", "'comp' is none of"), ("arith", "RL has no task")])
def test_untrained_kinds_that_cannot_be_are_refused(untrained: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"tasks.options.untrained: {fault}"):
        BugfixOptions(kinds=("arith",), untrained=(untrained,))
