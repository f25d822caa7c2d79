"""`etude weights pull`: fetches a version into a folder of safetensors files, or extends a folder of deltas."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from etude.cli.console import console
from etude.run.folder import require_empty
from etude.weights.interop.checkpoint import write_checkpoint
from etude.weights.interop.version_folder import write_delta, write_full
from etude.weights.log import WeightLog
from etude.weights.pull import Receiver
from etude.weights.state import snapshot, state_bytes

POLL_S = 0.1
"""Seconds between two updates of a progress bar."""


def pull_version(log: WeightLog, out: Path, version: int | None) -> None:
    """Fetch a version, or the newest, into an empty folder. Raises :class:`~etude.errors.ConfigError`."""
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


def _bytes_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True)


def extend_folder(log: WeightLog, root: Path, version: int | None) -> None:
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
        for later in range(current + 1, 1 + (current if target is None else target)):
            before = snapshot(receiver.weights().state)
            receiver.advance(later)
            folder = write_delta(root, later, before, receiver.weights().state)
            console().print(f"{folder}: what changed since version {later - 1}")
