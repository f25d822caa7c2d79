"""`etude eval`: which versions of which runs, and how their figures reach somebody.

    a version ──▶ tries ──▶ figures ──▶ a table, or JSON          two versions ──▶ … ──▶ and the difference of both

Owns that and the progress on the way. Tries are :mod:`etude.run.evaluate`'s, figures
:mod:`etude.dashboard.evaluation`'s.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from etude.cli.commands.show import console
from etude.dashboard.evaluation import Evaluation, Measure, comparison_table, differences, evaluation_table, figures
from etude.errors import ConfigError
from etude.run.evaluate import EvalRequest, Progress, evaluate
from etude.run.folder import RunFolder
from etude.types import Json


def measure_run(folder: RunFolder, wanted: EvalRequest, measure: Measure, *, as_json: bool) -> None:
    """Try a version and print its figures. Raises :class:`~etude.errors.UserError`."""
    found = figures(_tried(folder, wanted), measure)
    if as_json:
        _print_json(found)
    else:
        console().print(evaluation_table(found))


def compare_runs(folder: RunFolder, against: str, wanted: EvalRequest, measure: Measure, *, as_json: bool) -> None:
    """Try two versions and print what the run's has over the one it is set ``against``.

    Raises :class:`~etude.errors.UserError`.
    """
    other, version = parse_against(against, folder)
    tasks = wanted.tasks or folder.config().eval.tasks
    before = _tried(other, replace(wanted, version=version, tasks=tasks))
    after = _tried(folder, replace(wanted, tasks=tasks))
    first, second, gained = figures(before, measure), figures(after, measure), differences(before, after, measure)
    if as_json:
        _print_json({"before": first, "after": second, "difference": gained})
    else:
        console().print(comparison_table(first, second, gained))


def parse_against(text: str, folder: RunFolder) -> tuple[RunFolder, int | None]:
    """``3`` as a version of this run; ``RUN`` or ``RUN:3`` as one of another, the newest unless it is said.

    Raises :class:`~etude.errors.UserError` where there is no such run.
    """
    if text.isdigit():
        return folder, int(text)
    path, colon, version = text.rpartition(":")
    if not colon or not version.isdigit():
        path, version = text, ""
    if not Path(path).is_dir():
        raise ConfigError(f"--against {text!r}: expected a version of this run, or another run's folder: RUN or RUN:7")
    return RunFolder.open(Path(path)), int(version) if version else None


def _tried(folder: RunFolder, wanted: EvalRequest) -> Evaluation:
    version = "the newest version" if wanted.version is None else f"v{wanted.version}"
    with _progress(f"{folder.path.name} {version}") as progress:
        return evaluate(folder, wanted, progress)


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Progress]:
    """A bar on a terminal while the context is open, beside what is printed; nothing elsewhere."""
    out = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=out, transient=True, disable=not out.is_terminal) as bars:
        bar = bars.add_task(title, total=None)
        yield lambda ended, planned: bars.update(bar, completed=ended, total=planned)


def _print_json(found: Mapping[str, Json]) -> None:
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
