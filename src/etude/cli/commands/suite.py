"""`etude suite`: evaluates models on a suite of tasks, compares them and their cost; builds and maintains suites.

    suite, a model behind a URL or of a run ──run──▶ results.json ──compare, report──▶ tables, a page

Owns the options. :mod:`etude.cli.actions.suite_tries` makes and shows tries, :mod:`etude.cli.actions.suite_tasks`
makes tasks, :mod:`etude.cli.actions.suite_contamination` looks for them elsewhere.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from etude.cli.options import Json, Overrides, group, key_in
from etude.cli.sandbox_options import Sandbox, SandboxUrl, sandbox_config
from etude.errors import ConfigError
from etude.gateway.upstream.apis import Api

if TYPE_CHECKING:
    from etude.gateway.upstream.calls import Upstream

DEFAULT_HARNESS = "shell"
"""Harness of a model that was not made for étude's own tools."""
KEY_VARIABLES: dict[str, str] = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
"""API → the variable in which its own clients look for a key."""

SuitePath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="SUITE", help="A suite's folder, tasks in Harbor's format, or a recipe.")
]
SuiteFolder: TypeAlias = Annotated[Path, typer.Argument(metavar="SUITE", help="A suite's folder.")]
Results: TypeAlias = Annotated[Path, typer.Argument(help="A folder that `run --out` made, or its results.json.")]
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
    if bool(run) == bool(url or model):
        raise ConfigError("try what? give --url and --model of an API, or --run of a run")
    if run and overrides:
        raise ConfigError("--set would have no effect with --run, since the run has its own recipe: leave it out")
    if run and temperature != 1.0:
        raise ConfigError("--temperature would have no effect with --run, which samples at 1: leave it out")
    from etude.cli.actions.suite_tries import show_results, try_api, try_run
    from etude.dashboard.evaluation import read_prices
    from etude.run.suite import TryLimits, open_suite

    limits = TryLimits(
        passes=passes,
        tasks=tasks,
        temperature=temperature,
        concurrency=concurrency,
        pass_at=pass_at,
        prices=read_prices(prices),
    )
    opened = open_suite(suite)
    if run:
        results = try_run(opened, run, limits, out)
    else:
        results = try_api(opened, _upstream(url, model, api, key_env, extra), harness, overrides, limits, out)
    show_results(results, out, as_json=as_json)


@app.command("compare")
def compare_command(before: Results, after: Results, *, prices: Prices = None, as_json: Json = False) -> None:
    """Compare two results of a suite on their common tasks: paired differences with intervals."""
    from etude.cli.actions.suite_tries import show_comparison

    show_comparison(before, after, prices, as_json=as_json)


@app.command("report")
def report_command(
    results: Annotated[list[Path], typer.Argument(help="Folders that `run --out` made, or their files.")],
    *,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    prices: Prices = None,
    as_json: Json = False,
) -> None:
    """Compare several results of a suite in a table, and in a page that plots quality against cost, tokens and time."""
    from etude.cli.actions.suite_tries import show_report

    show_report(results, html, prices, as_json=as_json)


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
    sandboxes = sandbox_config(sandbox, sandbox_url)
    from etude.cli.actions.build_suite import SuiteBuild
    from etude.cli.actions.suite_tasks import build_suite
    from etude.taskgen.preparation import Settings

    settings = Settings(base=base, before=before)
    options = SuiteBuild(
        references=repositories, out=out, name=name, changes=changes, licence=licence, settings=settings
    )
    build_suite(options, sandboxes)


@app.command("fetch")
def fetch_command(suite: SuiteFolder, *, sandbox: Sandbox = "ns", sandbox_url: SandboxUrl = "") -> None:
    """Make the tasks of a suite that has only records of them. Sources and tests are fetched from their publisher."""
    sandboxes = sandbox_config(sandbox, sandbox_url)
    from etude.cli.actions.suite_tasks import fetch_suite

    fetch_suite(suite, sandboxes)


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
    upstream = _upstream(url, model, api, key_env, extra) if url or model else None
    from etude.cli.actions.suite_contamination import show_contamination

    return int(show_contamination(suite, texts, upstream, concurrency=concurrency, as_json=as_json))


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
    sandboxes = sandbox_config(sandbox, sandbox_url)
    from etude.cli.actions.suite_tasks import SuiteRefresh, refresh_suite
    from etude.taskgen.preparation import Settings

    options = SuiteRefresh(
        suite=suite,
        results=results,
        texts=texts,
        max_share=max_share,
        changes=changes,
        settings=None if base is None and before is None else Settings(base=base or "", before=before or ""),
    )
    refresh_suite(options, sandboxes)


def _upstream(url: str, model: str, api: Api, key_env: str, extra: str) -> "Upstream":
    """The model that the options name. Raises :class:`~etude.errors.ConfigError`."""
    key, fields = key_in(key_env, KEY_VARIABLES[api]), _json_object(extra)
    from etude.gateway.upstream.calls import Upstream

    return Upstream(url=url, model=model, api=api, key=key, extra=fields)


def _json_object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra {text!r} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'--extra {text!r}: expected an object, such as {{"reasoning_effort": "low"}}')
    return fields
