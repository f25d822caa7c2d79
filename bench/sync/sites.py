"""The programs that `bench sync` runs in its sites: bucket, trainer, relay, receiver.

    python -m bench.sync.sites ROLE PLAN        PLAN is JSON; one JSON object per line comes back

Times in what they print are of the machine's monotonic clock, which all sites share. The trainer obeys lines on its
standard input, each the number of a version to make and publish; the others follow until they are killed. What
contestants have in common is here; measuring and judging is ``sync.py``'s.
"""

import asyncio
import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from bench.engine.swaps import open_engine
from bench.sync.bucket import serve_bucket
from bench.sync.trainee import ReloadedModel, TrainedWeights, model_spec
from etude.objects import Objects, ObjectStore, StoreOptions
from etude.run.numerics import largest_state
from etude.run.weight_follower import WeightFollower
from etude.types import Json
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import pull
from etude.weights.relay import Relay
from etude.weights.state import State, StoredTensor, snapshot

BUCKET_PORT = 5000
BUCKET = "sync"
POLL_S = 0.05
"""Between looks at a store that had nothing new; over the long distance the round trips come on top."""
COMPUTE_S = 1.0
"""Pause for the next forward and backward pass, during which published tensors do not change."""
RELOADS = 5
BUNDLE_BYTES = 8 << 20
"""Maximum bytes of tensors sent together: a request for each would cost its round trips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """Configuration of a program."""

    contestant: str
    """``etude``, ``full`` or ``xor``."""
    bucket: str
    """Address of the bucket's site."""
    region: str = ""
    """Folder of the region's store, for relays and receivers."""
    layers: int
    seed: int
    connections: int
    """To the bucket, per process."""

    def to_json(self) -> str:
        """The plan as a program's argument."""
        return json.dumps(asdict(self))

    def origin(self) -> Objects:
        """The bucket."""
        options = StoreOptions(
            endpoint=f"http://{self.bucket}:{BUCKET_PORT}",
            allow_http=True,
            region="us-east-1",
            access_key_id="bench",
            secret_access_key="bench",
        )
        return ObjectStore(f"s3://{BUCKET}/{self.contestant}", options)


# ── the bucket ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run_bucket(plan: SitePlan) -> None:
    """Serve the bucket, in memory."""
    asyncio.run(serve_bucket(plan.bucket, BUCKET_PORT, BUCKET, lambda: _say(event="ready")))


# ── étude ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_etude(plan: SitePlan) -> None:
    """Publish through :class:`~etude.weights.publish.Publisher`, and compute on."""
    weights = TrainedWeights(plan.layers, plan.seed)
    options = PublishOptions(uploads=plan.connections, anchor_every=0)
    with Publisher(WeightLog(plan.origin()), options) as publisher:
        publisher.publish(weights.state, version=0, step=0).result()
        _say(event="ready")
        for version in _orders():
            changed = weights.step()
            ended_s = time.monotonic()
            publication = publisher.publish(weights.state, version=version, step=version)
            visible: list[float] = []
            publication.record.add_done_callback(partial(_note_time, visible))
            blocked_s = time.monotonic() - ended_s
            time.sleep(COMPUTE_S)
            blocked_s += publication.wait_read()
            size_bytes = publication.result().size_bytes
            _say(
                event="published",
                version=version,
                ended_s=ended_s,
                blocked_s=blocked_s,
                visible_s=visible[0],
                size_bytes=size_bytes,
                changed=changed,
            )


def _note_time(times: list[float], _done: object) -> None:
    times.append(time.monotonic())


def relay_etude(plan: SitePlan) -> None:
    """Follow the bucket's log into the region's."""
    with Relay(WeightLog(plan.origin()), WeightLog(ObjectStore(plan.region)), connections=plan.connections) as relay:
        served: int | None = None
        while True:
            newest = relay.advance()
            if newest == served:
                time.sleep(POLL_S)
            else:
                served = newest
                _say(event="relayed", version=newest, at_s=time.monotonic())


def receive_etude(plan: SitePlan) -> None:
    """Follow the region's log with a native engine, and compare its pauses with a reload of the same weights."""
    log = WeightLog(ObjectStore(plan.region))
    while log.latest() is None:
        time.sleep(POLL_S)
    torch.set_num_threads(1)
    spec = model_spec(plan.layers)
    followers = [WeightFollower(log, largest_state(spec)) for _ in range(2)]
    spare, single = (
        open_engine(follower.start(), spec, spare=is_spare)
        for follower, is_spare in zip(followers, (True, False), strict=True)
    )
    other = ReloadedModel(plan.layers)
    _say(event="ready")
    while True:
        version = spare.version
        if log.latest(after=version) == version:
            time.sleep(POLL_S)
            continue
        _, pause_s = asyncio.run(followers[0].update(spare))
        served_s = time.monotonic()
        spare.settle()
        _, in_place_s = asyncio.run(followers[1].update(single))
        pulled = pull(log, spare.version)
        with tempfile.TemporaryDirectory() as folder:
            other.save_checkpoint(Path(folder), pulled.state)
            from_disk_s = statistics.median(other.load_checkpoint(Path(folder)) for _ in range(RELOADS))
        _say(
            event="served",
            version=spare.version,
            served_s=served_s,
            pause_s=pause_s,
            in_place_s=in_place_s,
            reload_s=statistics.median(other.load(pulled.state) for _ in range(RELOADS)),
            reload_disk_s=from_disk_s,
        )


# ── the others: packets of a version, then a marker that they are there ─────────────────────────────────────────────


def train_plain(plan: SitePlan) -> None:
    """Encode and upload, and return when that is done."""
    weights = TrainedWeights(plan.layers, plan.seed)
    store = plan.origin()
    _say(event="ready")
    for version in _orders():
        old = weights.state
        changed = weights.step()
        ended_s = time.monotonic()
        packets = _packets(plan.contestant, old, weights.state)
        with ThreadPoolExecutor(plan.connections) as uploads:
            list(uploads.map(store.put_if_absent, _names(version, len(packets)), packets))
        store.put_if_absent(_marker(version), json.dumps(len(packets)).encode())
        visible_s = time.monotonic()
        _say(
            event="published",
            version=version,
            ended_s=ended_s,
            blocked_s=visible_s - ended_s,
            visible_s=visible_s,
            size_bytes=sum(map(len, packets)),
            changed=changed,
        )


def relay_plain(plan: SitePlan) -> None:
    """Copy every version to the region once."""
    origin, region = plan.origin(), ObjectStore(plan.region)

    def copy(name: str) -> None:
        data = origin.get(name)
        assert data is not None, "markers come last"
        region.put_if_absent(name, data)

    with ThreadPoolExecutor(plan.connections) as threads:
        for version, packets in _marked(origin):
            list(threads.map(copy, _names(version, packets)))
            region.put_if_absent(_marker(version), json.dumps(packets).encode())
            _say(event="relayed", version=version, at_s=time.monotonic())


def receive_plain(plan: SitePlan) -> None:
    """Decode into a copy, then reload the engine."""
    weights = snapshot(TrainedWeights(plan.layers, plan.seed).state)
    torch.set_num_threads(1)
    engine = ReloadedModel(plan.layers)
    region = ObjectStore(plan.region)
    _say(event="ready")
    for version, count in _marked(region):
        packets = [region.get(name) or b"" for name in _names(version, count)]
        _decode(plan.contestant, packets, weights)
        pause_s = engine.load(weights)
        _say(event="served", version=version, served_s=time.monotonic(), pause_s=pause_s, reload_s=pause_s)


def _packets(contestant: str, old: State, new: State) -> Sequence[bytes]:
    """The objects of one version: encoded tensors, bundled to a size that suits stores."""
    if contestant == "xor":
        from bench.weights.contestants import XorContestant

        tensors = [bytes(packet) for packet in XorContestant().encode(old, new)]
    else:
        tensors = [new[name].data.tobytes() for name in sorted(new)]
    bundles: list[list[bytes]] = [[]]
    for tensor in tensors:
        if sum(map(len, bundles[-1])) >= BUNDLE_BYTES:
            bundles.append([])
        bundles[-1].append(tensor)
    return [b"".join(struct.pack("<Q", len(tensor)) + tensor for tensor in bundle) for bundle in bundles]


def _unbundled(bundles: Sequence[bytes]) -> Iterator[bytes]:
    for bundle in bundles:
        start = 0
        while start < len(bundle):
            (size,) = struct.unpack_from("<Q", bundle, start)
            yield bundle[start + 8 : start + 8 + size]
            start += 8 + size


def _decode(contestant: str, bundles: Sequence[bytes], weights: Mapping[str, StoredTensor]) -> None:
    packets = list(_unbundled(bundles))
    if contestant == "xor":
        from bench.weights.contestants import XorContestant

        XorContestant().decode(packets, weights)
        return
    for name, packet in zip(sorted(weights), packets, strict=True):
        np.copyto(weights[name].data, np.frombuffer(packet, np.uint8))


def _marked(store: Objects) -> Iterator[tuple[int, int]]:
    """Versions from 1 on with the number of their packets, each as soon as it is there."""
    version = 1
    while True:
        marker = store.get(_marker(version))
        if marker is None:
            time.sleep(POLL_S)
        else:
            yield version, int(json.loads(marker))
            version += 1


def _marker(version: int) -> str:
    return f"markers/{version:08}.json"


def _names(version: int, packets: int) -> list[str]:
    return [f"packets/{version:08}/{index:05}" for index in range(packets)]


# ── talking to the bench ────────────────────────────────────────────────────────────────────────────────────────────


def _orders() -> Iterator[int]:
    """Versions to publish."""
    for line in sys.stdin:
        yield int(line)


def _say(**facts: Json) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


ROLES: Mapping[str, Callable[[SitePlan], None]] = MappingProxyType(
    {
        "bucket": run_bucket,
        "trainer-etude": train_etude,
        "relay-etude": relay_etude,
        "receiver-etude": receive_etude,
        "trainer-plain": train_plain,
        "relay-plain": relay_plain,
        "receiver-plain": receive_plain,
    }
)
"""Role → program."""

if __name__ == "__main__":
    ROLES[sys.argv[1]](SitePlan(**json.loads(sys.argv[2])))
