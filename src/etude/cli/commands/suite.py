"""`etude suite`: evaluates models on a suite of tasks, compares them and their cost; builds and maintains suites.

    suite, a model behind a URL or of a run ──run──▶ results.json ──compare, report──▶ tables, a page

Owns options and what is printed. Tries are :mod:`etude.run.suite`'s, figures :mod:`etude.dashboard.evaluation`'s.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from etude.cli.commands.build_suite import (
    SuiteBuild,
    build,
    counted,
    fetch,
    halves_of,
    in_use,
    refresh,
    take_in,
    today,
    traces_in,
)
from etude.cli.commands.sandboxes import OUT, SandboxUrl, log, opened_provider, sandbox_config
from etude.cli.console import console
from etude.cli.options import Json, Overrides, group, key_in
from etude.cli.progress import progress_bar
from etude.config.loading import is_recipe, read_tree
from etude.config.tasks import MachineKind
from etude.dashboard.evaluation import TokenPrices, differences, figures
from etude.dashboard.evaluation_text import comparison_table, evaluation_table
from etude.dashboard.formatting import visible
from etude.dashboard.suite_report import report_page, report_rows, report_table
from etude.dashboard.suite_results import RESULTS_FILE, SuiteResults, common_tasks, read_results
from etude.errors import ConfigError
from etude.gateway.upstream.calls import Api, Upstream
from etude.run.model_calls import ask_each
from etude.run.suite import Suite, TryLimits, open_suite, try_config, try_model, try_version
from etude.run.working_folder import open_run_folder
from etude.taskgen.history.completions import MemoryCheck, check_memory
from etude.taskgen.history.contamination import Traces
from etude.taskgen.history.records import read_records
from etude.taskgen.preparation import Settings
from etude.tasks.suites import suite_of

DEFAULT_HARNESS = "shell"
"""Harness of a model that was not made for étude's own tools."""
KEY_VARIABLES: dict[str, str] = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
"""API → the variable in which its own clients look for a key."""

SuitePath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="SUITE", help="A suite's folder, tasks in Harbor's format, or a recipe.")
]
SuiteFolder: TypeAlias = Annotated[Path, typer.Argument(metavar="SUITE", help="A suite's folder.")]
Sandbox: TypeAlias = Annotated[MachineKind, typer.Option(help="Where commands run.")]
Results: TypeAlias = Annotated[Path, typer.Argument(help=f"A folder that `run --out` made, or its {RESULTS_FILE}.")]
Prices: TypeAlias = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        metavar="READ CACHED SAMPLED",
        help="Prices of a million tokens: prompt tokens, prompt tokens from the API's cache, sampled tokens.",
    ),
]

ModelName: TypeAlias = Annotated[str, typer.Option(metavar="NAME", help="Name of the model, as its API has it.")]
ModelUrl: TypeAlias = Annotated[
    str, typer.Option(metavar="URL", help="Base URL of an API, such as https://api.openai.com/v1.")
]
ModelApi: TypeAlias = Annotated[Api, typer.Option(help="The kind of API at that URL.")]
KeyVariable: TypeAlias = Annotated[
    str, typer.Option(metavar="VAR", help="Variable with the key (default: that of the API's own clients).")
]
ExtraFields: TypeAlias = Annotated[
    str, typer.Option(metavar="JSON", help="Fields to add to every request; null removes a field.")
]

app = group()


@app.command("run")
def run_command(
    suite: SuitePath,
    *,
    out: Annotated[Path, typer.Option(metavar="RESULTS", help="Folder of the results; a second run continues in it.")],
    overrides: Overrides,
    model: ModelName = "",
    url: ModelUrl = "",
    api: ModelApi = "openai",
    key_env: KeyVariable = "",
    extra: ExtraFields = "{}",
    run: Annotated[
        str, typer.Option(metavar="RUN[:VERSION]", help="Weights of a run instead of a URL, with the run's harness.")
    ] = "",
    harness: Annotated[
        str, typer.Option(metavar="KIND|RECIPE", help="A kind of harness, or a recipe whose harness is taken.")
    ] = DEFAULT_HARNESS,
    passes: Annotated[int, typer.Option(metavar="K", help="Tries of each task.")] = 1,
    tasks: Annotated[int | None, typer.Option(metavar="N", help="The first N tasks (default: all).")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling.")] = 1.0,
    concurrency: Annotated[int, typer.Option(help="Tries at a time.")] = 4,
    pass_at: Annotated[float, typer.Option(metavar="X", help="Reward from which a try passes.")] = 1.0,
    prices: Prices = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on a suite and store every try. A second run continues: stored tries are not repeated."""
    limits = TryLimits(
        passes=passes,
        tasks=tasks,
        temperature=temperature,
        concurrency=concurrency,
        pass_at=pass_at,
        prices=read_prices(prices),
    )
    if bool(run) == bool(url or model):
        raise ConfigError("try what? give --url and --model of an API, or --run of a run")
    opened = open_suite(suite)
    if run:
        results = _try_run(opened, run, limits, out, overrides)
    else:
        upstream = _upstream(url, model, api, key_env, extra)
        config = try_config(opened, harness_section(harness), limits, overrides)
        with progress_bar(f"{opened.name} · {model}") as progress:
            results = try_model(opened, config, upstream, limits, out, progress)
    if as_json:
        _print_json(results.to_json())
    else:
        console().print(evaluation_table(figures(results.evaluation(), results.measure())))
        console().print(f"\n{len(results.tries)} tries, {len(results.missing())} missing: {out / RESULTS_FILE}")


@app.command("compare")
def compare_command(before: Results, after: Results, *, prices: Prices = None, as_json: Json = False) -> None:
    """Compare two results of a suite on their common tasks: paired differences with intervals."""
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


@app.command("report")
def report_command(
    results: Annotated[list[Path], typer.Argument(help="Folders that `run --out` made, or their files.")],
    *,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    prices: Prices = None,
    as_json: Json = False,
) -> None:
    """Compare several results of a suite in a table, and in a page that plots quality against cost, tokens and time."""
    rows = report_rows([_priced(read_results(place), prices) for place in results])
    if html is not None:
        html.write_text(report_page(rows), encoding="utf-8")
    if as_json:
        _print_json({"rows": [{"results": row.results.title, "figures": row.figures} for row in rows]})
    else:
        console().print(report_table(rows))
        if html is not None:
            console().print(f"\n{html}")


@app.command("build")
def build_command(
    repositories: Annotated[list[str], typer.Argument(help="Folders of git repositories, or pypi:NAME.")],
    *,
    out: Annotated[Path, typer.Option(metavar="SUITE", help="Folder of the suite; a second build continues in it.")],
    name: Annotated[str, typer.Option(help="Name of a new suite (default: its folder's).")] = "",
    changes: Annotated[int, typer.Option(metavar="N", help="Newest changes of each history that are tried.")] = 200,
    licence: Annotated[str, typer.Option(help="Licences of the suite's contents.")] = "",
    base: Annotated[str, typer.Option(help="Stored base system (default: the sandboxes' own).")] = "",
    before: Annotated[str, typer.Option(metavar="DATE", help="Install nothing that was published later.")] = "",
    sandbox: Sandbox = "ns",
    sandbox_url: SandboxUrl = "",
) -> None:
    """Build a suite from histories: commits or releases that changed source and tests, each proved by its tests."""
    settings = Settings(base=base, before=before)
    options = SuiteBuild(
        references=repositories, out=out, name=name, changes=changes, licence=licence, settings=settings
    )

    async def work() -> None:
        async with opened_provider(sandbox_config(sandbox, sandbox_url)) as provider:
            OUT.out(counted(await build(options, provider, say=log)))

    asyncio.run(work())


@app.command("fetch")
def fetch_command(suite: SuiteFolder, *, sandbox: Sandbox = "ns", sandbox_url: SandboxUrl = "") -> None:
    """Make the tasks of a suite that has only records of them. Sources and tests are fetched from their publisher."""

    async def work() -> None:
        async with opened_provider(sandbox_config(sandbox, sandbox_url)) as provider:
            OUT.out(f"{await fetch(suite, provider, say=log)} tasks made in {suite}")

    asyncio.run(work())


@app.command("contamination")
def contamination_command(
    suite: SuiteFolder,
    texts: Annotated[Path | None, typer.Argument(help="A folder of training texts.")] = None,
    *,
    model: ModelName = "",
    url: ModelUrl = "",
    api: ModelApi = "openai",
    key_env: KeyVariable = "",
    extra: ExtraFields = "{}",
    concurrency: Annotated[int, typer.Option(help="Questions to the model at a time.")] = 4,
    as_json: Json = False,
) -> int:
    """Search training texts for a suite, by its canary and runs of 13 words; or test a model, by whether it finishes
    hidden tests better when it is told where they stand. Exit status 1 if found.
    """
    if texts is None and not (url and model):
        raise ConfigError("look where? give a folder of training texts, or --url and --model of an API, or both")
    traces = None if texts is None else traces_in(suite, texts)
    memory = None
    if url or model:
        halves = halves_of(suite)
        prompts = [instruction for half in halves for instruction in half.instructions]
        answers = asyncio.run(ask_each(_upstream(url, model, api, key_env, extra), prompts, concurrency=concurrency))
        memory = check_memory(halves, list(zip(answers[::2], answers[1::2], strict=True)))
    if as_json:
        _print_json({**(asdict(traces) if traces else {}), "memory": asdict(memory) if memory else None})
    else:
        for line in [*(_trace_lines(traces) if traces else ()), *(_memory_lines(memory) if memory else ())]:
            OUT.out(visible(line))
    in_texts = traces is not None and bool(traces.canary_in or traces.tasks)
    return 1 if in_texts or (memory is not None and memory.is_remembered) else 0


@app.command("refresh")
def refresh_command(
    suite: SuiteFolder,
    *,
    results: Annotated[
        list[Path],
        typer.Option(
            help="Results of models; give the option once for each.", default_factory=list, show_default=False
        ),
    ],
    texts: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Training texts to search for tasks of the suite.")
    ] = None,
    max_share: Annotated[
        float, typer.Option(help="Largest share of a task's words, in runs, that training texts may contain.")
    ] = 0.2,
    changes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Newest changes that are tried (default: those since the last build); 0: none."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Stored base system (default: that of the last time).")] = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="DATE", help="Install nothing that was published later (default: as the last time)."),
    ] = None,
    sandbox: Sandbox = "ns",
    sandbox_url: SandboxUrl = "",
) -> None:
    """Add new changes; retire tasks that are always solved, never solved or leaked, with the date and the reason."""
    version, earlier = suite_of(suite).version, {record.task_id for record in read_records(suite)}
    settings = None if base is None and before is None else Settings(base=base or "", before=before or "")

    async def work() -> None:
        async with opened_provider(sandbox_config(sandbox, sandbox_url)) as provider:
            await take_in(suite, provider, changes=changes, settings=settings, say=log)

    if changes != 0:
        asyncio.run(work())
    traces = None if texts is None else traces_in(suite, texts)
    read = [read_results(place) for place in results]
    done = refresh(suite, read, traces, max_share=max_share, day=today())
    for record in read_records(suite):
        if record.task_id not in earlier:
            OUT.out(visible(f"{record.task_id} added: {record.prompt}"))
    for line in done.lines():
        OUT.out(line)
    now = suite_of(suite).version
    OUT.out(f"{suite_of(suite).name} {now}{'' if now == version else f', was {version}'}: {counted(in_use(suite))}")


def harness_section(given: str) -> dict[str, Any]:
    """``[harness]`` by a kind's name or out of a recipe. Raises :class:`~etude.errors.ConfigError`."""
    if not is_recipe(Path(given)):
        return {"kind": given}
    tree, file = read_tree(Path(given))
    section = tree.get("harness")
    if not isinstance(section, dict):
        raise ConfigError(f"--harness {given!r}: {file} has no [harness]: name a kind, such as {DEFAULT_HARNESS!r}")
    return section


def read_prices(prices: tuple[float, float, float] | None) -> TokenPrices | None:
    """The prices of ``--prices``."""
    return prices and TokenPrices(new=prices[0], cached=prices[1], sampled=prices[2])


def _try_run(suite: Suite, run: str, limits: TryLimits, out: Path, overrides: list[str]) -> SuiteResults:
    """Try weights of a run. Raises :class:`~etude.errors.ConfigError` for options that would have no effect."""
    if overrides:
        raise ConfigError("--set would have no effect with --run, since the run has its own recipe: leave it out")
    if limits.temperature != 1.0:
        raise ConfigError("--temperature would have no effect with --run, which samples at 1: leave it out")
    path, colon, version = run.rpartition(":")
    if not colon or not version.isdigit():
        path, version = run, ""
    folder = open_run_folder(path)
    with progress_bar(f"{suite.name} · {folder.path.name}") as progress:
        return try_version(suite, folder, int(version) if version else None, limits, out, progress)


def _trace_lines(traces: Traces) -> Iterator[str]:
    yield from (f"{file} has the suite's canary" for file in traces.canary_in)
    for each in traces.tasks:
        yield f"{each.task_id} {each.share:.1%} of its words in a row, most in {each.file}"
    yield f"{len(traces.tasks)} tasks with traces in {traces.files} files"


def _memory_lines(memory: MemoryCheck) -> Iterator[str]:
    for each in memory.tests:
        if each.guided > each.general:
            yield f"{each.task_id} {each.guided:.2f} like its test where that is named, {each.general:.2f} otherwise"
    gain = memory.difference
    yield (
        f"{len(memory.tests)} tests finished: {gain.value:+.3f} in ROUGE-L where their place is named "
        f"({gain.low:+.3f} to {gain.high:+.3f}), which is {'memory' if memory.is_remembered else 'no sign of memory'}"
    )


def _upstream(url: str, model: str, api: Api, key_env: str, extra: str) -> Upstream:
    """The model that the options name. Raises :class:`~etude.errors.ConfigError`."""
    return Upstream(url=url, model=model, api=api, key=key_in(key_env, KEY_VARIABLES[api]), extra=_json_object(extra))


def _json_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra {text!r} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'--extra {text!r}: expected an object, such as {{"reasoning_effort": "low"}}')
    return fields


def _priced(results: SuiteResults, prices: tuple[float, float, float] | None) -> SuiteResults:
    return results if prices is None else replace(results, prices=read_prices(prices))


def _print_json(tree: object) -> None:
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")
