"""``bench trainer``: its counts and comparisons, and a run of étude's own trainer."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine.models import QUICK_MODEL
from bench.trainer.bench import Row, bench_trainer, goals, step_flops, table, trainer_options
from bench.trainer.contestants import SHORTEST, sequences
from bench.trl_environment import VARIABLE, open_rival, trl_python
from etude.errors import InfrastructureError, UserError
from etude.models.flops import head_flops, pair_flops, token_flops

SETUP = trainer_options(quick=True).setup


def row(contestant: str, seconds: float) -> Row:
    return Row(contestant=contestant, seconds=(seconds,), tokens=1000, flops=1e9, peak=1e10)


def test_sequences_are_the_same_everywhere_and_look_like_rollouts() -> None:
    setup = replace(SETUP, sequences=64, longest=400, microbatch_tokens=800)
    examples = sequences(setup)
    assert examples == sequences(setup)
    assert examples != sequences(replace(setup, seed=1))
    lengths = [len(example.token_ids) for example in examples]
    assert lengths == sorted(lengths, reverse=True)
    assert SHORTEST <= lengths[-1] < lengths[0] <= 400
    assert all(len(example.sampled) == len(example.token_ids) and not example.sampled[0] for example in examples)
    sampled = sum(sum(example.sampled) for example in examples) / sum(lengths)
    assert 0.2 < sampled < 0.5


def test_steps_of_broken_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="whole passes of 2 rows"):
        replace(SETUP, sequences=5)


def test_a_step_needs_three_forward_passes_and_logits_of_sampled_tokens_alone() -> None:
    setup = replace(SETUP, sequences=2, longest=SHORTEST, microbatch_tokens=SHORTEST)
    examples, spec = sequences(setup), QUICK_MODEL.spec
    tokens, flops = step_flops(spec, setup)
    assert tokens == 2 * SHORTEST
    pairs = 2 * sum(range(1, SHORTEST + 1))
    sampled = sum(sum(example.sampled) for example in examples)
    assert flops == 3 * (tokens * token_flops(spec) + pairs * pair_flops(spec) + sampled * head_flops(spec))


def test_the_better_of_each_side_is_compared() -> None:
    rows = [
        row("etude-invariant", 1.0),
        row("etude-fast", 2.0),
        row("transformers-padded", 3.0),
        row("transformers-packed", 4.0),
    ]
    judged = goals(rows, on_card=False)
    ratio, share = judged["tokens_vs_transformers"], judged["peak_share"]
    assert isinstance(ratio, dict) and isinstance(share, dict)
    assert (ratio["value"], ratio["ours"], ratio["theirs"]) == (3.0, "etude-invariant", "transformers-padded")
    assert (share["value"], share["goal"], share["met"]) == (0.1, 0.6, False)
    on_card = goals(rows, on_card=True)["peak_share"]
    assert isinstance(on_card, dict) and (on_card["goal"], on_card["met"]) == (0.4, False)


def test_without_transformers_the_goal_says_why_it_is_not_met() -> None:
    judged = goals([row("etude-fast", 1.0), Row(contestant="transformers-packed", missing="not here")], on_card=False)
    ratio = judged["tokens_vs_transformers"]
    assert isinstance(ratio, dict)
    assert (ratio["met"], ratio["reason"]) == (False, "not here")


def test_an_unknown_contestant_is_refused() -> None:
    with pytest.raises(UserError, match="no contestant 'deepspeed' here"):
        trainer_options(("deepspeed",))


def test_the_environment_is_found_where_it_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with pytest.raises(InfrastructureError, match=r"constraints-trl\.txt"):
        trl_python()
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert trl_python() == Path(sys.executable)


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    async def fail() -> None:
        python, log = Path(sys.executable), tmp_path / "log"
        async with open_rival("trainer.worker", {"nonsense": 1}, python=python, threads=1, log=log) as rival:
            await rival.receive(60.0)

    with pytest.raises(InfrastructureError, match=r"trainer\.worker ended with status 1: TypeError.*nonsense"):
        asyncio.run(fail())


def test_ours_takes_its_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    result = bench_trainer(trainer_options(("etude-fast", "transformers-packed"), quick=True))
    rows = result["results"]
    assert isinstance(rows, list)
    ours, theirs = rows
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    assert float(str(ours["tokens_per_s"])) > 0
    assert 0 < float(str(ours["peak_share"])) < 1
    assert "constraints-trl.txt" in str(theirs["missing"])
    assert "etude-fast" in table(result)
