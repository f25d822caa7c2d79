"""The work and the output of `etude eval`.

    a version ──▶ tries ──▶ figures ──▶ a table, or JSON          two versions ──▶ … ──▶ and the difference of both

Tries are made by :mod:`etude.run.evaluate`, figures by :mod:`etude.dashboard.evaluation`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from etude.cli.console import console
from etude.cli.progress import progress_bar
from etude.dashboard.evaluation import Evaluation, Measure, differences, figures
from etude.dashboard.evaluation_text import comparison_table, evaluation_table
from etude.errors import ConfigError
from etude.run.evaluate import EvalRequest, evaluate
from etude.run.folder import RunFolder
from etude.run.run_url import is_run_url
from etude.run.working_folder import open_run_folder


def measure_run(folder: RunFolder, request: EvalRequest, measure: Measure, *, as_json: bool) -> None:
    """Try a version and print its figures. Raises :class:`~etude.errors.UserError`."""
    measured = figures(_tried(folder, request), measure)
    if as_json:
        _print_json(measured)
    else:
        console().print(evaluation_table(measured))


def compare_runs(folder: RunFolder, against: str, request: EvalRequest, measure: Measure, *, as_json: bool) -> None:
    """Evaluate two versions and print the difference of the run's version to ``against``.

    Raises :class:`~etude.errors.UserError`.
    """
    other, version = parse_against(against, folder)
    tasks = request.tasks or folder.config().eval.tasks
    before = _tried(other, replace(request, version=version, tasks=tasks))
    after = _tried(folder, replace(request, tasks=tasks))
    first, second, gained = figures(before, measure), figures(after, measure), differences(before, after, measure)
    if as_json:
        _print_json({"before": first, "after": second, "difference": gained})
    else:
        console().print(comparison_table(first, second, gained))


def parse_against(text: str, folder: RunFolder) -> tuple[RunFolder, int | None]:
    """Parse ``3`` as a version of this run, ``RUN:3`` as a version of another run, and ``RUN`` as its newest.

    Raises :class:`~etude.errors.UserError` where there is no such run.
    """
    if text.isdigit():
        return folder, int(text)
    path, colon, version = text.rpartition(":")
    if not colon or not version.isdigit():
        path, version = text, ""
    if not is_run_url(path) and not Path(path).is_dir():
        raise ConfigError(
            f"--against {text!r}: expected a version of this run, or another run's folder or URL: RUN or RUN:7"
        )
    return open_run_folder(path), int(version) if version else None


def _tried(folder: RunFolder, request: EvalRequest) -> Evaluation:
    version = "the newest version" if request.version is None else f"v{request.version}"
    with progress_bar(f"{folder.path.name} {version}") as progress:
        return evaluate(folder, request, progress)


def _print_json(figures: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
