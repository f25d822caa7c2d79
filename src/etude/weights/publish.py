"""From weights in memory to the log: the trainer's end of the chain.

    trainer ──publish(state)──▶ encode chunks ──▶ fill packs ──▶ upload ──▶ announce ──▶ commit ──▶ links, anchors
       │                             │
       └── next forward, backward    └── weights may change again: ``Publication.wait_read``

Everything right of the first arrow happens on threads of the publisher. The order of writes is what makes it safe to
die anywhere: packs first, commit record second, and only then does anyone believe in the version. What one rank does is
here; how several make one version is in ``ranks.py``, how a share is encoded in ``encoding.py``.
"""

import os
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import BoundedSemaphore, Event
from typing import final

from etude import clock
from etude.closing import Closing
from etude.errors import DamagedError, EtudeError, InfrastructureError
from etude.types import WeightPack, WeightVersion
from etude.weights.chunks import CHUNK_NUMBERS, Layout
from etude.weights.codec_choice import CodecChoice, CodecWish
from etude.weights.compact import Compactor
from etude.weights.encoding import DeltaEncoding, full_frames
from etude.weights.full_requests import is_pleaded
from etude.weights.log import WeightLog
from etude.weights.packs import PACK_BYTES, FilledPack, fill_packs
from etude.weights.plan import ladder, needs_anchor
from etude.weights.pull import pull_share
from etude.weights.ranks import Rank, Ranks, SharePacks
from etude.weights.records import Link, commit_key
from etude.weights.shards import Share
from etude.weights.state import State

ANCHOR = "-anchor"
"""What the packs of an anchor are gathered for, after those of the version itself."""
MOST_FOLLOW_UPS = 4
"""Commits whose merged links are being written; beyond this the shortest links wait: long ones save more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """How a publisher works; the defaults suit anything from a laptop to a cluster."""

    codec: CodecWish = "auto"
    """``gaps`` can be merged and taken back, ``classes`` is a quarter smaller; ``auto`` takes the one with which a
    version arrives earlier over the link as uploads have shown it.
    """
    chunk_numbers: int = CHUNK_NUMBERS
    pack_bytes: int = PACK_BYTES
    encoders: int = min(8, os.cpu_count() or 1)
    """Threads that compare and encode."""
    uploads: int = 8
    """Packs on their way at once."""
    anchor_every: int = 64
    """Every how many versions everything is stored whole, for readers that start from nothing; 0 for never."""
    compact: bool = True
    """Whether merged links are written after commits, so that readers that fell behind catch up in few steps."""
    deadline_s: float = 600.0
    """How long the other ranks may take before a publication fails; how long the store may is the store's own."""


@final
class Publication:
    """A version on its way: made by a :class:`Publisher`, watched by whoever called it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.released = Event()
        """Set once the published tensors have been read."""
        self.record: Future[WeightVersion] = Future()
        """The commit record, or what went wrong."""

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would return or raise at once."""
        return self.record.done()

    def wait_read(self, timeout_s: float | None = None) -> float:
        """Wait until the published tensors may change again; returns the seconds this took.

        Call it before the next optimiser step: by then it is long true, unless encoding is slower than a step.
        """
        started_s = time.perf_counter()
        if not self.released.wait(timeout_s):
            raise InfrastructureError(f"weight version {self.version} was not read within {timeout_s} s")
        return time.perf_counter() - started_s

    def result(self, timeout_s: float | None = None) -> WeightVersion:
        """The commit record, once the version is visible to everyone; raises what went wrong."""
        try:
            return self.record.result(timeout_s)
        except TimeoutError as error:
            raise InfrastructureError(f"weight version {self.version} was not committed in {timeout_s} s") from error


@final
class Publisher(Closing):
    """Publishes one rank's share, version after version; versions are committed in the order of the calls.

    It holds a copy of what it published last. Leaving it as a context manager waits for what is under way.
    """

    def __init__(self, log: WeightLog, options: PublishOptions | None = None, rank: Rank | None = None) -> None:
        self._log = log
        self._options = options or PublishOptions()
        self._rank = rank or Rank()
        self._writer = self._rank.launch or uuid.uuid4().hex
        self._ranks = Ranks(log, self._rank, self._writer, self._options.deadline_s)
        self._codec = CodecChoice(self._options.codec, self._options.encoders)
        self._compactor = Compactor(log)
        self._held: tuple[int, Share] | None = None
        self._is_first = True
        self._unreadable: int | None = None
        self._in_order = ThreadPoolExecutor(1, "publish")
        self._encoders = ThreadPoolExecutor(self._options.encoders, "encode")
        self._uploaders = ThreadPoolExecutor(self._options.uploads, "upload")
        self._follow_ups = ThreadPoolExecutor(1, "compact")
        self._pending: list[Future[None]] = []
        self._owed: list[int] = []
        self._failed: list[BaseException] = []

    def close(self) -> None:
        """Finish what is under way and stop all threads."""
        for pool in (self._in_order, self._encoders, self._uploaders, self._follow_ups):
            pool.shutdown()

    def publish(self, state: State, *, version: int, step: int, recipe: str = "") -> Publication:
        """Start to publish ``state`` as ``version``; returns at once.

        Nobody may write to ``state`` before :meth:`Publication.wait_read` returns. Publishing what is already there
        (after a crash) gives the first record. The publication raises :class:`~etude.errors.FencedError` when the
        version is committed with other weights, :class:`~etude.errors.InfrastructureError` when the store or another
        rank does not answer in time, ``ValueError`` when tensors changed their names, types or shapes; the publisher
        can be called again after any of them.
        """
        if version < 0:
            raise ValueError(f"weight version {version} is negative; versions count from 0")
        publication = Publication(version)
        self._in_order.submit(self._run, publication, state, step, recipe)
        return publication

    def settle(self) -> None:
        """Wait for everything under way, links and anchors included; raises what went wrong with those."""
        self._in_order.submit(lambda: None).result()
        self._compact(len(self._owed))
        pending, self._pending = self._pending, []
        wait(pending)
        failed, self._failed = [*self._failed, *filter(None, (one.exception() for one in pending))], []
        if failed:
            raise failed[0]

    def _run(self, publication: Publication, state: State, step: int, recipe: str) -> None:
        try:
            record = self._publish(publication, state, step, recipe)
        except BaseException as error:
            publication.released.set()
            publication.record.set_exception(error)
            raise
        publication.record.set_result(record)
        self._follow_up(record)

    def _publish(self, publication: Publication, state: State, step: int, recipe: str) -> WeightVersion:
        """Packs, then the record; when either fails the share goes back to where it was."""
        version = publication.version
        known = self._held[1].layout if self._held else None
        layout = known if known and known.is_of(state) else Layout.of(state, self._options.chunk_numbers)
        held, self._held = self._base(version, layout), None
        if held is None:
            share = Share.copy_of(layout, state)
            publication.released.set()
            packs = self._upload(full_frames(share, self._encoders), publication)
            whole = SharePacks(layout=layout, content=share.content(), packs=packs, base=None)
            record = self._commit(version, whole, step, recipe)
            self._held = (version, share)
            return record
        base, share = held
        base_digest = self._uploaders.submit(self._digest_to_build_on, base, version)  # costs no time beside the rest
        encoding = DeltaEncoding(share, state, self._codec.current, self._encoders)
        try:
            packs = self._upload(encoding.frames(), publication)
            built_on = base_digest.result()
            if built_on is None:
                packs = self._upload(full_frames(share, self._encoders), publication)
            contribution = SharePacks(
                layout=layout, content=share.content(), packs=packs, base=None if built_on is None else base
            )
            record = self._commit(version, contribution, step, recipe, built_on)
        except BaseException:
            encoding.take_back()
            self._held = held
            raise
        self._held = (version, share)
        return record

    def _digest_to_build_on(self, base: int, version: int) -> str | None:
        """The state digest of ``base``; ``None`` when readers could not take a change of it, or say that they cannot go
        on.
        """
        before = _stored(self._log, base)
        if before is None or is_pleaded(self._log, before, version, alone=self._ranks.alone):
            return None
        return before.digest

    def _base(self, version: int, layout: Layout) -> tuple[int, Share] | None:
        """The version to publish against and this rank's share of it; ``None`` when everything shall be published.

        Usually that is what was published last. After a restart it is read back from the log; when that cannot be done,
        everything is published again: a sound way around the damage.
        """
        held = self._held
        if held is None or held[0] != version - 1:
            newest = max((known for known in self._log.versions() if known < version), default=None)
            if held is None or held[0] != newest:
                held = self._read_back(version, newest, layout)
        if held is not None and held[1].layout.digest != layout.digest:
            raise ValueError(_difference(held[1].layout, layout))
        return held

    def _read_back(self, version: int, newest: int | None, layout: Layout) -> tuple[int, Share] | None:
        """The share of the newest version, if that can be had; all ranks decide alike about a damaged one."""
        held: tuple[int, Share] | None = None
        if newest is not None and newest != self._unreadable:
            try:
                held = newest, pull_share(self._log, newest, self._rank.index, layout)
            except DamagedError:
                if not self._is_first and not self._ranks.alone:
                    raise  # the others go on from what they hold: the next launch will publish everything
        if self._is_first:
            if self._ranks.agree(version, None if held is None else newest) is None:
                held, self._unreadable = None, newest
            self._is_first = False
        return held

    def _upload(
        self, frames: Iterator[tuple[int, bytes]], publication: Publication, *, is_ahead: bool = True
    ) -> tuple[WeightPack, ...]:
        """Store frames as packs while they come, and tell readers of them when they are ahead of a commit.

        While the trainer's own tensors are being read nothing waits for uploads, lest the trainer wait, too: what is
        queued is a delta, a few per cent of the share. A full version comes from a copy and keeps to a window.
        """
        started_s = time.perf_counter()
        keeps_window = publication.released.is_set()
        window = BoundedSemaphore(2 * self._options.uploads)
        uploads: list[Future[WeightPack]] = []
        for sequence, filled in enumerate(fill_packs(frames, self._options.pack_bytes)):
            if keeps_window:
                window.acquire()
            announced = publication.version if is_ahead else None
            upload = self._uploaders.submit(self._store, filled, announced, sequence)
            if keeps_window:
                upload.add_done_callback(lambda _: window.release())
            uploads.append(upload)
        publication.released.set()
        packs = tuple(upload.result() for upload in uploads)
        self._codec.observe(sum(pack.size_bytes for pack in packs), time.perf_counter() - started_s)
        return packs

    def _store(self, filled: FilledPack, version: int | None, sequence: int) -> WeightPack:
        pack = WeightPack(
            digest=self._log.put_pack(filled.data),
            size_bytes=len(filled.data),
            rank=self._rank.index,
            first=filled.first,
            last=filled.last,
        )
        if version is not None and len(filled.data) >= self._options.pack_bytes:  # more are coming before the commit
            self._ranks.announce_pack(version, sequence, pack)
        return pack

    def _commit(
        self, version: int, share: SharePacks, step: int, recipe: str, base_digest: str | None = None
    ) -> WeightVersion:
        self._log.put_layout(share.layout.to_bytes(), again=share.base is None)  # what is whole mends everything
        whole = self._ranks.gather(version, share)
        if whole is None:
            return self._ranks.await_commit(version)
        return self._log.commit(
            WeightVersion(
                version=version,
                base=share.base,
                base_digest=base_digest,
                digest=whole.digest,
                layouts=whole.layouts,
                packs=whole.packs,
                step=step,
                recipe=recipe,
                writer=self._writer,
                created=clock.date_utc(),
            )
        )

    def _follow_up(self, record: WeightVersion) -> None:
        """Give readers shorter ways to ``record``; nobody waits for them, and their failure costs nobody anything."""
        done = [future for future in self._pending if future.done()]
        self._failed = [*self._failed, *filter(None, (one.exception() for one in done))][:MOST_FOLLOW_UPS]
        self._pending = [future for future in self._pending if not future.done()]
        links = ladder(record.version) if self._options.compact and self._rank.index == 0 else []
        is_long = len(links) > 1
        if links:  # readers of a long one pass the short ones by
            self._owed = [*([] if is_long else self._owed), record.version]
        self._compact(max(MOST_FOLLOW_UPS - len(self._pending), int(is_long)))
        every = self._options.anchor_every
        if every and record.base is not None and needs_anchor(record.version, every):
            try:
                self._write_anchor(record)  # at once, so that all ranks do it at the same point
            except EtudeError as error:
                self._failed.append(error)

    def _compact(self, most: int) -> None:
        """Begin to write the merged links of so many versions that still have none."""
        due, self._owed = self._owed[:most], self._owed[most:]
        self._pending += [self._follow_ups.submit(self._compactor.after, version) for version in due]

    def _write_anchor(self, record: WeightVersion) -> None:
        """Store this rank's share whole; rank 0 links all of them."""
        assert self._held is not None and self._held[0] == record.version, "an anchor follows its version at once"
        share = self._held[1]
        reading = Publication(record.version)
        reading.released.set()
        packs = self._upload(full_frames(share, self._encoders), reading, is_ahead=False)
        contribution = SharePacks(layout=share.layout, content=share.content(), packs=packs, base=None)
        whole = self._ranks.gather(record.version, contribution, ANCHOR)
        if whole is not None:
            self._log.add_link(
                Link(
                    source=None,
                    source_digest=None,
                    target=record.version,
                    digest=record.digest,
                    layouts=whole.layouts,
                    packs=whole.packs,
                )
            )


def _stored(log: WeightLog, version: int) -> WeightVersion | None:
    """The record of a version as a reader finds it that comes now, ``None`` if it cannot be read."""
    try:
        return log.records.read_again(WeightVersion, commit_key(version))
    except DamagedError:
        return None


def _difference(before: Layout, after: Layout) -> str:
    old, new = ({part.spec.name: part for part in layout.parts} for layout in (before, after))
    name = min((name for name in old.keys() | new.keys() if old.get(name) != new.get(name)), default="chunk_numbers")
    return (
        f"{name!r} differs from the version before in more than bytes: {old.get(name)} became {new.get(name)}; "
        f"publish another model to another store"
    )
