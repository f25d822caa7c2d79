"""`bench numerics`: how far the trainer's logprobs are from those that an engine sampled with, and what helps.

    trained model ──published in a format──▶ engine: samples ──▶ tokens, logprobs, routes
                  ──trainer in that format──▶ the same tokens again ──▶ d = trainer − engine, for each token

``none`` is the plain forward pass, ``replay`` sends every token to the experts that the engine used, ``filter``
replaces those of them that the live router finds implausible. In invariant arithmetic nothing has to be repaired. The
other engines get low-precision weights decoded, since they know nothing of our formats: they leave activations as they
are, which the trainer does not, and that mismatch no replay removes.

Shape legend: B sessions, T positions, P prompt tokens, C sampled tokens, N = B·C, M = B·T, the last token
of each session included, S sparse layers, k experts per token.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bench.engine.contestants import LENGTH, RUNNING, Order, Setup
from bench.engine.models import END_ID, PAD_ID, QUICK_MODEL, load_trained
from bench.engine.worker import Worker, available_cores
from bench.numerics.model import CACHE, Schooling, TrainedModel, trained_model
from bench.options import add_contestants, names
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from etude.config.inference import NumericsConfig
from etude.errors import InfrastructureError, UserError
from etude.models.checkpoint import save_checkpoint
from etude.models.decoder import Decoder
from etude.models.experts import Routing
from etude.run.numerics import DTYPES, decoded_state, published_state
from etude.trainer.mismatch import Mismatch, summarise
from etude.types import NO_ROUTE, Floats, Json, Mask

ENGINES = ("native-fast", "native-invariant", "transformers-generate", "vllm")
ROUTED = ("native-fast", "transformers-generate")
"""Engines that say which experts they used, and whose trainer may choose others."""
FORMATS: Final = MappingProxyType(
    {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "fp8": {"dtype": "bfloat16", "experts": "fp8"},
        "nvfp4": {"dtype": "bfloat16", "experts": "nvfp4"},
    }
)
"""Names of rows → their ``[numerics]``."""
REPLAYS: Final = MappingProxyType({"none": None, "replay": 0.0, "filter": 0.5})
"""Names of rows → the plausibility floor; ``None`` replays nothing."""
JUDGED_FORMAT = "bfloat16"
JUDGED_ENGINE = "transformers-generate"
"""Another system's engine, whose numbers are really not the trainer's."""
INVARIANT = Goal(
    "invariant_max_abs",
    "at most",
    0.0,
    "Largest difference between the trainer's and the engine's logprob of a token in invariant arithmetic, in nats.",
)
REPLAY = Goal(
    "replay_p99_removed",
    "at least",
    0.6,
    "Share of the 99th percentile of the difference from transformers' logprobs that replay of experts removes.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsOptions:
    """Options of the measurement."""

    engines: tuple[str, ...] = ENGINES
    formats: tuple[str, ...] = tuple(FORMATS)
    sessions: int = 32
    prompt_tokens: int = 96
    new_tokens: int = 160
    seed: int = 0
    schooling: Schooling = field(default_factory=Schooling)
    cache: Path = CACHE

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.engines) - set(ENGINES)) + sorted(set(self.formats) - set(FORMATS)):
            raise UserError(f"bench numerics: no {unknown[0]!r} among {', '.join((*ENGINES, *FORMATS))}")
        if not 1 <= self.sessions <= RUNNING or self.prompt_tokens + self.new_tokens > LENGTH:
            raise UserError(
                f"bench numerics: {self.sessions} sessions of {self.prompt_tokens + self.new_tokens} tokens: choose "
                f"1 to {RUNNING} of at most {LENGTH}"
            )


def numerics_options(engines: tuple[str, ...] | None = None, *, quick: bool = False) -> NumericsOptions:
    """The options of a call; ``None`` stands for all engines, or with ``quick`` for ``native-invariant`` alone.

    Raises :class:`~etude.errors.UserError` as the options do.
    """
    if not quick:
        return NumericsOptions(engines=engines or ENGINES)
    return NumericsOptions(
        engines=engines or ("native-invariant",),
        formats=("float32", "fp8"),
        sessions=4,
        prompt_tokens=16,
        new_tokens=24,
        schooling=Schooling(model=QUICK_MODEL, steps=4),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Comparison of one engine's numbers with the trainer's in one format and mode."""

    engine: str
    format: str
    mode: str
    """``invariant`` or one of ``REPLAYS``."""
    mean: float = 0.0
    """Mean of |d|."""
    mismatch: Mismatch | None = None
    flipped: Mismatch | None = None
    """Mismatch over those tokens that the trainer's plain forward pass sends to other experts than the engine did."""
    missing: str | None = None
    """Why there is no figure."""

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        row: dict[str, Json] = {
            "contestant": self.engine,
            "case": f"{self.format}, {self.mode}",
            "missing": self.missing,
        }
        measured = self.mismatch
        if measured is None:
            return row
        return row | {
            "tokens": measured.tokens,
            "mean_abs": _four_digits(self.mean),
            "p99": _four_digits(measured.p99),
            "max": _four_digits(measured.max),
            "k1": _four_digits(measured.k1),
            "k3": _four_digits(measured.k3),
            "equal_share": round(measured.equal / measured.tokens, 4),
            "flip_share": round(measured.flips / measured.pairs, 5) if measured.pairs else None,
            "flipped_tokens": self.flipped.tokens if self.flipped else None,
            "flipped_p99": _four_digits(self.flipped.p99) if self.flipped else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """The engine's samples, as the trainer reads them."""

    ids_BT: Tensor
    """int64."""
    prompt_tokens: int
    logprobs_N: Floats
    routes_MSk: Tensor | None
    """int64, ``NO_ROUTE`` for the last token of each session, which was never read."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_numerics(numerics_options(names(options.contestants), quick=options.quick))


def bench_numerics(options: NumericsOptions | None = None) -> dict[str, Json]:
    """Measure all rows and return the bench object; the model is trained on the first call.

    Engines that cannot run are rows with the reason.
    """
    chosen = options or NumericsOptions()
    threads = torch.get_num_threads()
    started_s = time.monotonic()
    try:
        torch.set_num_threads(len(available_cores()))
        model = trained_model(chosen.schooling, chosen.cache, _say)
        with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
            rows: list[Row] = []
            with so_far() as measured:
                for name in chosen.formats:
                    rows += _rows(name, model, chosen, Path(scratch))
    finally:
        torch.set_num_threads(threads)
    figures: dict[str, Json] = {
        "model": chosen.schooling.model.name,
        "results": [row.to_json() for row in rows],
        "goals": judged_rows(rows),
    }
    return envelope("numerics", time.monotonic() - started_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people: engine by engine, a row for each of the trainer's arithmetics."""
    columns = ("case", "mean_abs", "p99", "max", "k1", "k3", "equal_share", "flip_share", "flipped_p99", "tokens")
    return results_page(result, columns, str(result["model"]), under="contestant")


def _four_digits(figure: float) -> float:
    return float(f"{figure:.4g}") + 0.0  # no negative zero


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(name: str, model: TrainedModel, options: NumericsOptions, scratch: Path) -> Iterator[Row]:
    """All rows of one format."""
    prompts = model.excerpts(options.sessions, options.prompt_tokens, seed=options.seed)
    order = Order(prompts=prompts, new_tokens=options.new_tokens, temperature=1.0, seed=options.seed)
    for engine in options.engines:
        _say(f"{engine}, {name}")
        arithmetic = "invariant" if engine == "native-invariant" else "fast"
        trained = load_trained(model.folder, NumericsConfig.model_validate(FORMATS[name] | {"arithmetic": arithmetic}))
        try:
            samples = _sample(engine, name, model.folder, order, scratch)
        except InfrastructureError as error:
            yield Row(engine=engine, format=name, mode="none", missing=str(error))
            continue
        if arithmetic == "invariant":
            yield _compared(engine, name, "invariant", trained, samples, None)
            continue
        flipped_N = None if samples.routes_MSk is None else _flipped(trained, samples)
        for mode in REPLAYS:
            if engine in ROUTED or mode == "none":
                yield _compared(engine, name, mode, trained, samples, flipped_N)
            else:
                yield Row(engine=engine, format=name, mode=mode, missing=f"{engine} returns no routes on a CPU")


def _sample(engine: str, name: str, master: Path, order: Order, scratch: Path) -> Samples:
    """Let an engine sample. Raises :class:`~etude.errors.InfrastructureError` when it cannot."""
    says = FORMATS[name]
    experts = says.get("experts", "plain")
    native = engine.startswith("native-")
    setup = Setup(
        contestant=engine,
        folder=str(master if native or experts == "plain" else _decoded(name, master, scratch)),
        dtype=says["dtype"],
        cores=available_cores()[-1:],
        experts=experts if native else "plain",
        routes=engine in ROUTED or native,
    )
    with Worker(setup, scratch / f"{engine}.log") as worker:
        worker.await_ready()
        sampled = worker.sample(order)
    return _samples(order, sampled)


def _decoded(name: str, master: Path, scratch: Path) -> Path:
    """The published weights of a format as a checkpoint without formats, for engines that know none."""
    config = NumericsConfig.model_validate(FORMATS[name])
    folder = scratch / name
    if not folder.exists():
        trained = load_trained(master, config)
        state = decoded_state(published_state(trained, config), config)
        plain = {tensor_name: tensor.to(DTYPES[config.dtype]) for tensor_name, tensor in state.items()}
        save_checkpoint(folder, trained.spec, plain, end_id=END_ID, pad_id=PAD_ID)
    return folder


def _samples(order: Order, sampled: Sequence[dict[str, Any]]) -> Samples:
    rows = [[*prompt, *one["token_ids"]] for prompt, one in zip(order.prompts, sampled, strict=True)]
    routes_MSk = None
    if all(one["routes"] for one in sampled):
        routes_BTSk = torch.tensor([one["routes"] for one in sampled])
        unread_B1Sk = torch.full_like(routes_BTSk[:, :1], NO_ROUTE)
        routes_MSk = torch.cat([routes_BTSk, unread_B1Sk], 1).flatten(0, 1)
    return Samples(
        ids_BT=torch.tensor(rows),
        prompt_tokens=len(order.prompts[0]),
        logprobs_N=np.array([one["logprobs"] for one in sampled], np.float32).ravel(),
        routes_MSk=routes_MSk,
    )


def _flipped(trained: Decoder, samples: Samples) -> Mask:
    """[N] sampled tokens whose own forward pass goes to other experts than in the engine, in any layer."""
    routing = Routing(record=True)
    _scored(trained, samples, routing)
    assert samples.routes_MSk is not None
    same_MSk = _agreed(routing, samples.routes_MSk)
    same_BT = same_MSk.flatten(1).all(-1).view(samples.ids_BT.shape)
    flipped: Mask = (~same_BT[:, samples.prompt_tokens - 1 : -1]).flatten().numpy()
    return flipped


def _compared(engine: str, name: str, mode: str, trained: Decoder, samples: Samples, flipped_N: Mask | None) -> Row:
    """Score an engine's tokens with the trainer's model."""
    floor = REPLAYS.get(mode)
    routing = Routing(record=True) if floor is None else Routing(replay=samples.routes_MSk, floor=floor)
    trained_N = _scored(trained, samples, routing)
    pairs, flips = route_flips(routing, samples.routes_MSk) if floor is None else (routing.pairs, routing.flips)
    differences_N = trained_N - samples.logprobs_N
    return Row(
        engine=engine,
        format=name,
        mode=mode,
        mean=float(np.abs(differences_N).astype(np.float64).mean()),
        mismatch=summarise(differences_N, pairs=pairs, flips=flips),
        flipped=None if flipped_N is None else summarise(differences_N[flipped_N]),
    )


@torch.inference_mode()
def _scored(trained: Decoder, samples: Samples, routing: Routing) -> Floats:
    """[N] the trainer's logprobs of the sampled tokens."""
    ids_BT = samples.ids_BT
    hidden_TH = trained.forward_packed(ids_BT.flatten(), (ids_BT.shape[1],) * len(ids_BT), routing)
    hidden_BTH: Tensor = hidden_TH.unflatten(0, ids_BT.shape)
    hidden_NH = hidden_BTH[:, samples.prompt_tokens - 1 : -1].flatten(0, 1)
    ids_N = ids_BT[:, samples.prompt_tokens :].flatten()
    logprobs_N = trained.arithmetic.logprobs(trained.logits(hidden_NH), ids_N, torch.ones(len(ids_N)), None)
    scored: Floats = logprobs_N.numpy()
    return scored


def route_flips(routing: Routing, engine_MSk: Tensor | None) -> tuple[int, int]:
    """Pairs of token and expert that the engine recorded, and those of them that the trainer did not choose."""
    if engine_MSk is None:
        return 0, 0
    known_MSk = engine_MSk != NO_ROUTE
    return int(known_MSk.sum()), int((known_MSk & ~_agreed(routing, engine_MSk)).sum())


def _agreed(routing: Routing, engine_MSk: Tensor) -> Tensor:
    """[M,S,k] whether the trainer chose the engine's expert, too."""
    return (engine_MSk.unsqueeze(-1) == routing.recorded().unsqueeze(-2)).any(-1)


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def judged_rows(rows: Sequence[Row]) -> dict[str, Json]:
    """Both goals; without a value, and not met, where their rows are missing."""
    exact = {row.format: row.mismatch.max for row in rows if row.mode == "invariant" and row.mismatch}
    removed = _removed(rows, lambda row: row.mismatch)
    worst, judged = max(exact.values(), default=None), removed.get(JUDGED_ENGINE)
    return {
        INVARIANT.name: INVARIANT.judge(worst) | {"value": worst, "each": dict(exact)},
        REPLAY.name: REPLAY.judge(judged)
        | {
            "engine": JUDGED_ENGINE,
            "each": dict(removed),
            "each_of_flipped": dict(_removed(rows, lambda row: row.flipped)),
        },
    }


def _removed(rows: Sequence[Row], tokens: Callable[[Row], Mismatch | None]) -> dict[str, float]:
    """Engine → which part of the p99 of some of its ``tokens`` replay removes in the judged format."""
    p99 = {
        (row.engine, row.mode): measured.p99
        for row in rows
        if row.format == JUDGED_FORMAT and (measured := tokens(row)) is not None
    }
    return {
        engine: round(1 - p99[engine, "replay"] / p99[engine, "none"], 4)
        for engine in ROUTED
        if p99.get((engine, "none"), 0.0) > 0 and (engine, "replay") in p99
    }
