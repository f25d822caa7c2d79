"""``etude weights``: look into a weight store, prove it, mend it, take versions out."""

import argparse
from pathlib import Path

from etude.cli.options import Commands


def add_commands(commands: Commands) -> None:
    """Add the commands of this part."""
    _add_weights(commands)


def _add_weights(commands: Commands) -> None:
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
    ):
        parsers[action] = actions.add_parser(action, help=text)
        parsers[action].set_defaults(command=_weights, action=action)
        parsers[action].add_argument("store", help="a run folder or the URL of an object store (a path, s3://…)")
    for action in ("ls", "verify", "pull", "diff", "relay"):
        parsers[action].add_argument(
            "--log-id", metavar="ID", help="refuse any other log, such as another run's with the same key"
        )
    for action in ("pull", "relay"):
        parsers[action].add_argument(
            "--at-least",
            type=int,
            metavar="N",
            help="refuse a store whose newest version is older: something is missing",
        )
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
    parsers["diff"].add_argument("--all", action="store_true", help="every tensor, not the 20 that changed most")
    parsers["relay"].add_argument("region", help="the nearer store")
    parsers["relay"].add_argument("--once", action="store_true", help="copy what there is and end")


def _weights(options: argparse.Namespace) -> int:
    from etude.cli.commands import show, weights
    from etude.run.folder import RunFolder
    from etude.run.weight_log import open_store

    console = show.console()
    if options.action == "export":
        from etude.cli.commands.export import export_run

        version = export_run(RunFolder.open(Path(options.store), writes=False), options.out, options.version)
        print(f"weight version {version} → {options.out}")
        return 0
    known = vars(options)
    log = weights.log_of(options.store, log_id=known.get("log_id"), at_least=known.get("at_least") or 0)
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
                log,
                keep=options.keep,
                needed=weights.needed_by_trainer(options.store),
                grace_s=options.grace_s,
                dry_run=options.dry_run,
                console=console,
            )
        case "diff":
            most = None if options.all else weights.MOST_TENSORS
            weights.compare_versions(log, options.first, options.second, console, most=most)
        case "invert":
            weights.invert_link(log, options.first, options.second, console)
        case _:
            weights.run_relay(log, open_store(options.region), once=options.once, console=console)
    return 0
