"""The tries of `etude suite run|compare|report`: made and stored, then shown as tables, JSON or a page.

Tries are made by :mod:`etude.run.suite`, figures by :mod:`etude.dashboard.evaluation`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.cli.commands.suite import DEFAULT_HARNESS
from etude.cli.console import console
from etude.cli.progress import progress_bar
from etude.config.loading import is_recipe, read_tree
from etude.dashboard.evaluation import differences, figures, read_prices
from etude.dashboard.evaluation_text import comparison_table, evaluation_table
from etude.dashboard.suite_report import report_page, report_rows, report_table
from etude.dashboard.suite_results import RESULTS_FILE, SuiteResults, common_tasks, read_results
from etude.errors import ConfigError
from etude.gateway.upstream.calls import Upstream
from etude.run.suite import Suite, TryLimits, try_config, try_model, try_version
from etude.run.working_folder import open_run_folder


def try_api(
    suite: Suite, upstream: Upstream, harness: str, overrides: Sequence[str], limits: TryLimits, out: Path
) -> SuiteResults:
    """Try a model behind a URL, with a harness of a kind or of a recipe.

    Raises :class:`~etude.errors.UserError`.
    """
    config = try_config(suite, _harness_section(harness), limits, overrides)
    with progress_bar(f"{suite.name} · {upstream.model}") as progress:
        return try_model(suite, config, upstream, limits, out, progress)


def try_run(suite: Suite, run: str, limits: TryLimits, out: Path) -> SuiteResults:
    """Try weights of a run: its newest, or those of ``RUN:VERSION``. Raises :class:`~etude.errors.UserError`."""
    path, colon, version = run.rpartition(":")
    if not colon or not version.isdigit():
        path, version = run, ""
    folder = open_run_folder(path)
    with progress_bar(f"{suite.name} · {folder.path.name}") as progress:
        return try_version(suite, folder, int(version) if version else None, limits, out, progress)


def show_results(results: SuiteResults, out: Path, *, as_json: bool) -> None:
    """Print the figures of tries that are stored in a folder."""
    if as_json:
        _print_json(results.to_json())
    else:
        console().print(evaluation_table(figures(results.evaluation(), results.measure())))
        console().print(f"\n{len(results.tries)} tries, {len(results.missing())} missing: {out / RESULTS_FILE}")


def show_comparison(before: Path, after: Path, prices: tuple[float, float, float] | None, *, as_json: bool) -> None:
    """Print paired differences of two results on their common tasks. Raises :class:`~etude.errors.ConfigError`."""
    first, second = (_priced(read_results(place), prices) for place in (before, after))
    common, measure = common_tasks(first, second), first.measure(sorted({1, min(first.passes, second.passes)}))
    if second.pass_at != first.pass_at:
        raise ConfigError(f"a try of one passes at {first.pass_at:g}, of the other at {second.pass_at:g}: --pass-at")
    tries = first.evaluation(common), second.evaluation(common)
    before_figures, after_figures = (figures(each, measure) for each in tries)
    gained = differences(tries[0], tries[1], measure)
    if as_json:
        _print_json({"tasks": common, "before": before_figures, "after": after_figures, "difference": gained})
    else:
        console().print(comparison_table(before_figures, after_figures, gained))


def show_report(
    results: Sequence[Path], html: Path | None, prices: tuple[float, float, float] | None, *, as_json: bool
) -> None:
    """Print several results as a table, and write a page with plots. Raises :class:`~etude.errors.ConfigError`."""
    rows = report_rows([_priced(read_results(place), prices) for place in results])
    if html is not None:
        html.write_text(report_page(rows), encoding="utf-8")
    if as_json:
        _print_json({"rows": [{"results": row.results.title, "figures": row.figures} for row in rows]})
    else:
        console().print(report_table(rows))
        if html is not None:
            console().print(f"\n{html}")


def _harness_section(given: str) -> dict[str, Any]:
    """``[harness]`` by a kind's name or out of a recipe. Raises :class:`~etude.errors.ConfigError`."""
    if not is_recipe(Path(given)):
        return {"kind": given}
    tree, file = read_tree(Path(given))
    section = tree.get("harness")
    if not isinstance(section, dict):
        raise ConfigError(f"--harness {given!r}: {file} has no [harness]: name a kind, such as {DEFAULT_HARNESS!r}")
    return section


def _priced(results: SuiteResults, prices: tuple[float, float, float] | None) -> SuiteResults:
    return results if prices is None else replace(results, prices=read_prices(prices))


def _print_json(tree: object) -> None:
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")
