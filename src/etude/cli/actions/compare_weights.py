"""`etude weights diff`: compares two versions, tensor by tensor."""

from collections.abc import Iterator

import numpy as np

from etude.cli.actions.weight_store import log_of
from etude.cli.console import console
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.weights.pull import pull
from etude.weights.replica import PulledWeights

MOST_TENSORS = 20
"""Tensors that a comparison shows: those that changed most."""


def compare_versions(store: str, first: int, second: int, *, every: bool, log_id: str | None) -> None:
    """Print the share of numbers that changed, for ``every`` tensor or for those that changed most."""
    log = log_of(store, log_id=log_id)
    before, after = pull(log, first), pull(log, second)
    table = light_table("changed", ">numbers", "type", "shape", "tensor")
    rows = sorted(_differences(before, after), key=lambda row: -row[3] / max(1, row[2]))
    for name, kind, numbers, changed in rows if every else rows[:MOST_TENSORS]:
        shape = "×".join(map(str, after.state[name].spec.shape)) or "scalar"
        table.add_row(f"{changed / max(1, numbers):.3%}", formatting.brief(numbers), kind, shape, name)
    console().print(table)
    if not every and len(rows) > MOST_TENSORS:
        console().print(f"and {len(rows) - MOST_TENSORS} more tensors: --all")
    numbers, changed = sum(row[2] for row in rows), sum(row[3] for row in rows)
    console().print(f"{changed:,} of {numbers:,} numbers differ: {changed / max(1, numbers):.3%}")


def _differences(before: PulledWeights, after: PulledWeights) -> Iterator[tuple[str, str, int, int]]:
    """(tensor, type, numbers, changed numbers) of every tensor that both versions have."""
    for name, tensor in after.state.items():
        other = before.state.get(name)
        if other is not None and other.spec == tensor.spec:
            changed = int(np.count_nonzero(other.numbers != tensor.numbers))
            yield name, tensor.spec.dtype, len(tensor.numbers), changed
