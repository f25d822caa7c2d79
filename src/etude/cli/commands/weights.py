"""`etude weights`: lists, verifies, repairs, exports and copies the versions of a weight store, and collects garbage.

A store is named by a run folder or by the URL of an object store (a path, ``s3://…``). Records are signed and checked
when the environment variable ``ETUDE_WEIGHTS_KEY`` holds a key.
"""

import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import numpy as np
import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from etude.backoff import Backoff
from etude.cli.console import console
from etude.cli.options import All, RunPath, group
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.errors import DamagedError, InfrastructureError, RunFolderError, UserError
from etude.run.folder import RunFolder, require_empty
from etude.run.heartbeat import Heartbeat
from etude.run.weight_log import log_id_of, open_store
from etude.run.working_folder import open_run_folder
from etude.types import WeightVersion
from etude.weights.compact import Compactor
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.interop.version_folder import write_delta, write_full
from etude.weights.log import WeightLog
from etude.weights.pull import Receiver, pull
from etude.weights.relay import Relay
from etude.weights.relay_lease import RelayLease
from etude.weights.repair import repair as repair_log
from etude.weights.repair import verify as verify_log
from etude.weights.replica import PulledWeights
from etude.weights.retention import collect
from etude.weights.state import snapshot, state_bytes

POLL_S = 0.1
"""Seconds between two updates of a progress bar, and between two polls of a relay."""
MOST_TENSORS = 20
"""Tensors that a comparison shows: those that changed most."""
LEASE_S = 10 * 60.0
"""Seconds for which a reader's lease is valid."""
RELAY_PAUSES = Backoff(first_s=0.5, longest_s=1.0, jitter=0.5)
"""Pauses of a relay that cannot reach a store; short, so that it continues as soon as the link is back."""
NOTHING_THERE = "no version is published there"

Item = TypeVar("Item")


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
    console().print(versions_table(log_of(store, log_id=log_id)), highlight=False)


@app.command()
def verify(store: Store, *, log_id: LogId = None, every: All = False) -> None:
    """Check every object and digest."""
    log, out = log_of(store, log_id=log_id), console()
    checks = list(_tracked(verify_log(log), len(log.versions()) + len(log.links()), "verify", out))
    sound = [check for check in checks if check.fault is None]
    for check in checks if every else [check for check in checks if check.fault is not None]:
        verdict = "sound" if check.fault is None else f"{'by a detour: ' if check.detour else ''}{check.fault}"
        out.print(f"{check.name:>14}  {verdict}", soft_wrap=True)
    out.print(f"{len(sound)} of {len(checks)} versions and links are sound" if checks else NOTHING_THERE)
    if any(check.fault for check in checks):
        raise DamagedError("the weight store is damaged: see the lines above; run `etude weights repair`")


@app.command()
def repair(
    store: Store,
    *,
    mirror: Annotated[str | None, typer.Option(help="Another store of the same log, for sound objects.")] = None,
) -> None:
    """Repair what can be repaired."""
    done = list(repair_log(log_of(store), log_of(mirror) if mirror else None))
    for one in done:
        console().print(f"{one.name}: {one.fault}\n    {one.action}", soft_wrap=True)
    if not done:
        console().print("nothing is broken")
    if not all(one.is_fixed for one in done):
        raise DamagedError(
            "some faults remain: see the lines above; readers can skip them once the next version is out"
        )


@app.command("pull")
def pull_version(
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
    log = log_of(store, log_id=log_id, at_least=at_least)
    if versions:
        _extend_folder(log, out, version)
        return
    require_empty(out)
    with Receiver(log) as receiver, ThreadPoolExecutor(1) as thread, _bytes_bar(console()) as bar:
        plan = receiver.plan(version)
        task = bar.add_task(f"{len(plan.edges)} links", total=plan.size_bytes)
        arriving = thread.submit(receiver.advance, version)
        while not arriving.done():
            bar.update(task, completed=receiver.fetched_bytes)
            time.sleep(POLL_S)
        arrival = arriving.result()
        bar.update(task, completed=receiver.fetched_bytes)
        pulled = receiver.weights()
        write_checkpoint(out, pulled.state)
    size = state_bytes(pulled.state)
    console().print(
        f"version {pulled.version} ({pulled.digest[:12]}): {arrival.size_bytes:,} bytes fetched for {size:,} in "
        f"{arrival.seconds:.1f} s → {out}"
    )


@app.command()
def gc(
    store: Store,
    *,
    keep: Annotated[int, typer.Option(help="Versions before the newest that are never removed.")] = 64,
    grace_s: Annotated[float, typer.Option(help="Age from which unused objects are removed.")] = 3600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Delete what no present or future reader needs."""
    folder, needed = RunFolder(Path(store)), list[int]()
    if folder.config_file.is_file() and (loss := folder.config().loss).needs_reference:
        needed.append(loss.reference_version)  # the trainer reads it whenever it starts; a URL does not say
    log = log_of(store)
    report = collect(log, keep=keep, needed=needed, grace_s=grace_s, lease_s=LEASE_S, dry_run=dry_run)
    verb = "would remove" if report.dry_run else "removed"
    console().print(
        f"{verb} {report.versions} versions, {report.objects} objects, {report.size_bytes:,} bytes; "
        f"everything from version {report.keep_from} on stays"
    )


@app.command()
def export(
    store: RunPath,
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    version: Version = None,
    peft: Annotated[bool, typer.Option("--peft", help="Write only the adapter of a LoRA run, unmerged.")] = False,
) -> None:
    """Write a version of a run as a Hugging Face checkpoint with its tokenizer, or its adapter as a PEFT folder."""
    from etude.run.export import export_run  # takes torch

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
    log = log_of(store, log_id=log_id)
    before, after = pull(log, first), pull(log, second)
    table = light_table("changed", ">numbers", "type", "shape", "tensor")
    rows = sorted(_differences(before, after), key=lambda row: -row[3] / max(1, row[2]))
    for name, kind, numbers, changed in rows if every else rows[:MOST_TENSORS]:
        shape = "×".join(map(str, after.state[name].spec.shape)) or "scalar"
        table.add_row(f"{changed / max(1, numbers):.3%}", formatting.brief(numbers), kind, shape, name)
    console().print(table)
    if not every and len(rows) > MOST_TENSORS:
        console().print(f"and {len(rows) - MOST_TENSORS} more tensors: --all")
    numbers, changed = sum(row[2] for row in rows), sum(row[3] for row in rows)
    console().print(f"{changed:,} of {numbers:,} numbers differ: {changed / max(1, numbers):.3%}")


@app.command()
def invert(store: Store, first: int, second: int) -> None:
    """Write a link from a newer version back to an older one, for rollbacks. It is computed from existing links."""
    if second >= first:
        raise UserError(f"{first} → {second} is not a way back: give the newer version first")
    link = Compactor(log_of(store)).link(first, second)
    if link is None:
        raise UserError(f"no link {first} → {second} can be made, or there is one already: see `etude weights ls`")
    console().print(f"{first} → {second}: {sum(pack.size_bytes for pack in link.packs):,} bytes")


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
    origin, nearer = log_of(store, log_id=log_id, at_least=at_least, far=True), open_store(region)
    if once:
        with Relay(origin, nearer) as copying:
            console().print(f"version {copying.advance()} is in {nearer.store.url}")
        return
    with RelayLease(nearer.store) as lease, Relay(origin, nearer, lease=lease) as copying:
        _keep_up(copying, lease, nearer.store.url)


def _keep_up(copying: Relay, lease: RelayLease, region: str) -> None:
    """Copy each version while the lease is held, and say so."""
    newest: int | None = None
    was_active, failures, heartbeat = True, 0, Heartbeat()
    while True:
        heartbeat.beat()
        is_active = lease.wait(RELAY_PAUSES.first_s)
        if is_active != was_active:
            was_active = is_active
            console().print("this relay is active" if is_active else "this relay is on standby")
        if not is_active:
            continue
        try:
            current = copying.follow()
        except InfrastructureError as error:
            failures += 1
            console().print(f"trying again: {error}")
            lease.release()  # another relay may be better off
            time.sleep(RELAY_PAUSES.delay_s(failures, random.random()))
            lease.seek()
            continue
        failures = 0
        if current != newest:
            newest = current
            console().print(f"version {current} is in {region}")
        time.sleep(POLL_S)


def log_of(store: str, *, log_id: str | None = None, at_least: int = 0, far: bool = False) -> WeightLog:
    """The log that is in a run folder or at a URL. Raises :class:`~etude.errors.UserError` where there is none.

    ``log_id`` is what it has to be, which a run folder says by itself, and ``at_least`` a version that it has to have;
    ``far`` as :func:`~etude.run.weight_log.open_store` has it.
    """
    folder = RunFolder(Path(store))
    if folder.config_file.is_file():
        if not Path(folder.store).is_dir():
            raise RunFolderError(f"no weight version is published in the run {store} yet")
        return open_store(folder.store, creates=False, log_id=log_id or log_id_of(folder), at_least=at_least)
    if "://" not in store and not folder.path.is_dir():
        raise RunFolderError(f"{store!r} is neither a run folder nor a weight store")
    return open_store(store, creates=False, log_id=log_id, at_least=at_least, far=far)


def versions_table(log: WeightLog) -> RenderableType:
    """All versions with their lineage, then the links between them."""
    records = [record for version in log.versions() if (record := _readable(log, version))]
    if not log.versions():
        return NOTHING_THERE
    largest = max((record.size_bytes for record in records), default=0)
    columns = ("version", "from", ">step", "created", "digest", ">size", ">share", "recipe")
    versions = light_table(*columns, broken=["created"])
    for record in records:
        share = f"{record.size_bytes / largest:.1%}" if largest else "–"
        base = formatting.MISSING if record.base is None else str(record.base)
        row = (record.version, base, record.step, record.created[:16].replace("T", " "), record.digest[:12])
        versions.add_row(*map(str, row), formatting.size(record.size_bytes), share, record.recipe)
    links = light_table("link, a shorter way", ">size")
    for link in log.links():
        source = "nothing" if link.source is None else str(link.source)
        links.add_row(f"{source} → {link.target}", formatting.size(sum(pack.size_bytes for pack in link.packs)))
    parts: list[RenderableType] = [f"log {log.records.log_id()}", versions]
    return Group(*parts, "", links) if links.row_count else Group(*parts)


def _extend_folder(log: WeightLog, root: Path, version: int | None) -> None:
    """Bring a folder of ``weight_vNNNNNN`` versions, as slime, miles and SGLang read it, up to ``version``.

    An empty one starts with everything; one that has versions gets a delta for each that is missing.
    """
    current = max((int(folder.name[-6:]) for folder in root.glob("weight_v" + "[0-9]" * 6)), default=None)
    with Receiver(log) as receiver:
        target = log.latest() if version is None else version
        if current is None:
            receiver.advance(target)
            pulled = receiver.weights()
            console().print(f"{write_full(root, pulled.version, pulled.state)}: everything")
            return
        receiver.advance(current)
        for following in range(current + 1, 1 + (current if target is None else target)):
            before = snapshot(receiver.weights().state)
            receiver.advance(following)
            folder = write_delta(root, following, before, receiver.weights().state)
            console().print(f"{folder}: what changed since version {following - 1}")


def _readable(log: WeightLog, version: int) -> WeightVersion | None:
    try:
        return log.read(version)
    except DamagedError:
        return None


def _differences(before: PulledWeights, after: PulledWeights) -> Iterator[tuple[str, str, int, int]]:
    """(tensor, type, numbers, changed numbers) of every tensor that both versions have."""
    for name, tensor in after.state.items():
        other = before.state.get(name)
        if other is not None and other.spec == tensor.spec:
            changed = int(np.count_nonzero(other.numbers != tensor.numbers))
            yield name, tensor.spec.dtype, len(tensor.numbers), changed


def _tracked(items: Iterable[Item], total: int, text: str, console: Console) -> Iterator[Item]:
    """The items, with a bar on a terminal."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
    with bar:
        yield from bar.track(items, total=total, description=text)


def _bytes_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True)
