"""`etude judge`: tests and calibrates the judge of a recipe or a suite, without a run.

Owns the options. :mod:`etude.cli.actions.ask_judge` does the rest.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer

from etude.cli.options import Overrides, RecipePath, group
from etude.errors import ConfigError, ExitCode

app = group()


@app.command("check")
def check_command(recipe: RecipePath, *, overrides: Overrides) -> int:
    """Check whether the judge answers, what it costs, and whether a run would trust it."""
    from etude.cli.actions.ask_judge import check, recipe_with_judge

    report = check(recipe_with_judge(recipe, overrides))
    print("\n".join(report.lines))
    return 0 if report.passed else ExitCode.USER_ERROR


@app.command("calibrate")
def calibrate_command(
    recipe: RecipePath,
    *,
    aspect: Annotated[
        list[str],
        typer.Option(default_factory=list, show_default=False, help="An aspect that has a rubric (default: all)."),
    ],
    overrides: Overrides,
) -> None:
    """Compare the judge with people's labels of some texts, and write the report beside the rubrics."""
    from etude.cli.actions.ask_judge import NO_CALIBRATIONS, calibrate_beside, check_aspect, recipe_with_judge

    config = recipe_with_judge(recipe, [*overrides, NO_CALIBRATIONS])
    for name in aspect:
        check_aspect(config, name)
    folder = recipe if recipe.is_dir() else recipe.parent
    for line in calibrate_beside(config, folder, aspect or sorted(config.judge.rubrics)):
        print(line)


@app.command()
def score(
    recipe: RecipePath,
    *,
    aspect: Annotated[str, typer.Option(help="An aspect that has a rubric.")],
    task: Annotated[Path, typer.Option(metavar="FILE", help="The task that was given.")],
    work: Annotated[Path, typer.Option(metavar="FILE", help="The work that is judged.")],
    overrides: Overrides,
) -> None:
    """Judge one text and print the judgement as JSON."""
    given, done = _read("--task", task), _read("--work", work)
    from etude.cli.actions.ask_judge import NO_CALIBRATIONS, check_aspect, judge_text, recipe_with_judge

    config = recipe_with_judge(recipe, [*overrides, NO_CALIBRATIONS])
    check_aspect(config, aspect)
    judgement = judge_text(config, aspect, task=given, work=done)
    print(orjson.dumps(asdict(judgement), option=orjson.OPT_INDENT_2).decode())


def _read(option: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {file}: {error}") from error
