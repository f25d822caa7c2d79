"""``python -m bench.fleet.expected``: the whole demo's run on one machine, in minutes; writes ``expected.json`` beside.

The same seed, start, steps and held-out tasks, without a fleet: what ``pass_rate_gap`` compares with.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.fleet.demo import RECIPE
from bench.fleet.plan import MEASURED, TWO_KINDS, whole_plan
from bench.starts import prepared_start, starting_from
from etude.config.loading import load_recipe
from etude.run.folder import RunFolder
from etude.run.local import run_local

EXPECTED = Path(__file__).with_name("expected.json")
WRITTEN = ("date", "commit", "machine", "seed", "steps", "heldout")
"""Parts of the run's report that are written."""


def expected() -> Mapping[str, float]:
    """Held-out pass rates on one machine and their standard errors, by their names in a report."""
    heldout: Mapping[str, float] = json.loads(EXPECTED.read_text(encoding="utf-8"))["heldout"]
    return heldout


def measure() -> None:
    """Train, and write the results."""
    plan = whole_plan()
    start = prepared_start(load_recipe(RECIPE, plan.start))
    settings = (TWO_KINDS, *starting_from(start), *MEASURED, f"trainer.steps={plan.steps}")
    config = load_recipe(RECIPE, settings)
    with tempfile.TemporaryDirectory(prefix="etude-expected-") as scratch:
        report = run_local(RunFolder.create(Path(scratch) / "run", config), out=sys.stderr)
    written = {name: report[name] for name in WRITTEN}
    EXPECTED.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure()
