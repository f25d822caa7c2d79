"""`etude live`: a recipe's whole loop with users.

Simulated RL up to the minimum bar, then learning from users' signals; a gate tests every release.

    The same as `etude run` of the recipe, after a check that the recipe serves users and learns from them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.commands.run import run
from etude.cli.options import Overrides, group
from etude.config.tasks import SandboxKind
from etude.errors import ConfigError

if TYPE_CHECKING:
    from etude.config.recipe import RunConfig

app = group()


@app.command()
def live(
    recipe: Annotated[
        Path | None, typer.Argument(help="A TOML file, a folder with run.toml, or a shipped name.")
    ] = None,
    *,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, data, tasks and sampling.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to create (default: runs/NAME-sSEED).")] = None,
    at: Annotated[str | None, typer.Option(metavar="URL", help="Keep the run at s3://BUCKET/PATH.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Continue an interrupted run.")] = None,
    overrides: Overrides,
    ledger: Annotated[str | None, typer.Option(metavar="URL", help="ledger.url: a PostgreSQL for its state.")] = None,
    sandbox: Annotated[SandboxKind | None, typer.Option(help="sandboxes.kind: where commands run.")] = None,
    fleet: Annotated[Path | None, typer.Option(metavar="FLEET", help="A TOML file with the machines.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> int:
    """Serve users and learn from what they do: `etude run` of a recipe with releases."""
    if recipe is None and resume is None:
        raise ConfigError("which recipe? try `etude live recipes/live`, or --resume RUN")
    from etude.config.loading import load_recipe
    from etude.run.working_folder import open_run_folder

    if resume is not None:
        check_live(open_run_folder(resume).config())
    elif recipe is not None:
        check_live(load_recipe(recipe, overrides))
    return run(
        recipe,
        seed=seed,
        out=out,
        at=at,
        resume=resume,
        overrides=overrides,
        ledger=ledger,
        sandbox=sandbox,
        fleet=fleet,
        dry_run=dry_run,
    )


def check_live(config: "RunConfig") -> None:
    """Raise :class:`~etude.errors.ConfigError` for a recipe whose run would serve nobody, or learn from nobody."""
    needed = {
        "release.every_steps": ("4", config.release.enabled),
        "feedback.window_s": ("600", config.feedback.window_s > 0),
        "feedback.reward.parts": ("a part, such as signal = 'kept'", bool(config.feedback.reward.parts)),
        "live.groups_per_step": ("128", config.live.groups_per_step > 0),
    }
    missing = [f"{key} (for example {example})" for key, (example, is_there) in needed.items() if not is_there]
    if missing:
        raise ConfigError(f"a live run learns from users, and this recipe does not say how: set {', '.join(missing)}")
