"""The parity gate: engine against trainer on one model, shown layer by layer, and a run stopped where they disagree.

Owns which models are compared and how the comparison is shown; the comparison itself is :mod:`etude.run.parity`'s.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.config.recipe import RunConfig
from etude.dashboard import units
from etude.errors import MismatchError
from etude.models.checkpoint import load_checkpoint, load_spec, load_state, spec_from_config
from etude.models.spec import ModelSpec
from etude.run.folder import RunFolder
from etude.run.numerics import load_published, published_state, training_model
from etude.run.parity import WAYS, LayerDifference, Parity, check_parity
from etude.run.resolve import resolve_device
from etude.run.tensors import to_tensors
from etude.run.weight_log import open_log
from etude.tokens.jinja import load_format
from etude.trainer.mismatch import Rung
from etude.weights.pull import pull

SEED_STD = 0.1
"""Spread of the weights of a model that is made up: wide enough that experts are chosen for a reason."""
GOOD, WARN, DIM = "green", "yellow", "bright_black"
"""Colours of what agrees, what does not, and what is beside it."""


def gate(folder: RunFolder) -> None:
    """Let a run go on only if its engine and its trainer agree. Raises :class:`~etude.errors.MismatchError`."""
    config = folder.config()
    torch.set_num_threads(config.trainer.threads)
    parity = parity_of_run(folder, config)
    show_parity(parity, Console(width=100))
    if not parity.passed:
        raise MismatchError(verdict(parity))


def parity_of_run(folder: RunFolder, config: RunConfig) -> Parity:
    """Engine against trainer on the newest published weights of a run, with the numbers of ``config``."""
    device = resolve_device(config.engine.device)
    spec, published = load_spec(folder.model), to_tensors(pull(open_log(folder)).state)
    trained_as = folder.config().numerics
    if config.numerics != trained_as:
        model = training_model(spec, trained_as, device)
        load_published(model, published, trained_as)
        published = published_state(model, config.numerics)
    return check_parity(spec, published, config.numerics, device)


def parity_of_model(checkpoint: Path | None, config: RunConfig) -> Parity:
    """Engine against trainer on a checkpoint in Hugging Face's form, or on a random model of the recipe's shape.

    Raises :class:`~etude.errors.DamagedError` for a checkpoint that no run could start from: without a tokenizer or a
    chat template, too.
    """
    device = resolve_device(config.engine.device)
    if checkpoint is None:
        spec, state = spec_from_config(config.model, config.model.vocab_size), None
    else:
        load_format(checkpoint)
        spec, state = load_checkpoint(checkpoint)
    return check_parity(spec, _published(spec, state, config.numerics, device), config.numerics, device)


def show_parity(parity: Parity, console: Console) -> None:
    """Print the comparison, layer by layer, and the verdict: largest difference and share of equal numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style=DIM)
    table.add_column("", no_wrap=True)
    for way in WAYS:
        table.add_column(way)
    table.add_column("flips", justify="right")
    rows: dict[str, list[LayerDifference]] = {}
    for layer in parity.layers:
        rows.setdefault(layer.name, []).append(layer)
    for name, layers in rows.items():
        flips = [layer.flips for layer in layers if layer.flips is not None]
        style = WARN if parity.first in layers else ""
        table.add_row(Text(name, style), *(_cell(layer) for layer in layers), str(sum(flips)) if flips else "")
    console.print(table)
    console.print(Text(f"\n{verdict(parity)}", GOOD if parity.passed and parity.rung is Rung.CLEAR else WARN))


def verdict(parity: Parity) -> str:
    """What the comparison came to, in a sentence; it names the first part that differs."""
    found = parity.sampled
    compared = f"{found.tokens} sampled tokens: k3 {units.small(found.k3)}, max {units.small(found.max)}"
    if parity.exact:
        return f"engine and trainer agree to the last bit, in every layer; {compared}"
    first = "only logprobs differ" if parity.first is None else f"{parity.first.name} ({parity.first.way}) is the first"
    if parity.invariant:
        return f"engine and trainer differ although the arithmetic is invariant: {first}; {compared}"
    words = {Rung.CLEAR: "agree", Rung.WARN: "agree badly", Rung.STOP: "disagree"}[parity.rung]
    return f"engine and trainer {words}; {compared}; {first} to differ in any bit"


def _published(
    spec: ModelSpec, state: Mapping[str, Tensor] | None, numerics: NumericsConfig, device: str
) -> dict[str, Tensor]:
    model = training_model(spec, numerics, device)
    if state is None:
        model.initialise(seed=0, std=SEED_STD)
    else:
        load_state(model, state)
    return published_state(model, numerics)


def _cell(layer: LayerDifference) -> Text:
    if layer.equal == 1:
        return Text("equal", GOOD)
    percent = units.percent(int(layer.equal * 1000) / 1000)
    return Text.assemble(units.small(layer.max_abs), (f"  {percent}", DIM))
