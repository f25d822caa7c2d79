"""`etude eval`: evaluates versions of runs on the held-out tasks and prints the figures as tables or JSON.

    a version ──▶ tries ──▶ figures ──▶ a table, or JSON          two versions ──▶ … ──▶ and the difference of both

Owns the options and the output. Tries are made by :mod:`etude.run.evaluate`, figures by
:mod:`etude.dashboard.evaluation`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.console import console
from etude.cli.options import Json, RunPath, group
from etude.cli.progress import progress_bar
from etude.dashboard.evaluation import Evaluation, Measure, TokenPrices, differences, figures
from etude.dashboard.evaluation_text import comparison_table, evaluation_table
from etude.errors import ConfigError
from etude.run.evaluate import EvalRequest, evaluate
from etude.run.folder import RunFolder
from etude.run.run_url import is_run_url
from etude.run.working_folder import open_run_folder

app = group()


@app.command(name="eval")
def evaluate_version(
    run: RunPath,
    *,
    version: Annotated[int | None, typer.Option(help="Weight version (default: the newest).")] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="VERSION|RUN[:VERSION]", help="Compare with another version, or one of another run."),
    ] = None,
    tasks: Annotated[int | None, typer.Option(help="Number of held-out tasks (default: the recipe's).")] = None,
    passes: Annotated[int, typer.Option(metavar="K", help="Sampled tries of each task.")] = 1,
    k: Annotated[
        str | None, typer.Option(metavar="K,…", help="The ks of pass@k that are shown (default: 1 and --passes).")
    ] = None,
    no_greedy: Annotated[bool, typer.Option("--no-greedy", help="Make sampled tries only.")] = False,
    pass_at: Annotated[
        float | None,
        typer.Option(metavar="X", help="Reward from which a try passes (default: the recipe's eval.pass_at)."),
    ] = None,
    prices: Annotated[
        tuple[float, float, float] | None,
        typer.Option(
            metavar="READ CACHED SAMPLED",
            help="Prices of a million tokens: new prompt tokens, prompt tokens of an earlier turn, sampled tokens.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a weight version of a run on the held-out tasks, or compare two."""
    folder = open_run_folder(run)
    ks = tuple(numbers("--k", k)) if k else tuple(sorted({1, passes}))
    if max(ks) > passes:
        raise ConfigError(f"--k {k}: pass@{max(ks)} takes as many tries of a task, raise --passes")
    request = EvalRequest(version=version, tasks=tasks, passes=passes, greedy=not no_greedy)
    measure = Measure(
        pass_at=folder.config().eval.pass_at if pass_at is None else pass_at,
        ks=ks,
        prices=prices and TokenPrices(new=prices[0], cached=prices[1], sampled=prices[2]),
    )
    if against is None:
        measure_run(folder, request, measure, as_json=as_json)
    else:
        compare_runs(folder, against, request, measure, as_json=as_json)


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


def numbers(option: str, listed: str) -> list[int]:
    """The whole numbers in a list with commas. Raises :class:`~etude.errors.ConfigError` naming the option."""
    try:
        return [int(number) for number in listed.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {listed!r}: expected whole numbers with commas, such as 1,4") from error
