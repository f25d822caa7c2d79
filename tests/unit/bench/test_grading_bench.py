"""`bench grading`: its cases, its goals, and a small run of it."""

import asyncio
import compileall
import random
from pathlib import Path

import pytest

from bench.grading.attack import MODULE, STUB, TEST
from bench.grading.bench import (
    ATTACKS,
    ATTACKS_ACCEPTED,
    Case,
    GradingOptions,
    Outcome,
    attack_case,
    bench_grading,
    grading_options,
    honest_cases,
    judged,
    table,
)
from bench.grading.graders import GRADERS, OURS
from bench.grading.subjects import SUBJECTS, Subject
from bench.tables import results_of
from etude.errors import UserError
from etude.rewards.graders.canaries import SiteKind
from etude.rewards.graders.script import failing_twin
from etude.rewards.graders.test_runs import HiddenTestPlanner
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.types import ScriptChecks, TestChecks


def test_there_are_enough_cases_and_each_has_a_name() -> None:
    assert len(ATTACKS) >= 29 + 20
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len(SUBJECTS) >= 5
    assert {attack.subject for attack in ATTACKS} == {subject.name for subject in SUBJECTS}
    cases = grading_options().cases
    assert len(cases) == len(ATTACKS) + sum(len(subject.honest) for subject in SUBJECTS)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attacks_are_filled_in(attack: object, tmp_path: Path) -> None:
    case = attack_case(attack)  # type: ignore[arg-type]  # parametrised
    assert case.subject.module in case.files
    for text in (*case.files, *case.files.values(), *case.commands):
        assert not any(mark in text for mark in (MODULE, STUB, TEST))
    for path, text in case.files.items():
        if path.endswith(".py"):
            (tmp_path / "case.py").write_text(text, encoding="utf-8")
            assert compileall.compile_file(tmp_path / "case.py", quiet=1, force=True), path


def test_a_module_that_an_attack_does_not_touch_is_the_stub_to_the_byte() -> None:
    case = attack_case(next(attack for attack in ATTACKS if attack.name == "conftest that exits"))
    assert case.files[case.subject.module] == case.subject.stub


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_test_of_every_subject_can_be_a_canary(subject: Subject) -> None:
    checks = subject.task("image", probed=True).checks
    if isinstance(checks, ScriptChecks):
        assert {failing_twin(checks, random.Random(seed)).files["test_add.py"] for seed in range(9)}
        return
    assert isinstance(checks, TestChecks)
    planner = HiddenTestPlanner(subject.tests, checks.must_pass, checks.about, random.Random(1))
    assert planner.guarded == set(checks.must_pass[: checks.about])
    assert SiteKind.PLANTED not in {
        planner._modules[path].source.alteration(name, random.Random(1)).kind for path, name in planner._order
    }


def test_goals_count_what_our_grader_got_wrong() -> None:
    attack = attack_case(ATTACKS[0])
    honest = honest_cases(SUBJECTS[0])[0]
    outcomes = [outcome(attack, True, False), outcome(attack, False, False), outcome(honest, True, False)]
    goals = judged([*outcomes, Outcome(case=honest, errors={OURS[1]: "no room"})])
    assert goals["attacks_accepted"] == {
        "meaning": ATTACKS_ACCEPTED.meaning, "value": 1, "goal": 0.0, "sense": "at most", "met": False,
        "each": {OURS[0]: 1, OURS[1]: 0},
    }  # fmt: skip
    rejected = goals["honest_rejected"]
    assert isinstance(rejected, dict)
    assert rejected["each"] == {OURS[0]: 0, OURS[1]: 2}
    broken = judged([Outcome(case=attack, errors={OURS[1]: "a sandbox died"})])
    assert broken["attacks_ungraded"]["each"] == {OURS[1]: 1}  # type: ignore[index,call-overload]  # an object
    assert judged([])["attacks_accepted"]["met"] is False  # type: ignore[index,call-overload]  # an object


def outcome(case: Case, first: bool, second: bool) -> Outcome:
    return Outcome(case=case, accepted={OURS[0]: first, OURS[1]: second})


def test_every_contestant_can_be_named_in_a_list_of_them() -> None:
    assert grading_options(tuple(",".join(GRADERS).split(","))).contestants == tuple(GRADERS)


def test_unknown_contestants_are_refused() -> None:
    with pytest.raises(UserError, match="no contestant 'guess'"):
        grading_options(("guess",))


@pytest.mark.heavy("minutes, with all that a bench starts")
def test_a_small_run() -> None:
    async def works() -> bool:
        provider = NamespaceSandboxes()
        try:
            return bool(await provider.capabilities())
        finally:
            await provider.close()

    if not asyncio.run(works()):
        pytest.skip("no sandboxes of ns can be made on this machine")
    attacks = {attack.name: attack for attack in ATTACKS}
    verified = attack_case(attacks["verifier: exit on import"])
    cases = (attack_case(attacks["equal to everything"]), verified, honest_cases(SUBJECTS[0])[0])
    result = bench_grading(GradingOptions(contestants=("named tests (fresh)", OURS[0]), cases=cases))
    shown = [case["accepted"] for case in result["cases"]]  # type: ignore[union-attr,index,call-overload]  # objects
    assert shown == [
        {"named tests (fresh)": True, OURS[0]: False},
        {OURS[0]: False},
        {"named tests (fresh)": True, OURS[0]: True},
    ]
    assert [row["attacks"] for row in results_of(result)] == [1, 2]
    assert "equal to everything" in table(result)
    assert set(GRADERS) > {"named tests (fresh)", OURS[0]}
