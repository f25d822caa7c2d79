"""``etude run|midtrain|sft|parity|serve|rollouts|train|eval|show|doctor``: whole runs, and looking at them."""

import argparse
import json
import sys
from pathlib import Path

from etude.cli.words import SANDBOXES, USER_ERROR, Commands
from etude.config.recipe import default_recipe, dump_toml, load_recipe
from etude.errors import ConfigError, InfrastructureError

OF_NEW_RUNS = ("recipe", "seed", "out", "sandbox", "ledger")
"""Options of ``etude run`` that decide what a run is, and would have no effect on one that exists."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this part."""
    _add_run(commands)
    _add_processes(commands)
    _add_eval(commands)
    _add_show(commands)
    _add_doctor(commands)


def _add_run(commands: Commands) -> None:
    run = commands.add_parser("run", help="the whole loop of a recipe on this machine")
    run.add_argument("recipe", nargs="?", type=Path, help="a TOML file, or a folder with run.toml")
    run.add_argument("--seed", type=int, help="seed of weights, data, tasks and sampling")
    run.add_argument("--out", type=Path, help="run folder to create (default: runs/NAME-sSEED)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="continue an interrupted run")
    run.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")
    run.add_argument(
        "--ledger", metavar="URL", help="postgresql://USER@HOST/DATABASE to keep its durable state in: ledger.url"
    )
    run.add_argument("--sandbox", choices=SANDBOXES, help="where agents' commands run: sandboxes.kind")
    run.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    run.set_defaults(command=_run)


def _add_processes(commands: Commands) -> None:
    for name, text in (
        ("midtrain", "one process: mid-training"),
        ("sft", "one process: supervised fine-tuning, if the recipe has it"),
        ("parity", "one process: engine against trainer, before they run"),
        ("serve", "one process: the engine"),
        ("rollouts", "one process: rollouts and evaluations"),
        ("train", "one process: the trainer"),
    ):
        process = commands.add_parser(name, help=text)
        process.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run folder")
        process.set_defaults(command=run_process, process=name)


def _add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser("eval", help="measure a weight version of a finished run on the held-out tasks")
    evaluate.add_argument("run", type=Path, help="the run folder")
    evaluate.add_argument("--version", type=int, help="weight version (default: the newest)")
    evaluate.add_argument("--tasks", type=int, help="number of held-out tasks (default: the recipe's)")
    evaluate.set_defaults(command=_eval)


def _add_show(commands: Commands) -> None:
    show = commands.add_parser("show", help="read the rollouts of a run")
    show.add_argument("run", type=Path, help="the run folder")
    show.add_argument("--group", type=int, help="group to show (default: the last complete one)")
    show.add_argument("--purpose", default="train", help="train, or before-sampled, after-greedy, …")
    show.set_defaults(command=_show)


def _add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser("doctor", help="what works on this machine; whether engine and trainer agree")
    doctor.add_argument("--parity", action="store_true", help="compare engine and trainer layer by layer, bit by bit")
    weights = doctor.add_mutually_exclusive_group()
    weights.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face checkpoint (default: random)")
    weights.add_argument("--run", type=Path, metavar="DIR", help="a run folder: its newest weights, its numerics")
    doctor.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override its recipe")
    doctor.set_defaults(command=_doctor)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from etude.run.folder import RunFolder

    if options.resume is not None:
        ignored = [name for name in OF_NEW_RUNS if getattr(options, name) is not None]
        ignored += ["--set"] * bool(options.set) + ["--dry-run"] * options.dry_run
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --resume: a run keeps its recipe")
        folder = RunFolder.open(options.resume)
    else:
        if options.recipe is None:
            raise ConfigError("which recipe? try `etude run recipes/quickstart`, or --resume DIR")
        seed = [] if options.seed is None else [f"seed={options.seed}"]
        kind = [] if options.sandbox is None else [f"sandboxes.kind={options.sandbox}"]
        ledger = [] if options.ledger is None else [f"ledger.url={json.dumps(options.ledger)}"]
        config = load_recipe(options.recipe, [*options.set, *seed, *kind, *ledger])
        if options.dry_run:
            print(dump_toml(config), end="")
            return 0
        from etude.run.local import default_out

        folder = RunFolder.create(options.out or default_out(config), config)
    from etude.dashboard.terminal import final_table
    from etude.run.local import run_local

    try:
        report = run_local(folder, resumed=options.resume is not None)
    except (KeyboardInterrupt, InfrastructureError):
        print(f"\nstopped; nothing is lost. Continue with: etude run --resume {folder.path}", file=sys.stderr)
        raise
    Console().print(final_table(report))
    print(f"report: {folder.report_html}")
    return 0


def run_process(options: argparse.Namespace) -> int:
    """One process of a run."""
    from etude.run import processes
    from etude.run.folder import RunFolder

    processes.run_process(options.process, RunFolder.open(options.run))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from etude.run.evaluate import evaluate_version
    from etude.run.folder import RunFolder

    result = evaluate_version(RunFolder.open(options.run), version=options.version, tasks=options.tasks)
    print(json.dumps(result, indent=2))
    return 0


def _show(options: argparse.Namespace) -> int:
    from etude.run.folder import RunFolder
    from etude.run.reading import group_lines

    print("\n".join(group_lines(RunFolder.open(options.run), options.purpose, options.group)))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    ignored = [name for name in ("model", "run", "set") if getattr(options, name)]
    if ignored and not options.parity:
        raise ConfigError(f"--{', --'.join(ignored)} would have no effect without --parity")
    from rich.console import Console

    from etude.run import doctor
    from etude.run.folder import RunFolder

    console = Console()
    if not options.parity:
        doctor.show_machine(console)
        return 0
    if options.run is None:
        parity = doctor.parity_of_model(options.model, default_recipe(options.set))
    else:
        folder = RunFolder.open(options.run)
        parity = doctor.parity_of_run(folder, load_recipe(folder.config_file, options.set))
    doctor.show_parity(parity, console)
    return 0 if parity.passed else USER_ERROR
