"""What `etude weights` does: look into a weight store, prove it, mend it, tidy it, take versions out of it.

A store is named by a run folder or by the URL of an object store (a path, ``s3://…``). Records are signed and checked
when the environment variable ``ETUDE_WEIGHTS_KEY`` holds a key.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from etude.errors import DamagedError, RunFolderError, UserError
from etude.models.checkpoint import load_spec, save_checkpoint
from etude.run.folder import RunFolder
from etude.run.numerics import checkpoint_extra
from etude.run.states import to_tensors
from etude.run.weight_log import open_log, open_store
from etude.tokens.chat import ChatTemplate
from etude.types import WeightVersion
from etude.weights.compact import Compactor
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.interop.version_folder import write_delta, write_full
from etude.weights.log import WeightLog
from etude.weights.pull import Receiver, pull
from etude.weights.relay import Relay
from etude.weights.repair import repair
from etude.weights.replica import PulledWeights
from etude.weights.retention import collect
from etude.weights.state import snapshot, state_bytes
from etude.weights.verify import verify

POLL_S = 0.1
"""How often progress is drawn, and a relay looks for something new."""

Item = TypeVar("Item")


def log_of(store: str) -> WeightLog:
    """The log in a run folder or at a URL."""
    if (Path(store) / "run.toml").is_file():
        return open_log(RunFolder.open(Path(store)))
    return open_store(store)


def show_versions(log: WeightLog, console: Console) -> None:
    """All versions with their lineage, then the links between them."""
    records = [record for version in log.versions() if (record := _readable(log, version))]
    largest = max((record.size_bytes for record in records), default=0)
    versions = Table("version", "from", "step", "recipe", "created", "digest", title=log.store.url)
    versions.add_column("bytes", justify="right")
    versions.add_column("of full", justify="right")
    for record in records:
        share = f"{record.size_bytes / largest:.1%}" if largest else "–"
        base = "nothing" if record.base is None else str(record.base)
        row = (record.version, base, record.step, record.recipe, record.created[:19], record.digest[:12])
        versions.add_row(*map(str, row), f"{record.size_bytes:,}", share)
    console.print(versions)
    links = Table("link", "bytes", title="links: shorter ways")
    for link in log.links():
        source = "nothing" if link.source is None else str(link.source)
        links.add_row(f"{source} → {link.target}", f"{sum(pack.size_bytes for pack in link.packs):,}")
    if links.row_count:
        console.print(links)


def verify_store(log: WeightLog, console: Console) -> None:
    """One verdict per version and link. Raises :class:`~etude.errors.DamagedError` unless all are sound."""
    checks = list(_tracked(verify(log), len(log.versions()) + len(log.links()), "verify", console))
    for check in checks:
        verdict = "sound" if check.fault is None else f"{'by a detour: ' if check.detour else ''}{check.fault}"
        console.print(f"{check.name:>14}  {verdict}", soft_wrap=True, highlight=False)
    if not checks:
        console.print("no version is published yet")
    if any(check.fault for check in checks):
        raise DamagedError("the weight store is damaged: see the lines above; run `etude weights repair`")


def repair_store(log: WeightLog, mirror: str | None, console: Console) -> None:
    """Mend what can be mended and say what was done. Raises :class:`~etude.errors.DamagedError` if faults remain."""
    done = list(repair(log, log_of(mirror) if mirror else None))
    for one in done:
        console.print(f"{one.name}: {one.fault}\n    {one.action}", soft_wrap=True, highlight=False)
    if not done:
        console.print("nothing is broken")
    if not all(one.mended for one in done):
        raise DamagedError("some faults remain: see the lines above; the next version published goes around them")


def pull_store(log: WeightLog, out: Path, version: int | None, console: Console) -> None:
    """Fetch a version into ``out`` as safetensors files, with a progress bar."""
    _require_empty(out)
    with Receiver(log) as receiver, ThreadPoolExecutor(1) as thread, _bytes_bar(console) as bar:
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
    console.print(
        f"version {pulled.version} ({pulled.digest[:12]}): {arrival.size_bytes:,} bytes fetched for {size:,} in "
        f"{arrival.seconds:.1f} s → {out}"
    )


def extend_folder(log: WeightLog, root: Path, version: int | None, console: Console) -> None:
    """Bring a folder of ``weight_vNNNNNN`` versions, as slime, miles and SGLang read it, up to ``version``.

    An empty one starts with everything; one that has versions gets a delta for each that is missing.
    """
    held = max((int(folder.name[-6:]) for folder in root.glob("weight_v" + "[0-9]" * 6)), default=None)
    with Receiver(log) as receiver:
        target = log.latest() if version is None else version
        if held is None:
            receiver.advance(target)
            pulled = receiver.weights()
            console.print(f"{write_full(root, pulled.version, pulled.state)}: everything")
            return
        receiver.advance(held)
        for following in range(held + 1, 1 + (held if target is None else target)):
            before = snapshot(receiver.weights().state)
            receiver.advance(following)
            folder = write_delta(root, following, before, receiver.weights().state)
            console.print(f"{folder}: what changed since version {following - 1}")


def collect_store(log: WeightLog, *, keep: int, grace_s: float, dry_run: bool, console: Console) -> None:
    """Delete what no reader, present or future, needs."""
    report = collect(log, keep=keep, grace_s=grace_s, lease_s=10 * 60.0, dry_run=dry_run)
    verb = "would remove" if report.dry_run else "removed"
    console.print(
        f"{verb} {report.versions} versions, {report.objects} objects, {report.size_bytes:,} bytes; "
        f"everything from version {report.keep_from} on stays"
    )


def export_run(folder: RunFolder, out: Path, version: int | None) -> int:
    """Write a version as a Hugging Face checkpoint, tokenizer included; returns the version.

    Raises :class:`~etude.errors.RunFolderError` when ``out`` cannot be written or already holds something.
    """
    _require_empty(out)
    pulled = pull(open_log(folder), version)
    chat = ChatTemplate.load(folder.model)
    state = to_tensors(pulled.state)
    extra = checkpoint_extra(state, folder.config().numerics)
    try:
        save_checkpoint(out, load_spec(folder.model), state, end_id=chat.end_id, pad_id=chat.pad_id, extra=extra)
        chat.save(out)
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror}") from error
    return pulled.version


def compare_versions(log: WeightLog, first: int, second: int, console: Console) -> None:
    """How two versions differ, tensor by tensor; the most changed first."""
    before, after = pull(log, first), pull(log, second)
    table = Table("tensor", "type", "shape", title=f"version {first} → {second}")
    for column in ("numbers", "changed", "share"):
        table.add_column(column, justify="right")
    rows = sorted(_differences(before, after), key=lambda row: -row[3] / max(1, row[2]))
    for name, kind, numbers, changed in rows:
        shape = "×".join(map(str, after.state[name].spec.shape)) or "scalar"
        table.add_row(name, kind, shape, f"{numbers:,}", f"{changed:,}", f"{changed / max(1, numbers):.3%}")
    console.print(table)
    numbers, changed = sum(row[2] for row in rows), sum(row[3] for row in rows)
    console.print(f"{changed:,} of {numbers:,} numbers differ: {changed / max(1, numbers):.3%}")


def invert_link(log: WeightLog, source: int, target: int, console: Console) -> None:
    """Write a link that leads back, made from those that lead forward."""
    if target >= source:
        raise UserError(f"{source} → {target} does not lead back: give the newer version first")
    link = Compactor(log).link(source, target)
    if link is None:
        raise UserError(f"no link {source} → {target} can be made, or there is one already: see `etude weights ls`")
    console.print(f"{source} → {target}: {sum(pack.size_bytes for pack in link.packs):,} bytes")


def run_relay(origin: WeightLog, region: WeightLog, *, once: bool, console: Console) -> None:
    """Copy ``origin`` into ``region``, for ever unless ``once``."""
    newest: int | None = None
    with Relay(origin, region) as relay:
        while True:
            relay.prefetch()
            held = relay.advance()
            if held != newest:
                newest = held
                console.print(f"version {held} is in {region.store.url}")
            if once:
                return
            time.sleep(POLL_S)


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


def _require_empty(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty: choose another folder, nothing is overwritten")


def _tracked(items: Iterable[Item], total: int, text: str, console: Console) -> Iterator[Item]:
    """The items, with a bar on a terminal."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
    with bar:
        yield from bar.track(items, total=total, description=text)


def _bytes_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True)
