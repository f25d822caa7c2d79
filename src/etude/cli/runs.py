"""``etude run|midtrain|sft|parity|serve|rollouts|train|eval|show|doctor``: whole runs, and looking at them."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from etude.cli.options import NOTHING_LEARNT, SANDBOXES, USER_ERROR, Commands, numbers, own_name
from etude.config.loading import default_recipe, dump_toml, load_recipe
from etude.errors import ConfigError, InfrastructureError
from etude.types import Json

OF_NEW_RUNS = ("recipe", "seed", "out", "sandbox", "ledger")
"""Options of ``etude run`` that decide what a run is, and would have no effect on one that exists."""
OF_LISTS = ("reward", "outcome", "reason", "version", "has_summary", "has_hint", "sort", "limit")
"""Options of ``etude show`` that list rollouts."""


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
    run.add_argument("--out", type=Path, help="run folder to create (default: runs/NAME-sSEED, then -2, -3, …)")
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
        if name == "rollouts":
            process.add_argument(
                "--seat", type=int, default=0, metavar="N", help="a further process beside seat 0: 1, 2, …"
            )
        process.set_defaults(command=run_process, process=name, seat=0)


def _add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser("eval", help="try a weight version of a run on the held-out tasks, or compare two")
    evaluate.add_argument("run", type=Path, help="the run folder")
    evaluate.add_argument("--version", type=int, help="weight version (default: the newest)")
    evaluate.add_argument(
        "--against", metavar="VERSION|RUN[:VERSION]", help="compare with another version, or one of another run"
    )
    evaluate.add_argument("--tasks", type=int, help="number of held-out tasks (default: the recipe's)")
    evaluate.add_argument("--passes", type=int, default=1, metavar="K", help="sampled tries of each task (default: 1)")
    evaluate.add_argument("--k", metavar="K,…", help="of which pass@k is told (default: 1 and --passes)")
    evaluate.add_argument("--no-greedy", action="store_true", help="sampled tries only")
    evaluate.add_argument(
        "--pass-at",
        type=float,
        metavar="X",
        help="graded X or better, a try passes (default: the recipe's eval.pass_at)",
    )
    evaluate.add_argument(
        "--prices",
        type=float,
        nargs=3,
        metavar=("READ", "CACHED", "SAMPLED"),
        help="of a million tokens: prompt tokens that are new, that an earlier turn had, sampled ones",
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    evaluate.set_defaults(command=_eval)


def _add_show(commands: Commands) -> None:
    show = commands.add_parser("show", help="read the rollouts of a run: what there is, a list, a group, one of them")
    show.add_argument("run", type=Path, help="the run folder")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--group", type=int, metavar="N", help="the rollouts of a group, turn by turn")
    which.add_argument("--rollout", metavar="ID", help="one rollout, by its id or the beginning of it")
    show.add_argument("--slot", type=int, metavar="S", help="only this slot of the group")
    show.add_argument("--tokens", action="store_true", help="every sampled token: logprob, mismatch, version, routes")
    show.add_argument("--purpose", metavar="NAME", help="train (the default), or before-sampled, after-greedy, …")
    show.add_argument("--reward", metavar="COMPARISON", help="list those with such a reward: '>=0.5', '<0', '=1'")
    show.add_argument(
        "--outcome", choices=("graded", "failed", "dropped", "quarantined"), help="list those that ended so"
    )
    show.add_argument("--reason", metavar="TEXT", help="list those whose end or verdict is due to that: 'submit'")
    show.add_argument(
        "--version",
        type=int,
        metavar="V",
        help="list those whose tokens are of weight version V, or of ones around it",
    )
    show.add_argument("--has-summary", action="store_true", help="list those that summarised their context")
    show.add_argument("--has-hint", action="store_true", help="list those with a hint")
    show.add_argument(
        "--sort", choices=("newest", "reward", "tokens", "turns", "staleness"), help="what is listed first"
    )
    show.add_argument("--limit", type=int, metavar="N", help="list so many (default: 20)")
    show.add_argument("--json", action="store_true", help="one JSON object a line")
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

    from etude.rewards.shaping.parts import describe
    from etude.run.folder import RunFolder
    from etude.run.judging import check_judge
    from etude.run.resolve import check_devices

    if options.resume is not None:
        ignored = [name for name in OF_NEW_RUNS if getattr(options, name) is not None]
        ignored += ["--set"] * bool(options.set) + ["--dry-run"] * options.dry_run
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --resume: a run keeps its recipe")
        folder = RunFolder.open(options.resume)
        check_devices(folder.config())
    else:
        if options.recipe is None:
            raise ConfigError("which recipe? try `etude run recipes/quickstart`, or --resume DIR")
        seed = [] if options.seed is None else [f"seed={options.seed}"]
        kind = [] if options.sandbox is None else [f"sandboxes.kind={options.sandbox}"]
        ledger = [] if options.ledger is None else [f"ledger.url={json.dumps(options.ledger)}"]
        config = load_recipe(options.recipe, [*options.set, *seed, *kind, *ledger])
        about_reward = describe(config.reward)
        check_judge(config)
        if options.dry_run:
            print(dump_toml(config), end="")
            print("".join(f"# {line}\n" for line in about_reward), end="")
            return 0
        from etude.run.disk_space import check_disk_space
        from etude.run.local import default_out
        from etude.run.preflight import check_ready

        out = options.out or default_out(config)
        for warning in (*check_ready(config), *check_disk_space(config, out)):
            print(f"warning: {warning}", file=sys.stderr)
        folder = RunFolder.create(out, config)
    from etude.dashboard.terminal import final_table
    from etude.run.local import run_local

    try:
        report = run_local(folder, resumed=options.resume is not None)
    except (KeyboardInterrupt, SystemExit, InfrastructureError):
        print(f"\nstopped; nothing is lost. Continue with: {own_name()} run --resume {folder.path}", file=sys.stderr)
        if folder.report_html.exists():
            print(f"report so far: {folder.report_html}", file=sys.stderr)
        raise
    Console().print(final_table(report))
    print(f"report: {folder.report_html}")
    return status_of(report)


def status_of(report: Mapping[str, Json]) -> int:
    """The exit status of a run that came to its end; one that learnt nothing is told on stderr."""
    learning = report["learning"]
    assert isinstance(learning, dict)
    if learning["nothing_learnt"] is None:
        return 0
    print(f"etude: {learning['nothing_learnt']}", file=sys.stderr)
    return NOTHING_LEARNT


def run_process(options: argparse.Namespace) -> int:
    """One process of a run."""
    from etude.run import processes
    from etude.run.folder import RunFolder

    if options.seat < 0:
        raise ConfigError(f"--seat {options.seat}: the first process has seat 0, further ones 1, 2, …")
    processes.run_process(options.process, RunFolder.open(options.run), options.seat)
    return 0


def _eval(options: argparse.Namespace) -> int:
    from etude.cli.commands.eval import compare_runs, measure_run
    from etude.dashboard.evaluation import Measure, Prices
    from etude.run.evaluate import EvalRequest
    from etude.run.folder import RunFolder

    folder = RunFolder.open(options.run)
    wanted = EvalRequest(
        version=options.version, tasks=options.tasks, passes=options.passes, greedy=not options.no_greedy
    )
    measure = Measure(
        pass_at=folder.config().eval.pass_at if options.pass_at is None else options.pass_at,
        ks=tuple(numbers("--k", options.k)) if options.k else tuple(sorted({1, options.passes})),
        prices=options.prices and Prices(new=options.prices[0], cached=options.prices[1], sampled=options.prices[2]),
    )
    if max(measure.ks) > options.passes:
        raise ConfigError(f"--k {options.k}: pass@{max(measure.ks)} takes as many tries of a task, raise --passes")
    if options.against is None:
        measure_run(folder, wanted, measure, as_json=options.json)
    else:
        compare_runs(folder, options.against, wanted, measure, as_json=options.json)
    return 0


def _show(options: argparse.Namespace) -> int:
    from etude.cli.commands.show import Wish, parse_comparison, show
    from etude.ledger.archive import Order, Outcome, Search
    from etude.run.folder import RunFolder

    asked = [name for name in OF_LISTS if getattr(options, name) not in (None, False)]
    reads = options.group is not None or options.rollout is not None
    if reads and asked:
        raise ConfigError(f"--{asked[0].replace('_', '-')} would have no effect: --group and --rollout say which")
    if not reads and (options.tokens or options.slot is not None):
        raise ConfigError(f"--{'tokens' if options.tokens else 'slot'} needs --group N or --rollout ID: of which?")
    if options.rollout is not None and (options.slot is not None or options.purpose is not None):
        raise ConfigError("--slot and --purpose would have no effect: --rollout says which")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: expected 1 or more")
    purpose = options.purpose or "train"
    search = Search(
        purpose=purpose,
        reward=options.reward and parse_comparison(options.reward),
        outcome=options.outcome and Outcome(options.outcome),
        reason=options.reason or "",
        version=options.version,
        has_summary=options.has_summary,
        has_hint=options.has_hint,
        order=Order(options.sort or "newest"),
        limit=options.limit or 20,
    )
    lists = bool(asked) or options.purpose is not None
    wish = Wish(
        search=search if lists else None,
        group=options.group,
        slot=options.slot,
        purpose=purpose,
        rollout=options.rollout,
        tokens=options.tokens,
        as_json=options.json,
    )
    show(RunFolder.open(options.run, writes=False), wish)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    ignored = [name for name in ("model", "run", "set") if getattr(options, name)]
    if ignored and not options.parity:
        raise ConfigError(f"--{', --'.join(ignored)} would have no effect without --parity")
    from rich.console import Console

    from etude.cli.commands import doctor
    from etude.run import parity
    from etude.run.folder import RunFolder
    from etude.run.preflight import about_template

    console = Console()
    if not options.parity:
        doctor.show_machine(console)
        return 0
    if options.run is None:
        comparison = parity.parity_of_model(options.model, default_recipe(options.set))
    else:
        folder = RunFolder.open(options.run, writes=False)
        comparison = parity.parity_of_run(folder, load_recipe(folder.config_file, options.set))
    parity.show_parity(comparison, console)
    if options.model is None:
        return 0 if comparison.passed else USER_ERROR
    reads_calls = doctor.show_calls(options.model, console)
    for line in about_template(options.model):
        console.print(line)
    return 0 if comparison.passed and reads_calls else USER_ERROR
