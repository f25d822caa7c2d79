"""`etude weights`: lists, verifies, repairs, exports and copies the versions of a weight store, and collects garbage.

A store is named by a run folder or by the URL of an object store (a path, ``s3://…``). Records are signed and checked
when the environment variable ``ETUDE_WEIGHTS_KEY`` holds a key.

Owns the options; the modules that it imports do the rest.
"""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.options import All, RunPath, group
from etude.errors import UserError

Store: TypeAlias = Annotated[
    str, typer.Argument(metavar="STORE", help="A run folder, or the URL of an object store (a path, s3://…).")
]
Version: TypeAlias = Annotated[int | None, typer.Option(help="Weight version (default: the newest).")]
LogId: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Id that the log must have; refuses another run's log with the same key."),
]
AtLeast: TypeAlias = Annotated[
    int,
    typer.Option(metavar="N", help="Refuse a store whose newest version is older than N, since versions are missing."),
]

app = group()


@app.command("ls")
def list_versions(store: Store, *, log_id: LogId = None) -> None:
    """List the versions, the version that each was made from, and the links between them."""
    from etude.cli.actions.weight_store import show_versions

    show_versions(store, log_id)


@app.command()
def verify(store: Store, *, log_id: LogId = None, every: All = False) -> None:
    """Check every object and digest."""
    from etude.cli.actions.weight_store import verify_store

    verify_store(store, log_id, every=every)


@app.command()
def repair(
    store: Store,
    *,
    mirror: Annotated[str | None, typer.Option(help="Another store of the same log, for sound objects.")] = None,
) -> None:
    """Repair what can be repaired."""
    from etude.cli.actions.weight_store import repair_store

    repair_store(store, mirror)


@app.command("pull")
def pull_command(
    store: Store,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    version: Version = None,
    versions: Annotated[
        bool,
        typer.Option("--versions", help="Extend a folder of weight_vNNNNNN deltas, as SGLang and slime read it."),
    ] = False,
    log_id: LogId = None,
    at_least: AtLeast = 0,
) -> None:
    """Fetch a version as safetensors files."""
    from etude.cli.actions.pull_weights import extend_folder, pull_version
    from etude.cli.actions.weight_store import log_of

    log = log_of(store, log_id=log_id, at_least=at_least)
    if versions:
        extend_folder(log, out, version)
    else:
        pull_version(log, out, version)


@app.command()
def gc(
    store: Store,
    *,
    keep: Annotated[int, typer.Option(help="Versions before the newest that are never removed.")] = 64,
    grace_s: Annotated[float, typer.Option(help="Age from which unused objects are removed.")] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Delete what no present or future reader needs."""
    from etude.cli.actions.weight_store import collect_garbage

    collect_garbage(store, keep=keep, grace_s=grace_s, dry_run=dry_run)


@app.command()
def export(
    store: RunPath,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    version: Version = None,
    peft: Annotated[bool, typer.Option("--peft", help="Write only the adapter of a LoRA run, unmerged.")] = False,
) -> None:
    """Write a version of a run as a Hugging Face checkpoint with its tokenizer, or its adapter as a PEFT folder."""
    from etude.run.export import export_run
    from etude.run.working_folder import open_run_folder

    print(f"weight version {export_run(open_run_folder(store, writes=False), out, version, peft=peft)} → {out}")


@app.command()
def diff(
    store: Store,
    first: int,
    second: int,
    *,
    every: Annotated[bool, typer.Option("--all", help="List every tensor, not only the 20 that changed most.")] = False,
    log_id: LogId = None,
) -> None:
    """Compare two versions, tensor by tensor."""
    from etude.cli.actions.compare_weights import compare_versions

    compare_versions(store, first, second, every=every, log_id=log_id)


@app.command()
def invert(store: Store, first: int, second: int) -> None:
    """Write a link from a newer version back to an older one, for rollbacks. It is computed from existing links."""
    if second >= first:
        raise UserError(f"{first} → {second} is not a way back: give the newer version first")
    from etude.cli.actions.weight_store import invert_link

    invert_link(store, first, second)


@app.command()
def relay(
    store: Store,
    region: Annotated[str, typer.Argument(metavar="REGION", help="URL of the store to copy to.")],
    *,
    once: Annotated[bool, typer.Option("--once", help="Copy what is there now, then exit.")] = False,
    log_id: LogId = None,
    at_least: AtLeast = 0,
) -> None:
    """Copy a store to another one that is closer to its readers, and keep the copy up to date.

    If a region has several relays, one copies and another takes over when it stops. A store that cannot be reached is
    retried without limit.
    """
    from etude.cli.actions.relay_weights import relay_store

    relay_store(store, region, once=once, log_id=log_id, at_least=at_least)
