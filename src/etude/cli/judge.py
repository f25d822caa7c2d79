"""``etude judge check|calibrate|score``: the judge of a recipe, before anything is trained on its word."""

import argparse
import sys
from pathlib import Path

from etude.cli.options import USER_ERROR, Commands
from etude.config.loading import load_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError

UNTRUSTED = "judge.calibrations={}"
"""Override by which a recipe is read without the reports that are about to be written."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this part."""
    judge = commands.add_parser("judge", help="the model that grades aspects: try it, and compare it with people")
    actions = judge.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="whether it answers, what it costs, and whether a run would trust it")
    calibrate = actions.add_parser("calibrate", help="have labelled texts judged; write the report beside the rubrics")
    calibrate.add_argument("--aspect", action="append", default=[], help="of its rubrics (default: all)")
    score = actions.add_parser("score", help="have one text judged")
    score.add_argument("--aspect", required=True)
    score.add_argument("--task", type=Path, required=True, metavar="FILE", help="what was asked for")
    score.add_argument("--work", type=Path, required=True, metavar="FILE", help="what is judged")
    for action, command in ((check, _check), (calibrate, _calibrate), (score, _score)):
        action.add_argument("recipe", type=Path, help="a TOML file, or a folder with run.toml")
        action.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe"
        )
        action.set_defaults(command=command)


def _check(options: argparse.Namespace) -> int:
    from etude.cli.commands import judge as judgements

    report = judgements.check(_recipe(options, trusted=True))
    print("\n".join(report.lines))
    return 0 if report.passed else USER_ERROR


def _calibrate(options: argparse.Namespace) -> int:
    from etude.cli.commands import judge as judgements

    folder = options.recipe if options.recipe.is_dir() else options.recipe.parent
    config = _recipe(options, trusted=False)
    unknown = [aspect for aspect in options.aspect if aspect not in config.judge.rubrics]
    if unknown:
        raise ConfigError(f"--aspect {unknown[0]}: the recipe has rubrics of {', '.join(sorted(config.judge.rubrics))}")
    for line in judgements.calibrate_beside(config, folder, options.aspect or sorted(config.judge.rubrics)):
        print(line)
    return 0


def _score(options: argparse.Namespace) -> int:
    from etude.cli.commands import judge as judgements

    config = _recipe(options, trusted=False)
    texts = {}
    for name in ("task", "work"):
        file: Path = getattr(options, name)
        try:
            texts[name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--{name} {file}: {error}") from error
    sys.stdout.write(judgements.score(config, options.aspect, task=texts["task"], work=texts["work"]))
    return 0


def _recipe(options: argparse.Namespace, *, trusted: bool) -> RunConfig:
    config = load_recipe(options.recipe, options.set if trusted else [*options.set, UNTRUSTED])
    if not config.judge.url:
        raise ConfigError(f"{options.recipe} has no judge: set judge.url, judge.model and judge.rubrics")
    return config
