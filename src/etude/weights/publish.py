"""From weights in memory to the log: the trainer's end of the chain.

    trainer ──publish(state)──▶ encode chunks ──▶ fill packs ──▶ upload ──▶ announce ──▶ commit ──▶ links, anchors
       │                             │
       └── next forward, backward    └── weights may change again: ``Publication.wait_read``

Everything right of the first arrow happens on threads of the publisher. The order of writes is what makes it safe to
die anywhere: packs first, commit record second, and only then does anyone believe in the version. One process publishes
the whole state: of a trainer on several ranks, the one that gathers it.
"""

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Event
from typing import final

from etude import clock
from etude.closing import Closing
from etude.errors import DamagedError, FencedError, InfrastructureError, UserError
from etude.types import WeightPack, WeightVersion
from etude.weights.chunks import CHUNK_NUMBERS, Chunk, Layout
from etude.weights.codecs.codec import Codec
from etude.weights.codecs.gaps import GAPS
from etude.weights.compact import Compactor
from etude.weights.frames import sparse_codecs
from etude.weights.log import WeightLog
from etude.weights.packs import PACK_BYTES, FilledPack, fill_packs
from etude.weights.plan import ladder, needs_anchor
from etude.weights.pull import Receiver
from etude.weights.records import Announcement, Link, commit_key
from etude.weights.replica import Move, Replica
from etude.weights.state import State

MOST_FOLLOW_UPS = 4
"""Commits whose merged links are being written; beyond this the shortest links wait: long ones save more."""
WINDOW = 64
"""Chunks of a full version that are encoded ahead of their upload: enough for every thread, little enough to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Options of a publisher; the defaults suit anything from a laptop to a cluster."""

    codec: str = "auto"
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
    """Versions between those that are stored whole, for readers that start from nothing; 0 for none."""
    compact: bool = True
    """True if merged links are written after commits, so that readers that fell behind catch up in few steps."""


@final
class Publication:
    """A version that is being published: made by a :class:`Publisher`, watched by its caller."""

    def __init__(self, version: int, before_commit: Callable[[], None] = lambda: None) -> None:
        self.version = version
        self.before_commit = before_commit
        self.released = Event()
        """Set once the published tensors have been read."""
        self.record: Future[WeightVersion] = Future()
        """The commit record, or the error."""

    @property
    def done(self) -> bool:
        """True if :meth:`result` would return or raise at once."""
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
    """Publishes a state, version after version; versions are committed in the order of the calls.

    It holds a copy of what it published last. Leaving it as a context manager waits for what is under way.
    """

    def __init__(self, log: WeightLog, options: PublishOptions | None = None) -> None:
        self._log = log
        self._options = options or PublishOptions()
        self._writer = uuid.uuid4().hex
        self._codec = CodecSelection(self._options.codec, self._options.encoders)
        self._compactor = Compactor(log)
        self._published: tuple[int, Replica] | None = None
        self._unreadable: int | None = None
        self._in_order = ThreadPoolExecutor(1, "publish")
        self._encoders = ThreadPoolExecutor(self._options.encoders, "encode")
        self._uploaders = ThreadPoolExecutor(self._options.uploads, "upload")
        self._follow_ups = ThreadPoolExecutor(1, "compact")
        self._pending: list[Future[None]] = []
        self._owed: list[int] = []
        self._failed: deque[BaseException] = deque(maxlen=MOST_FOLLOW_UPS)

    def close(self) -> None:
        """Finish what is under way and stop all threads."""
        for pool in (self._in_order, self._encoders, self._uploaders, self._follow_ups):
            pool.shutdown()

    def publish(
        self,
        state: State,
        *,
        version: int,
        step: int,
        recipe: str = "",
        before_commit: Callable[[], None] = lambda: None,
    ) -> Publication:
        """Start to publish ``state`` as ``version``; returns at once.

        ``before_commit`` is called, on another thread, when all is there and the version is about to become visible.

        ``state`` must not be written to before :meth:`Publication.wait_read` returns. Publishing what is already there
        (after a crash) gives the first record. The publication raises :class:`~etude.errors.FencedError` when the
        version is committed with other weights, :class:`~etude.errors.InfrastructureError` when the store does not
        answer in time, ``ValueError`` when tensors changed their names, types or shapes; the publisher can be called
        again after any of them.
        """
        if version < 0:
            raise ValueError(f"weight version {version} is negative; versions count from 0")
        publication = Publication(version, before_commit)
        self._in_order.submit(self._run, publication, state, step, recipe)
        return publication

    def settle(self) -> None:
        """Wait for everything under way, links and anchors included; raises what went wrong with those."""
        self._in_order.submit(lambda: None).result()
        self._compact(len(self._owed))
        pending, self._pending = self._pending, []
        wait(pending)
        self._failed.extend(filter(None, (one.exception() for one in pending)))
        for error in self.take_failures():
            raise error

    def take_failures(self) -> list[BaseException]:
        """The errors of links and anchors since the last call. Without these readers have a longer way, and old
        versions cannot be deleted.
        """
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def _run(self, publication: Publication, state: State, step: int, recipe: str) -> None:
        try:
            record = self._publish(publication, state, step, recipe)
        except BaseException as error:
            publication.released.set()
            publication.record.set_exception(error)
            raise
        publication.record.set_result(record)
        try:
            self._follow_up(record)
        except BaseException as error:
            self._failed.append(error)
            raise

    def _publish(self, publication: Publication, state: State, step: int, recipe: str) -> WeightVersion:
        """Packs, then the record; when either fails the replica goes back to where it was."""
        version = publication.version
        layout = self._published[1].layout if self._published else None
        if layout is None or not layout.is_of(state):
            layout = Layout.of(state, self._options.chunk_numbers)
        published, self._published = self._base(version, layout), None
        if published is None:
            replica = Replica.copy_of(layout, state)
            publication.released.set()
            packs = self._upload(full_frames(replica, self._encoders), publication)
            record = self._commit(publication, replica, packs, step, recipe)
            self._published = (version, replica)
            return record
        base, replica = published
        base_digest = self._uploaders.submit(self._digest_to_build_on, base, version)  # costs no time beside the rest
        encoding = DeltaEncoding(replica, state, self._codec.current, self._encoders)
        try:
            packs = self._upload(encoding.frames(), publication)
            built_on = base_digest.result()
            if built_on is None:
                packs = self._upload(full_frames(replica, self._encoders), publication)
                record = self._commit(publication, replica, packs, step, recipe)
            else:
                record = self._commit(publication, replica, packs, step, recipe, (base, built_on))
        except BaseException:
            encoding.take_back()
            self._published = published
            raise
        self._published = (version, replica)
        return record

    def _digest_to_build_on(self, base: int, version: int) -> str | None:
        """The state digest of ``base``; ``None`` when readers could not take a change of it, or say that they cannot go
        on.
        """
        before = _stored(self._log, base)
        if before is None or self._log.is_full_requested(before, version):
            return None
        return before.digest

    def _base(self, version: int, layout: Layout) -> tuple[int, Replica] | None:
        """The version to publish against and a replica of it; ``None`` when everything shall be published.

        Usually that is what was published last. After a restart it is read back from the log; when that cannot be done,
        everything is published again: a sound way around the damage.
        """
        published = self._published
        if published is None or published[0] != version - 1:
            newest = max((number for number in self._log.versions() if number < version), default=None)
            if published is None or published[0] != newest:
                published = self._read_back(newest)
        return None if published is None else (published[0], published[1].laid_out(layout))

    def _read_back(self, newest: int | None) -> tuple[int, Replica] | None:
        """The newest version, if it can be had."""
        if newest is None or newest == self._unreadable:
            return None
        try:
            with Receiver(self._log) as receiver:
                receiver.advance(newest)
                return newest, receiver.replica
        except DamagedError:
            self._unreadable = newest
            return None

    def _upload(
        self, frames: Iterator[tuple[int, bytes]], publication: Publication, *, is_ahead: bool = True
    ) -> tuple[WeightPack, ...]:
        """Store frames as packs while they come, and tell readers of them when they are ahead of a commit.

        While the trainer's own tensors are being read nothing waits for uploads, lest the trainer wait, too: what is
        queued is a delta, a few per cent of the state. A full version comes from a copy and keeps to a window.
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
        pack = self._log.put_filled(filled)
        if version is not None and len(filled.data) >= self._options.pack_bytes:  # more are coming before the commit
            with suppress(FencedError):  # an earlier try has announced another pack, which stays
                self._log.announce(Announcement(version=version, writer=self._writer, sequence=sequence, packs=(pack,)))
        return pack

    def _commit(
        self,
        publication: Publication,
        replica: Replica,
        packs: tuple[WeightPack, ...],
        step: int,
        recipe: str,
        base: tuple[int, str] | None = None,
    ) -> WeightVersion:
        """Write the record; ``base`` is the version that the packs are a change of, and its digest."""
        source, source_digest = base or (None, None)
        publication.before_commit()
        layout = self._log.put_layout(replica.layout.to_bytes(), again=base is None)  # what is whole repairs everything
        return self._log.commit(
            WeightVersion(
                version=publication.version,
                base=source,
                base_digest=source_digest,
                digest=replica.state_digest(),
                layout=layout,
                packs=packs,
                step=step,
                recipe=recipe,
                writer=self._writer,
                created=clock.date_utc(),
            )
        )

    def _follow_up(self, record: WeightVersion) -> None:
        """Give readers shorter ways to ``record``; a commit does not wait for them, nor fail with them."""
        done = [future for future in self._pending if future.done()]
        self._failed.extend(filter(None, (one.exception() for one in done)))
        self._pending = [future for future in self._pending if not future.done()]
        links = ladder(record.version) if self._options.compact else []
        is_long = len(links) > 1
        if links:  # readers of a long one pass the short ones by
            self._owed = [*([] if is_long else self._owed), record.version]
        self._compact(max(MOST_FOLLOW_UPS - len(self._pending), int(is_long)))
        every = self._options.anchor_every
        if every and record.base is not None and needs_anchor(record.version, every):
            self._write_anchor(record)

    def _compact(self, most: int) -> None:
        """Start to write the merged links of versions that still have none."""
        due, self._owed = self._owed[:most], self._owed[most:]
        self._pending += [self._follow_ups.submit(self._compactor.after, version) for version in due]

    def _write_anchor(self, record: WeightVersion) -> None:
        """Store the version whole, and a link to it from nothing."""
        assert self._published is not None and self._published[0] == record.version, (
            "an anchor follows its version at once"
        )
        reading = Publication(record.version)
        reading.released.set()
        packs = self._upload(full_frames(self._published[1], self._encoders), reading, is_ahead=False)
        anchor = Link(
            source=None,
            source_digest=None,
            target=record.version,
            digest=record.digest,
            layout=record.layout,
            packs=packs,
        )
        self._log.add_link(anchor)


@final
class DeltaEncoding:
    """Moves a replica to ``target`` on several threads; it is at the target when all frames are out."""

    def __init__(self, replica: Replica, target: State, codec: Codec, encoders: Executor) -> None:
        self._replica = replica
        self._futures: list[Future[Move | None]] = [
            encoders.submit(replica.advance, chunk, target, codec) for chunk in replica.layout.chunks
        ]

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """The changed chunks, ascending."""
        for future in self._futures:
            move = future.result()
            if move is not None:
                yield move.chunk.index, move.frame

    def take_back(self) -> None:
        """Bring the replica back to where it was, from wherever it is now."""
        wait([future for future in self._futures if not future.cancel()])
        for future in self._futures:
            if not future.cancelled() and future.exception() is None and (move := future.result()) is not None:
                self._replica.undo(move)


def full_frames(replica: Replica, encoders: Executor) -> Iterator[tuple[int, bytes]]:
    """All chunks of a replica, whole, ascending; never more than a window of them is held."""
    ahead: list[tuple[Chunk, Future[bytes]]] = []
    for chunk in replica.layout.chunks:
        ahead.append((chunk, encoders.submit(replica.full, chunk)))
        if len(ahead) >= WINDOW:
            first, future = ahead.pop(0)
            yield first.index, future.result()
    for chunk, future in ahead:
        yield chunk.index, future.result()


def faster_codec(link_bytes_per_s: float, cores: int) -> Codec:
    """The codec with which a sparse change arrives earlier: transfer and coding overlap, so the slower of them counts.

    Example: at 25 MB/s bytes decide (classes); at 5 GB/s coding does (gaps).
    """

    def seconds(codec: Codec) -> float:
        assert codec.cost is not None, "sparse codecs have a cost"
        return max(codec.cost.size_bytes / link_bytes_per_s, codec.cost.seconds / cores)

    return min(sparse_codecs(), key=lambda codec: (seconds(codec), codec is not GAPS))


@final
class CodecSelection:
    """The codec to encode the next version with: the one that was named, or by the speed of the link.

    Raises :class:`~etude.errors.UserError` for a name that is neither ``auto`` nor that of a sparse codec.
    """

    MEMORY = 0.7
    """Weight of the speed so far beside each new measurement: a single slow upload decides nothing."""
    SMALLEST_SAMPLE = 1 << 20
    """Uploads below a megabyte measure the round trip, not the link."""

    def __init__(self, name: str, cores: int) -> None:
        codecs = {codec.name: codec for codec in sparse_codecs()}
        if name != "auto" and name not in codecs:
            raise UserError(f"there is no codec {name!r} for changes; choose auto, {' or '.join(sorted(codecs))}")
        self._fixed = codecs.get(name)
        self._cores = cores
        self._link_bytes_per_s: float | None = None

    @property
    def current(self) -> Codec:
        """The codec to use now; before anything is known about the link, the one that can do everything."""
        if self._fixed is not None:
            return self._fixed
        return GAPS if self._link_bytes_per_s is None else faster_codec(self._link_bytes_per_s, self._cores)

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Take note of an upload."""
        if size_bytes < self.SMALLEST_SAMPLE or seconds <= 0:
            return
        speed = size_bytes / seconds
        before = self._link_bytes_per_s
        self._link_bytes_per_s = speed if before is None else self.MEMORY * before + (1 - self.MEMORY) * speed


def _stored(log: WeightLog, version: int) -> WeightVersion | None:
    """The record of a version as a reader finds it that comes now, ``None`` if it cannot be read."""
    try:
        return log.records.read_again(WeightVersion, commit_key(version))
    except DamagedError:
        return None
