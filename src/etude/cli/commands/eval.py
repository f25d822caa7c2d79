"""`etude eval`: evaluates versions of runs on the held-out tasks and prints the figures as tables or JSON.

Owns the options. :mod:`etude.cli.actions.evaluate_run` does the rest.
"""

from typing import Annotated

import typer

from etude.cli.imports import without_collections
from etude.cli.options import Json, RunPath, group
from etude.errors import ConfigError

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
    ks = tuple(numbers("--k", k)) if k else tuple(sorted({1, passes}))
    if max(ks) > passes:
        raise ConfigError(f"--k {k}: pass@{max(ks)} takes as many tries of a task, raise --passes")
    with without_collections():
        from etude.cli.actions.evaluate_run import compare_runs, measure_run
        from etude.dashboard.evaluation import Measure, read_prices
        from etude.run.evaluate import EvalRequest
        from etude.run.working_folder import open_run_folder

    folder = open_run_folder(run)
    request = EvalRequest(version=version, tasks=tasks, passes=passes, greedy=not no_greedy)
    measure = Measure(
        pass_at=folder.config().eval.pass_at if pass_at is None else pass_at,
        ks=ks,
        prices=read_prices(prices),
    )
    if against is None:
        measure_run(folder, request, measure, as_json=as_json)
    else:
        compare_runs(folder, against, request, measure, as_json=as_json)


def numbers(option: str, listed: str) -> list[int]:
    """The whole numbers in a list with commas. Raises :class:`~etude.errors.ConfigError` naming the option."""
    try:
        return [int(number) for number in listed.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {listed!r}: expected whole numbers with commas, such as 1,4") from error
