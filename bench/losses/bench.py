"""`bench losses`: the losses here against TRL's and verl's own code, on the same random batches.

    batch ──▶ policy_loss                          ──┬─▶ difference of loss and gradient, case by case
          ──▶ losses_worker.py: _compute_loss, …   ──┘

A case is a recipe's ``[loss]`` and what another system calls the same. Batches have tokens of tools in the middle of
their sequences and log-probabilities that differ by a little, by some, by much. Gradients are by the log-probability of
every token, and where a case has a bonus by its entropy; a loss without a ratio in it, −w·A·log π here, is −w·A there:
its gradient alone is compared.

Shape legend: B sequences, T tokens, N loss tokens.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bench.losses.cases import CASES, Case
from bench.options import add_contestants, names
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trl_environment import PYTHON, open_rival, trl_python
from etude.config.training import LossConfig
from etude.errors import InfrastructureError
from etude.trainer.losses import LossTokens, Totals, policy_loss
from etude.types import Json

SEQUENCES, TOKENS = 8, 12
NOISES = (0.01, 0.1, 0.5)
"""Nats by which a token's log-probabilities differ from one policy to the next."""
TOLERANCE = 1e-7
"""Largest difference of losses and gradients of order 0.1: verl adds 1e-8 to the lengths that it divides by."""
SILENCE_S = 300.0
WHEEL_VARIABLE = "ETUDE_VERL_WHEEL"
"""Names verl's wheel; else it lies in TRL's environment."""
AGREE = Goal(
    "agree",
    "at least",
    1.0,
    "Share of random batches on which loss and gradient are those of the other library; the worst case.",
)
_COLUMNS = ("contestant", "case", "agree", "batches", "loss", "gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossesOptions:
    """The batches and the contestants of a call."""

    batches: int = 20
    contestants: tuple[str, ...] = ("trl", "verl")


def losses_options(contestants: tuple[str, ...] | None = None, *, quick: bool = False) -> LossesOptions:
    """The options of a call."""
    return LossesOptions(batches=3 if quick else 20, contestants=contestants or LossesOptions().contestants)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_losses(losses_options(names(options.contestants), quick=options.quick))


def bench_losses(options: LossesOptions) -> dict[str, Json]:
    """Every case of every contestant; one that is not there is missing, with the reason."""
    started_s = time.perf_counter()
    batches = [make_batch(seed) for seed in range(options.batches)]
    rows: list[Json] = []
    versions: dict[str, Json] = {"torch": torch.__version__}
    with so_far() as measured:
        for contestant in options.contestants:
            cases = [case for case in CASES if case.contestant == contestant]
            try:
                version, results = asyncio.run(_requests(contestant, cases, batches))
            except InfrastructureError as error:
                rows.append({"contestant": contestant, "missing": str(error)})
                continue
            versions[contestant] = version
            rows += [compare(case, batches, theirs) for case, theirs in zip(cases, results, strict=True)]
    shares = [cast("int", row["agree"]) / options.batches for row in rows if isinstance(row, dict) and "agree" in row]
    judged = AGREE.judge(min(shares, default=None))
    return envelope(
        "losses",
        time.perf_counter() - started_s,
        {"settings": versions, "results": rows, "goals": {AGREE.name: judged | {"cases": len(shares)}}},
        interrupted=measured.interrupted,
    )


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    return results_page(result, _COLUMNS)


def make_batch(seed: int) -> dict[str, Tensor]:
    """Sequences of unequal length with holes; four policies, each a step away from the one before."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths_B = torch.randint(2, TOKENS + 1, (SEQUENCES,), generator=generator)
    mask_BT = torch.arange(TOKENS) < lengths_B.unsqueeze(1)
    mask_BT &= (torch.rand(SEQUENCES, TOKENS, generator=generator) < 0.8) | (torch.arange(TOKENS) == 0)
    noise = NOISES[seed % len(NOISES)]
    engine_BT = -torch.rand(SEQUENCES, TOKENS, generator=generator, dtype=torch.float64) * 2 - 0.3 - noise
    old_BT = (engine_BT + noise * normal(SEQUENCES, TOKENS)).clamp(max=-1e-3)
    return {
        "mask": mask_BT.double(),
        "engine": engine_BT,
        "old": old_BT,
        "logprobs": (old_BT + noise * normal(SEQUENCES, TOKENS)).clamp(max=-1e-3),
        "reference": (engine_BT + noise * normal(SEQUENCES, TOKENS)).clamp(max=-1e-3),
        "entropies": torch.rand(SEQUENCES, TOKENS, generator=generator, dtype=torch.float64),
        "advantages": normal(SEQUENCES),
    }


def our_loss(case: Case, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Loss and gradients [B,T] of one case on one batch."""
    config = LossConfig.model_validate(dict(case.loss))
    mask_BT = batch["mask"].bool()
    leaves = {name: batch[name].clone().requires_grad_() for name in ("logprobs", "entropies")}
    lengths_B = mask_BT.sum(1)
    tokens = LossTokens(
        logprobs_N=leaves["logprobs"][mask_BT],
        engine_logprobs_N=batch["engine"][mask_BT],
        advantages_N=batch["advantages"].repeat_interleave(lengths_B),
        trajectories_N=torch.arange(SEQUENCES).repeat_interleave(lengths_B),
        proximal_logprobs_N=batch["old"][mask_BT] if config.old_policy == "recomputed" else None,
        reference_logprobs_N=batch["reference"][mask_BT],
        entropies_N=leaves["entropies"][mask_BT],
    )
    loss = policy_loss(tokens, config, Totals(tokens=int(lengths_B.sum()), trajectories=SEQUENCES)).loss
    loss.backward()
    gradients = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()}
    return {"loss": float(loss.detach()), "gradient": gradients["logprobs"], "by_entropy": gradients["entropies"]}


def compare(case: Case, batches: Sequence[Mapping[str, Tensor]], theirs: Sequence[Mapping[str, Any]]) -> Json:
    """Count the batches that agree, and find the largest differences."""
    losses, gradients = [], []
    for batch, other in zip(batches, theirs, strict=True):
        own = our_loss(case, batch)
        losses.append(abs(own["loss"] - other["loss"]) if case.has_value else 0.0)
        gradients.append(
            max(
                float((own[name] - torch.tensor(other[name], dtype=torch.float64)).abs().max())
                for name in ("gradient", "by_entropy")
            )
        )
    agree = sum(max(pair) <= TOLERANCE for pair in zip(losses, gradients, strict=True))
    return {
        "contestant": case.contestant,
        "case": case.name,
        "loss_section": dict(case.loss),
        "settings": dict(case.settings),
        "agree": agree,
        "batches": len(batches),
        "loss": float(f"{max(losses):.1e}") if case.has_value else None,
        "gradient": float(f"{max(gradients):.1e}"),
        "missing": None,
    }


async def _requests(
    contestant: str, cases: Sequence[Case], batches: Sequence[Mapping[str, Tensor]]
) -> tuple[str, list[list[dict[str, Any]]]]:
    """A contestant's version and what it makes of each case and batch."""
    setup: dict[str, Json] = {"system": contestant, "wheel": str(_verl_wheel()) if contestant == "verl" else ""}
    rows = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches]
    questions: dict[str, Any] = {"batches": rows, "cases": [{"settings": dict(case.settings)} for case in cases]}
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        async with open_rival("losses.worker", setup, python=trl_python(), threads=1, log=log) as rival:
            ready = await rival.receive(SILENCE_S)
            await rival.answer(questions)
            answer = await rival.receive(SILENCE_S)
    if ready is None or answer is None:
        raise InfrastructureError(f"{contestant}'s program ended without an answer")
    return str(ready["version"]), cast("list[list[dict[str, Any]]]", answer["results"])


def _verl_wheel() -> Path:
    """Raises :class:`~etude.errors.InfrastructureError` if there is none."""
    named = os.environ.get(WHEEL_VARIABLE)
    wheels = [Path(named)] if named else sorted(PYTHON.parents[1].glob("verl-*.whl"))
    if not wheels or not wheels[-1].is_file():
        raise InfrastructureError(
            f"not measured: there is no wheel of verl in {PYTHON.parents[1]}. `make bench-setup` brings "
            f"it; or name one in {WHEEL_VARIABLE}"
        )
    return wheels[-1]
