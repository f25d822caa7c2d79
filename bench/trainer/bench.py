"""`bench trainer`: one optimiser step of our trainer beside ``transformers.Trainer``, on the same weights.

    a checkpoint, sequences ──▶ a process per contestant ──▶ in turn: the machine's matmul peak, then one step

Every contestant trains the same model on the same sequences, whose lengths are those of rollouts, with as many threads,
in the same type: parameters and moments in float32. On a CPU all are started together and take turns, step by step, so
that a machine that slows down slows down all of them; a card has room for one at a time. Tokens are those of the
sequences, never padding. Ours takes the policy gradient, entropy and importance weights included, theirs the next-token
loss of the same tokens.

A share of the peak counts the operations that the model must do (:mod:`etude.models.flops`; three forward passes, of
the output matrix only for tokens that have a loss), whatever a contestant really did, over what the fastest product of
two large square matrices reaches in the same process: model FLOPs utilisation, against the machine instead of its data
sheet. On a GPU the data sheet's is printed as well.

``--sft`` is a step of our SFT instead, on conversations that begin alike, beside the same. Ours computes what they
begin with once (``rows_computed`` is the share of the rows); counted are all, which the model must read.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

from bench.engine.models import MOE_20M, QUICK_MODEL, BenchModel, write_model
from bench.engine.worker import available_cores
from bench.options import add_contestants, names
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from bench.trainer.contestants import CONTESTANTS, Setup, sequences
from bench.trl_environment import Rival, open_rival, trl_python
from etude.errors import InfrastructureError, UserError
from etude.models.fast import multiplies_bfloat16
from etude.models.flops import head_flops, pair_flops, token_flops
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.types import Json

TOKENS_VS_TRANSFORMERS = Goal(
    "tokens_vs_transformers",
    "at least",
    1.0,
    "Tokens trained per second, over those of the faster of transformers' two ways.",
)
PEAK_SHARE = Goal(
    "peak_share",
    "at least",
    0.6,
    "Needed operations per second, as a share of this machine's fastest product of matrices.",
)
CARD_PEAK_SHARE = Goal(
    "peak_share",
    "at least",
    0.4,
    "Needed operations per second, as a share of this card's fastest product of matrices.",
)
MESSAGE_DEADLINE_S = 900.0
"""For each message of a contestant: that it is ready, or that a step is done."""
SHEET_PEAKS: Mapping[str, float] = MappingProxyType({"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12})
"""Part of a card's name → bfloat16 operations per second, dense, as its data sheet has them."""

MOE_1B = BenchModel(
    name="moe-1b",
    spec=ModelSpec(
        vocab_size=32_768,
        hidden_size=1024,
        layers=16,
        attention=GroupedSpec(heads=16, kv_heads=4, head_dim=64, normed=True),
        experts=ExpertsSpec(count=32, per_token=4, size=512),
        sparse_layers=tuple(range(16)),
        max_positions=4096,
        tied=False,
    ),
)
"""Model of a GPU: about a billion parameters, 32 experts, 4 per token."""

DENSE_135M = BenchModel(
    name="dense-135m",
    spec=ModelSpec(
        vocab_size=49_152,
        hidden_size=576,
        layers=30,
        attention=GroupedSpec(heads=9, kv_heads=3, head_dim=64),
        dense_size=1536,
        max_positions=8192,
        tied=True,
    ),
)
"""SmolLM2-135M's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """Options of the measurement."""

    contestants: tuple[str, ...]
    model: BenchModel
    setup: Setup
    """Options of all contestants, except name and folder."""
    apart: bool = False
    """True if contestants run one after the other also on a CPU, whose memory may not hold all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one contestant."""

    contestant: str
    seconds: tuple[float, ...] = ()
    """Seconds of each step, without the first."""
    tokens: int = 0
    """Tokens of one step."""
    flops: float = 0.0
    """Operations that one step needs."""
    peak: float = 0.0
    """Operations per second of the machine."""
    memory_bytes: int | None = None
    """The most that a step took: of the card's tensors, or of the process."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    missing: str | None = None
    """Why it could not run."""

    @property
    def tokens_per_s(self) -> float:
        """In the step of median length."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def peak_share(self) -> float:
        """Needed operations as a share of the peak."""
        return self.flops / statistics.median(self.seconds) / self.peak

    def to_json(self) -> dict[str, Json]:
        """The printed row."""
        row: dict[str, Json] = {"contestant": self.contestant, "missing": self.missing}
        if self.missing is not None:
            return row
        return row | {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "step_s": round(statistics.median(self.seconds), 4),
            "step_s_range": [round(min(self.seconds), 4), round(max(self.seconds), 4)],
            "peak_share": round(self.peak_share, 4),
            "gflops": round(self.peak_share * self.peak / 1e9, 1),
            "peak_gflops": round(self.peak / 1e9, 1),
            "memory_bytes": self.memory_bytes,
            "settings": dict(self.settings),
        }


def trainer_options(contestants: tuple[str, ...] | None = None, *, quick: bool = False) -> TrainerOptions:
    """Options of a call on this machine; ``None`` stands for all contestants, or only ours if ``quick``.

    A quick call checks that everything runs, not its speed. Raises :class:`~etude.errors.UserError` for an unknown one.
    """
    on_card = torch.cuda.is_available()
    everyone = tuple(
        name for name in CONTESTANTS if name != "etude-sft" and not (on_card and name == "etude-invariant")
    )
    chosen = contestants or (tuple(name for name in everyone if name.startswith("etude")) if quick else everyone)
    if unknown := sorted(set(chosen) - set(everyone)):
        raise UserError(f"bench trainer: no contestant {unknown[0]!r} here; there are {', '.join(everyone)}")
    model = QUICK_MODEL if quick else MOE_1B if on_card else MOE_20M
    setup = Setup(
        contestant=chosen[0],
        folder="",
        device="cuda" if on_card else "cpu",
        dtype="bfloat16" if on_card else "float32",
        threads=len(available_cores()),
        vocabulary=model.spec.vocab_size,
        sequences=48,
        longest=640,
        microbatch_tokens=16 * 640,
        steps=5,
        seed=0,
    )
    if quick:
        setup = replace(setup, sequences=4, longest=64, microbatch_tokens=128, steps=1)
    elif on_card:
        setup = replace(setup, sequences=256, microbatch_tokens=64 * 640, steps=10)
    return TrainerOptions(contestants=chosen, model=model, setup=setup)


def sft_options(contestants: tuple[str, ...] | None = None, *, quick: bool = False) -> TrainerOptions:
    """The options of SFT on this machine's processor: a step of recipes/pretrained, on random weights.

    Products are bfloat16 where the processor multiplies these faster, for everybody. Raises
    :class:`~etude.errors.UserError` for an unknown contestant.
    """
    everyone = ("etude-sft", "transformers-padded", "transformers-packed")
    chosen = contestants or (everyone[:1] if quick else everyone)
    if unknown := sorted(set(chosen) - set(everyone)):
        raise UserError(f"bench trainer --sft: no contestant {unknown[0]!r} here; there are {', '.join(everyone)}")
    model = QUICK_MODEL if quick else DENSE_135M
    setup = Setup(
        contestant=chosen[0],
        folder="",
        device="cpu",
        dtype="bfloat16" if multiplies_bfloat16() else "float32",
        threads=len(available_cores()),
        vocabulary=model.spec.vocab_size,
        sequences=4 if quick else 16,
        longest=80,
        microbatch_tokens=16 * 80,
        steps=1 if quick else 3,
        seed=0,
        conversations=True,
    )
    return TrainerOptions(contestants=chosen, model=model, setup=setup)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)
    parser.add_argument("--sft", action="store_true", help="a step of SFT on a model of 135M parameters, on the CPU")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    choose = sft_options if options.sft else trainer_options
    return bench_trainer(choose(names(options.contestants), quick=options.quick))


def bench_trainer(options: TrainerOptions | None = None) -> dict[str, Json]:
    """Measure and return the bench object. Contestants that cannot run, or fail, are rows with the reason."""
    chosen = options or trainer_options()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        write_model(chosen.model, Path(scratch) / "model", seed=0)
        rows: dict[str, Row] = {}
        with so_far() as measured:
            asyncio.run(_measure(chosen, Path(scratch), rows))
    figures: dict[str, Json] = {
        "model": chosen.model.name,
        "device": torch.cuda.get_device_name() if chosen.setup.device == "cuda" else "cpu",
        "dtype": chosen.setup.dtype,
        "threads": chosen.setup.threads,
        "results": [row.to_json() | _of_sheet(row, chosen.setup.device) for row in rows.values()],
        "goals": goals(list(rows.values()), on_card=chosen.setup.device == "cuda"),
    }
    return envelope("trainer", time.monotonic() - started_s, figures, interrupted=measured.interrupted)


def step_flops(spec: ModelSpec, setup: Setup) -> tuple[int, float]:
    """Tokens of a step, and operations that it needs: forward once, backward twice as much."""
    examples = sequences(setup)
    lengths = [len(example.token_ids) for example in examples]
    sampled = sum(sum(example.sampled) for example in examples)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    forward = token_flops(spec) * sum(lengths) + pair_flops(spec) * pairs + head_flops(spec) * sampled
    return sum(lengths), 3.0 * forward


def goals(rows: Sequence[Row], *, on_card: bool) -> dict[str, Json]:
    """Our better arithmetic beside the better of transformers' ways, and beside the machine."""
    measured = [row for row in rows if row.missing is None]
    ours = max((row for row in measured if row.contestant.startswith("etude")), key=_rate, default=None)
    theirs = max((row for row in measured if row.contestant.startswith("transformers")), key=_rate, default=None)
    reasons = "; ".join(sorted({str(row.missing) for row in rows if row.missing}))
    ratio = None if ours is None or theirs is None else ours.tokens_per_s / theirs.tokens_per_s
    judged = TOKENS_VS_TRANSFORMERS.judge(ratio, reasons or None)
    if ours is not None and theirs is not None:
        judged |= {"ours": ours.contestant, "theirs": theirs.contestant}
    share = None if ours is None else round(ours.peak_share, 3)
    return {
        TOKENS_VS_TRANSFORMERS.name: judged,
        PEAK_SHARE.name: (CARD_PEAK_SHARE if on_card else PEAK_SHARE).judge(share),
    }


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    columns = ("contestant", "tokens_per_s", "step_s", "peak_share", "gflops", "peak_gflops")
    return results_page(result, columns, str(result["model"]), str(result["device"]), str(result["dtype"]))


async def _measure(options: TrainerOptions, scratch: Path, rows: dict[str, Row]) -> None:
    """Measure all contestants, concurrently if there is room; ``rows`` has the results so far."""
    names = options.contestants
    heats = [(name,) for name in names] if options.apart or options.setup.device != "cpu" else [names]
    for heat in heats:
        await _race(heat, options, scratch, rows)


async def _race(names: Sequence[str], options: TrainerOptions, scratch: Path, rows: dict[str, Row]) -> None:
    """Steps in turn; who cannot start, or fails, is a row with the reason."""
    tokens, flops = step_flops(options.model.spec, options.setup)
    rows |= {name: Row(contestant=name, tokens=tokens, flops=flops) for name in names}
    async with AsyncExitStack() as stack:
        rivals: dict[str, Rival] = {}
        for name in names:
            try:
                rivals[name] = await stack.enter_async_context(_opened(name, options.setup, scratch))
                ready = await rivals[name].receive(MESSAGE_DEADLINE_S)
                assert ready is not None and isinstance(ready["settings"], dict)
                rows[name] = replace(rows[name], settings=ready["settings"])
            except InfrastructureError as error:
                rows[name] = replace(rows[name], missing=str(error))
        for turn in range(options.setup.steps + 1):
            for name in names:
                if rows[name].missing is None:
                    rows[name] = await _step(rivals[name], rows[name], timed=turn > 0)


def _opened(name: str, setup: Setup, scratch: Path) -> AbstractAsyncContextManager[Rival]:
    python = Path(sys.executable) if name.startswith("etude") else trl_python()
    settings = asdict(replace(setup, contestant=name, folder=str(scratch / "model")))
    return open_rival("trainer.worker", settings, python=python, threads=setup.threads, log=scratch / f"{name}.log")


async def _step(rival: Rival, row: Row, *, timed: bool) -> Row:
    """One step more; the first one compiles and allocates, and does not count."""
    try:
        await rival.answer({"go": True})
        message = await rival.receive(MESSAGE_DEADLINE_S)
    except InfrastructureError as error:
        return replace(row, missing=str(error))
    assert message is not None and isinstance(message["seconds"], float) and isinstance(message["peak"], float)
    seconds = (*row.seconds, message["seconds"]) if timed else row.seconds
    memory = message["memory_bytes"]
    assert memory is None or isinstance(memory, int)
    memory_bytes = None if memory is None else max(memory, row.memory_bytes or 0)
    return replace(row, seconds=seconds, peak=max(row.peak, message["peak"]), memory_bytes=memory_bytes)


def _rate(row: Row) -> float:
    return row.tokens_per_s


def _of_sheet(row: Row, device: str) -> dict[str, Json]:
    """The share of the data sheet's peak, for a card whose sheet we know."""
    if device == "cpu" or row.missing is not None:
        return {}
    name = torch.cuda.get_device_name()
    sheet = next((peak for part, peak in SHEET_PEAKS.items() if part in name), None)
    return {"sheet_share": None if sheet is None else round(row.peak_share * row.peak / sheet, 4)}
