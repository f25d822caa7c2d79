"""Weight stores, for `etude weights`: the log of a store, its versions and links; verifies, repairs and cleans it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from etude.cli.console import console
from etude.dashboard import formatting
from etude.dashboard.terminal import light_table
from etude.errors import DamagedError, RunFolderError, UserError
from etude.run.folder import RunFolder
from etude.run.weight_log import log_id_of, open_store
from etude.types import WeightVersion
from etude.weights.compact import Compactor
from etude.weights.log import WeightLog
from etude.weights.repair import repair, verify
from etude.weights.retention import collect

LEASE_S = 10 * 60.0
"""Seconds for which a reader's lease is valid."""
NOTHING_THERE = "no version is published there"

Item = TypeVar("Item")


def show_versions(store: str, log_id: str | None) -> None:
    """Print the versions, the version that each was made from, and the links between them."""
    console().print(versions_table(log_of(store, log_id=log_id)), highlight=False)


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


def _readable(log: WeightLog, version: int) -> WeightVersion | None:
    try:
        return log.read(version)
    except DamagedError:
        return None


def verify_store(store: str, log_id: str | None, *, every: bool) -> None:
    """Check every object and digest, and print what is damaged, or ``every`` check.

    Raises :class:`~etude.errors.DamagedError` if anything is.
    """
    log, out = log_of(store, log_id=log_id), console()
    checks = list(_tracked(verify(log), len(log.versions()) + len(log.links()), "verify", out))
    sound = [check for check in checks if check.fault is None]
    for check in checks if every else [check for check in checks if check.fault is not None]:
        verdict = "sound" if check.fault is None else f"{'by a detour: ' if check.detour else ''}{check.fault}"
        out.print(f"{check.name:>14}  {verdict}", soft_wrap=True)
    out.print(f"{len(sound)} of {len(checks)} versions and links are sound" if checks else NOTHING_THERE)
    if any(check.fault for check in checks):
        raise DamagedError("the weight store is damaged: see the lines above; run `etude weights repair`")


def _tracked(items: Iterable[Item], total: int, text: str, console: Console) -> Iterator[Item]:
    """The items, with a bar on a terminal."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
    with bar:
        yield from bar.track(items, total=total, description=text)


def repair_store(store: str, mirror: str | None) -> None:
    """Repair what can be repaired, with objects of a ``mirror``.

    Raises :class:`~etude.errors.DamagedError` for what remains.
    """
    done = list(repair(log_of(store), log_of(mirror) if mirror else None))
    for one in done:
        console().print(f"{one.name}: {one.fault}\n    {one.action}", soft_wrap=True)
    if not done:
        console().print("nothing is broken")
    if not all(one.is_fixed for one in done):
        raise DamagedError(
            "some faults remain: see the lines above; readers can skip them once the next version is out"
        )


def collect_garbage(store: str, *, keep: int, grace_s: float, dry_run: bool) -> None:
    """Delete what no present or future reader needs, and print how much that is."""
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


def invert_link(store: str, first: int, second: int) -> None:
    """Write a link from a newer version back to an older one. Raises :class:`~etude.errors.UserError`."""
    link = Compactor(log_of(store)).link(first, second)
    if link is None:
        raise UserError(f"no link {first} → {second} can be made, or there is one already: see `etude weights ls`")
    console().print(f"{first} → {second}: {sum(pack.size_bytes for pack in link.packs):,} bytes")
