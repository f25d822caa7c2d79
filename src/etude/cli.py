"""The command line: arguments in, one module of ``run/`` out, exit codes.

    0  done          1  a process of the run failed          2  the user can fix it          130  interrupted

Every subcommand imports its own composition when it is called, so that ``etude --help`` needs no torch.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.config import default_recipe, dump_toml, load_recipe
from etude.errors import ConfigError, EtudeError, InfrastructureError

USER_ERROR, FAILED, INTERRUPTED = 2, 1, 130

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors of the user are one line, never a traceback."""
    options = build_parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except InfrastructureError as error:
        print(f"etude: {error}", file=sys.stderr)
        return FAILED
    except EtudeError as error:
        print(f"etude: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="etude", description="Train a coding model inside the product that uses it.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_processes(commands)
    _add_gateway(commands)
    _add_keys(commands)
    _add_chat(commands)
    _add_eval(commands)
    _add_weights(commands)
    _add_tasks(commands)
    _add_show(commands)
    _add_doctor(commands)
    _add_bench(commands)
    return parser


Commands = argparse._SubParsersAction  # the only name argparse has for it


def _add_run(commands: "Commands[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="the whole loop of a recipe on this machine")
    run.add_argument("recipe", nargs="?", type=Path, help="a TOML file, or a folder with run.toml")
    run.add_argument("--seed", type=int, help="seed of weights, data, tasks and sampling")
    run.add_argument("--out", type=Path, help="run folder to create (default: runs/NAME-sSEED)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="continue an interrupted run")
    run.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")
    run.add_argument("--dry-run", action="store_true", help="print the resolved recipe and stop")
    run.set_defaults(command=_run)


def _add_processes(commands: "Commands[argparse.ArgumentParser]") -> None:
    for name, text in (
        ("midtrain", "one process: mid-training, then weight version 0"),
        ("parity", "one process: engine against trainer, before they run"),
        ("serve", "one process: the engine"),
        ("rollouts", "one process: rollouts and evaluations"),
        ("train", "one process: the trainer"),
    ):
        process = commands.add_parser(name, help=text)
        process.add_argument("--run", type=Path, required=True, metavar="DIR", help="the run folder")
        process.set_defaults(command=_process, process=name)


def _add_gateway(commands: "Commands[argparse.ArgumentParser]") -> None:
    gateway = commands.add_parser("gateway", help="the door for harnesses: of a run, or alone in front of any engines")
    whose = gateway.add_mutually_exclusive_group(required=True)
    whose.add_argument("--run", type=Path, metavar="DIR", help="one process of this run")
    whose.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint folder: its tokenizer and chat template")
    gateway.add_argument("--engine", action="append", default=[], metavar="URL[@REGION]", help="one for each engine")
    gateway.add_argument("--port", type=int, help="to listen on (default: any that is free)")
    gateway.add_argument("--keys", type=Path, metavar="FILE", help="who may call (default: one key, which is printed)")
    gateway.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate; with --tls-key")
    gateway.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM private key")
    gateway.add_argument("--payloads", type=Path, metavar="DIR", help="keep what top-p and top-k left to draw from")
    gateway.add_argument("--access-log", type=Path, metavar="FILE", help="a line of JSON per call, never what was said")
    gateway.add_argument("--set", action="append", default=[], metavar="gateway.KEY=VALUE", help="any other setting")
    gateway.set_defaults(command=_gateway)


def _add_keys(commands: "Commands[argparse.ArgumentParser]") -> None:
    keys = commands.add_parser("keys", help="who may call a gateway")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    parsers = {}
    for action, text in (
        ("add", "make a key; its secret is printed once"),
        ("ls", "list the keys"),
        ("revoke", "take a key out"),
    ):
        parsers[action] = actions.add_parser(action, help=text)
        parsers[action].add_argument("file", type=Path, help="the file of keys")
        parsers[action].set_defaults(command=_keys, action=action)
    parsers["add"].add_argument("--scope", choices=("production", "admin"), default="production")
    parsers["add"].add_argument("--label", default="", help="what it is for")
    parsers["add"].add_argument("--requests-per-minute", type=int, help="budget (default: none)")
    parsers["add"].add_argument("--tokens-per-minute", type=int, help="budget (default: none)")
    parsers["add"].add_argument("--expires-s", type=float, help="seconds until it is dead (default: never)")
    parsers["revoke"].add_argument("key", help="its id")


def _add_chat(commands: "Commands[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser("chat", help="talk with the newest weights; says which version answered")
    chat.add_argument("run", nargs="?", type=Path, help="the run folder")
    chat.add_argument("--url", help="a gateway, instead of a run")
    chat.add_argument("--key", help="a key for it")
    chat.set_defaults(command=_chat)


def _add_eval(commands: "Commands[argparse.ArgumentParser]") -> None:
    evaluate = commands.add_parser("eval", help="measure a weight version of a finished run on the held-out tasks")
    evaluate.add_argument("run", type=Path, help="the run folder")
    evaluate.add_argument("--version", type=int, help="weight version (default: the newest)")
    evaluate.add_argument("--tasks", type=int, help="number of held-out tasks (default: the recipe's)")
    evaluate.set_defaults(command=_eval)


def _add_weights(commands: "Commands[argparse.ArgumentParser]") -> None:
    weights = commands.add_parser("weights", help="look into a weight store, prove it, mend it, take versions out")
    actions = weights.add_subparsers(required=True, metavar="ACTION")
    parsers = {}
    for action, text in (
        ("ls", "list the versions, their lineage and the links between them"),
        ("verify", "check every object and digest"),
        ("repair", "mend what can be mended"),
        ("pull", "fetch a version as safetensors files"),
        ("gc", "delete what no reader needs any more"),
        ("export", "write a version of a run as a Hugging Face checkpoint, tokenizer included"),
        ("diff", "compare two versions"),
        ("invert", "write a link that leads back, for rolling back"),
        ("relay", "copy a store into one that is nearer to its readers, and keep it up to date"),
        ("bench", "measure codecs and publishing: etude bench weights"),
    ):
        parsers[action] = actions.add_parser(action, help=text)
        parsers[action].set_defaults(command=_weights, action=action)
        if action != "bench":
            parsers[action].add_argument("store", help="a run folder or the URL of an object store (a path, s3://…)")
    for action in ("pull", "export"):
        parsers[action].add_argument("out", type=Path, help="folder to write")
        parsers[action].add_argument("--version", type=int, help="weight version (default: the newest)")
    parsers["pull"].add_argument(
        "--versions", action="store_true", help="extend a folder of weight_vNNNNNN deltas, as SGLang and slime read it"
    )
    parsers["repair"].add_argument("--mirror", help="another store of the same log to take sound objects from")
    parsers["gc"].add_argument("--keep", type=int, default=64, help="versions before the newest that stay anyway")
    parsers["gc"].add_argument("--grace-s", type=float, default=3600.0, help="age from which unused objects go")
    parsers["gc"].add_argument("--dry-run", action="store_true", help="only say what would be removed")
    for action in ("diff", "invert"):
        parsers[action].add_argument("first", type=int, help="weight version")
        parsers[action].add_argument("second", type=int, help="weight version")
    parsers["relay"].add_argument("region", help="the nearer store")
    parsers["relay"].add_argument("--once", action="store_true", help="copy what there is and end")
    parsers["bench"].add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _add_tasks(commands: "Commands[argparse.ArgumentParser]") -> None:
    tasks = commands.add_parser("tasks", help="look at the tasks of a recipe")
    actions = tasks.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="print some tasks")
    listing.add_argument("recipe", type=Path)
    listing.add_argument("--split", choices=("train", "heldout"), default="train")
    listing.add_argument("--count", type=int, default=3)
    listing.set_defaults(command=_tasks)


def _add_show(commands: "Commands[argparse.ArgumentParser]") -> None:
    show = commands.add_parser("show", help="read the rollouts of a run")
    show.add_argument("run", type=Path, help="the run folder")
    show.add_argument("--group", type=int, help="group to show (default: the last complete one)")
    show.add_argument("--purpose", default="train", help="train, or before-sampled, after-greedy, …")
    show.set_defaults(command=_show)


def _add_doctor(commands: "Commands[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser("doctor", help="what works on this machine; whether engine and trainer agree")
    doctor.add_argument("--parity", action="store_true", help="compare engine and trainer layer by layer, bit by bit")
    weights = doctor.add_mutually_exclusive_group()
    weights.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face checkpoint (default: random)")
    weights.add_argument("--run", type=Path, metavar="DIR", help="a run folder: its newest weights, its numerics")
    doctor.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override its recipe")
    doctor.set_defaults(command=_doctor)


def _add_bench(commands: "Commands[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="measure a claim on this machine")
    names = bench.add_subparsers(required=True, metavar="NAME")
    parsers = {}
    for name, text in (
        ("loop", "asynchronous against synchronous RL"),
        ("weights", "delta codecs and publishing, against other systems' codecs and memcpy"),
        ("sync", "from a step's end to the last engine, over emulated long-distance links"),
        ("engine", "tokens per CPU second beside vLLM and transformers, weight swaps, prefix reuse"),
        ("numerics", "how far the trainer's logprobs are from the engine's, and what replay removes"),
        ("quantised", "what RL learns with experts in FP8, MXFP8 and NVFP4, against bfloat16"),
        ("gateway", "calls per second and what each costs, beside LiteLLM's proxy and one that does nothing"),
    ):
        parsers[name] = names.add_parser(name, help=text)
        parsers[name].add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        parsers[name].set_defaults(command=_bench, name=name)
    parsers["loop"].add_argument("--steps", type=int, default=12, help="optimiser steps per contestant")
    parsers["weights"].add_argument("--size-gb", type=float, default=2.0, help="size of the tiled state")
    parsers["engine"].add_argument("--threads", type=int, default=1, help="of each contestant, on a core each")
    quantised = parsers["quantised"]
    quantised.add_argument("--recipe", type=Path, default=Path("recipes/quickstart"), help="what is learnt")
    quantised.add_argument("--out", type=Path, default=Path("runs/bench-quantised"), help="keeps the runs; goes on")
    quantised.add_argument("--seeds", type=int, default=3, help="how many")
    quantised.add_argument("--formats", metavar="A,B,…", help="only these (default: all)")
    quantised.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override its recipe"
    )
    for name in ("engine", "numerics", "gateway"):
        parsers[name].add_argument("--quick", action="store_true", help="see that it runs, in seconds")
        parsers[name].add_argument("--contestants", metavar="A,B,…", help="only these (default: all)")


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from etude.run.folder import RunFolder

    if options.resume is not None:
        ignored = [name for name in ("recipe", "seed", "out") if getattr(options, name) is not None]
        ignored += ["--set"] * bool(options.set) + ["--dry-run"] * options.dry_run
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --resume: a run keeps its recipe")
        folder = RunFolder.open(options.resume)
    else:
        if options.recipe is None:
            raise ConfigError("which recipe? try `etude run recipes/quickstart`, or --resume DIR")
        seed = [] if options.seed is None else [f"seed={options.seed}"]
        config = load_recipe(options.recipe, [*options.set, *seed])
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


def _process(options: argparse.Namespace) -> int:
    from etude.run.folder import RunFolder
    from etude.run.processes import run_process

    run_process(options.process, RunFolder.open(options.run))
    return 0


def _gateway(options: argparse.Namespace) -> int:
    names = ("engine", "port", "keys", "tls_cert", "tls_key", "payloads", "access_log", "set")
    if options.run is not None:
        ignored = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, [])]
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --run: a run keeps its recipe")
        return _process(argparse.Namespace(process="gateway", run=options.run))
    if not options.engine:
        raise ConfigError("which engines? give --engine http://HOST:PORT, as often as there are any")
    from etude.run.gateway import Alone, run_alone

    told = {name: getattr(options, name) for name in ("port", "keys", "tls_cert", "tls_key")}
    settings = [f"gateway.{name}={json.dumps(str(value))}" for name, value in told.items() if value is not None]
    if options.port is not None:
        settings[0] = f"gateway.port={options.port}"
    run_alone(
        Alone(
            model=options.model,
            engines=tuple(options.engine),
            payloads=options.payloads,
            access_log=options.access_log,
            settings=(*options.set, *settings),
        )
    )
    return 0


def _keys(options: argparse.Namespace) -> int:
    from etude.run import keys

    if options.action == "ls":
        from rich.console import Console

        keys.show_keys(options.file, Console())
    elif options.action == "revoke":
        keys.revoke_key(options.file, options.key)
    else:
        bounds = (options.requests_per_minute, options.tokens_per_minute)
        key_id, secret = keys.add_key(options.file, options.scope, options.label, bounds, options.expires_s)
        print(f"key {key_id}, scope {options.scope}; this is shown once:", file=sys.stderr)
        print(secret)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from etude.run.chat import chat_with, chat_with_run
    from etude.run.folder import RunFolder

    if (options.run is None) == (options.url is None):
        raise ConfigError("talk with what? give a run folder, or --url URL --key KEY")
    if (options.url is None) != (options.key is None):
        raise ConfigError("--url and --key go together: a run's own key is in its folder")
    if options.url is not None:
        chat_with(options.url, options.key)
    else:
        chat_with_run(RunFolder.open(options.run))
    return 0


def _eval(options: argparse.Namespace) -> int:
    from etude.run.evaluate import evaluate_version
    from etude.run.folder import RunFolder

    result = evaluate_version(RunFolder.open(options.run), version=options.version, tasks=options.tasks)
    print(json.dumps(result, indent=2))
    return 0


def _weights(options: argparse.Namespace) -> int:
    from rich.console import Console

    from etude.run import weights
    from etude.run.folder import RunFolder

    console = Console()
    if options.action == "bench":
        return _bench(argparse.Namespace(name="weights", json=options.json, size_gb=2.0))
    if options.action == "export":
        version = weights.export_run(RunFolder.open(Path(options.store)), options.out, options.version)
        print(f"weight version {version} → {options.out}")
        return 0
    log = weights.log_of(options.store)
    match options.action:
        case "ls":
            weights.show_versions(log, console)
        case "verify":
            weights.verify_store(log, console)
        case "repair":
            weights.repair_store(log, options.mirror, console)
        case "pull":
            pull = weights.extend_folder if options.versions else weights.pull_store
            pull(log, options.out, options.version, console)
        case "gc":
            weights.collect_store(
                log, keep=options.keep, grace_s=options.grace_s, dry_run=options.dry_run, console=console
            )
        case "diff":
            weights.compare_versions(log, options.first, options.second, console)
        case "invert":
            weights.invert_link(log, options.first, options.second, console)
        case _:
            weights.run_relay(log, weights.log_of(options.region), once=options.once, console=console)
    return 0


def _tasks(options: argparse.Namespace) -> int:
    from etude.run.reading import task_lines

    print("\n".join(task_lines(load_recipe(options.recipe), options.split, options.count)))
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


def _bench(options: argparse.Namespace) -> int:
    match options.name:
        case "loop":
            from etude.benchmarks.loop import bench_loop, table

            result = bench_loop(steps=options.steps)
        case "weights":
            from etude.benchmarks.weights import bench_weights, table

            result = bench_weights(size_gb=options.size_gb)
        case "engine":
            from etude.benchmarks.engine import bench_engine, table
            from etude.benchmarks.engine_options import engine_options

            result = bench_engine(
                engine_options(_names(options.contestants), quick=options.quick, threads=options.threads)
            )
        case "numerics":
            from etude.benchmarks.numerics import bench_numerics, numerics_options, table

            result = bench_numerics(numerics_options(_names(options.contestants), quick=options.quick))
        case "gateway":
            from etude.benchmarks.gateway import bench_gateway, gateway_options, table

            result = bench_gateway(gateway_options(_names(options.contestants), quick=options.quick))
        case "quantised":
            from etude.benchmarks.quantised import FORMATS, bench_quantised, table

            result = bench_quantised(
                options.recipe,
                options.out,
                seeds=range(options.seeds),
                formats=_names(options.formats) or FORMATS,
                overrides=options.set,
            )
        case _:
            from etude.benchmarks.sync import bench_sync, table

            result = bench_sync()
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


def _names(listed: str | None) -> tuple[str, ...] | None:
    """The names in a list with commas; ``None`` for all there are."""
    return None if listed is None else tuple(listed.split(","))
