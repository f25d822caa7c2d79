"""`bench sync`: from the end of a training step to the last engine that serves its weights, far away.

    trainer ══▶ bucket ══▶ region-a: relay ──▶ folder ──▶ 2 receivers
                     ╚═══▶ region-b: relay ──▶ folder ──▶ 2 receivers      ══ 80 ms there and back, 0.1 % lost, 200 Mb/s

Trainer, bucket and regions are network namespaces with long-distance links between them (``wan.py``); each link is
measured before and its figures are among the results. The contestants run one after another over the same links with
the same changes: ``etude``, ``xor`` (XOR and zstd per tensor) and ``full`` (everything, every step), all with one relay
per region. The first step of each compiles and opens connections; it is left out. Rows marked ``computed`` extrapolate
what was measured to a large model and are no measurement.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Self, final

from bench.report import Goal, envelope, so_far
from bench.sync.link_probe import LinkMeasurement, measure_link
from bench.sync.links import Traffic
from bench.sync.sites import COMPUTE_S, SitePlan
from bench.sync.trainee import TrainedWeights
from bench.sync.wan import Wan, WanShape
from bench.tables import results_page
from etude.errors import InfrastructureError, UserError
from etude.objects import ObjectStore
from etude.types import Json
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from etude.weights.pull import ReceiveOptions, Receiver
from etude.weights.state import state_bytes

CONTESTANTS = ("etude", "xor", "full")
REGIONS = ("region-a", "region-b")
RECEIVERS = 2
"""Per region."""
WARM_UP_STEPS = 1
STEP_DEADLINE_S = 120.0
PROBE_S = 4.0
"""Per link."""

BLOCKED = Goal(
    "trainer_blocked_s",
    "at most",
    0.01,
    "Seconds for which the trainer waits for its weights to be published; the longest step.",
)
PAUSE = Goal(
    "pause_vs_reload",
    "at least",
    20.0,
    "Time to load a checkpoint, over the pause of an engine for new weights; median of steps.",
)
COPIES = Goal(
    "wan_copies_per_region",
    "at most",
    1.05,
    "Bytes sent to a region, over those of the published change; the worst region, median of steps.",
)
BYTES = Goal("bytes_vs_xor", "at most", 0.5, "Bytes published per step, over those of XOR and zstd.")

LARGE_MODEL_BYTES = 1e12
LARGE_TRAINER_CORES, LARGE_RECEIVER_CORES = 16 * 32, 8 * 32
"""The cluster that the computed rows assume: 16 trainer hosts and 8 engine hosts of 32 cores."""


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Options of the measurement."""

    layers: int = 6
    """Layers of 11 MB each; the rest of the model has 8 MB."""
    steps: int = 5
    """Counted steps of each contestant but ``full``, which does one."""
    connections: int = 16
    """To the bucket, of each process."""
    seed: int = 0
    shape: WanShape = field(default_factory=WanShape)

    def __post_init__(self) -> None:
        if min(self.layers, self.steps, self.connections) < 1:
            raise UserError(f"bench sync: layers, steps and connections of {self} must be positive")

    @cached_property
    def state_bytes(self) -> int:
        """Size of the weights."""
        return state_bytes(TrainedWeights(self.layers, self.seed).state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Times and bytes of one step."""

    served_s: float
    """From the end of the step until the last engine served it."""
    visible_s: float
    """Until its record was in the bucket."""
    blocked_s: float
    pause_s: float
    """The longest of any engine."""
    reload_s: float
    """A full load of the same weights from host memory, in the engine that paused longest."""
    reload_disk_s: float
    """The same from a checkpoint on the local disk; as ``reload_s`` for contestants that have none."""
    in_place_s: float
    """The pause of an engine without spare weights, which writes what changed; as ``pause_s`` for the others."""
    size_bytes: int
    """Bytes of the published objects, without records."""
    changed: int
    region_bytes: tuple[int, ...]
    """Over the link to each region, headers, polling and retransmissions included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of the codecs on this machine without a network: bytes of model per second of one core."""

    publish_bytes_per_s: float
    receive_bytes_per_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line: it has none."""


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_sync()


def bench_sync(options: SyncOptions | None = None) -> dict[str, Json]:
    """Measure all contestants and return the bench object.

    Needs root or user namespaces: raises :class:`~etude.errors.UserError` otherwise, and
    :class:`~etude.errors.InfrastructureError` when a process dies or a step does not arrive in time.
    """
    chosen = options or SyncOptions()
    started_s = time.monotonic()
    rows: list[Json] = []
    steps: dict[str, Sequence[Step]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="etude-sync-") as scratch,
        Wan(("trainer", "bucket", *REGIONS), chosen.shape) as wan,
    ):
        with so_far() as measured:
            for source, target in (("trainer", "bucket"), ("bucket", REGIONS[0])):
                link = measure_link(wan, source, target, connections=chosen.connections, seconds=PROBE_S)
                rows.append(_link_row(source, target, link))
            for contestant in CONTESTANTS:
                steps[contestant] = _contest(wan, contestant, chosen, Path(scratch))
                rows.append(_row(contestant, steps[contestant], chosen))
        router = wan.router()
    if not measured.interrupted:
        rates = _rates(chosen)
        rows += [_computed(steps["etude"], rates, chosen, bits_per_s) for bits_per_s in (1e10, 1e11)]
    figures: dict[str, Json] = {
        "links": {
            **{name: value for name, value in asdict(chosen.shape).items() if name != "seed"},
            "delay_each_way_s": chosen.shape.rtt_s / 2,
            "router_cpu_s": round(router.cpu_s, 2),
            "mean_late_s": round(router.mean_late_s, 5),
            "latest_s": round(router.latest_s, 4),
        },
        "results": rows,
        "goals": _goals(steps),
    }
    return envelope("sync", time.monotonic() - started_s, figures, interrupted=measured.interrupted)


def table(result: dict[str, Json]) -> str:
    """The bench object as a table for people."""
    columns = ("contestant", "case", "served_s", "blocked_s", "pause_s", "in_place_s", "reload_s", "bytes",
               "region_bytes")  # fmt: skip
    return results_page(result, columns, notes=[f"links: {result['links']}"])


# ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@final
class Cast:
    """The processes of one contestant, and their output; leaving it stops them."""

    def __init__(self, wan: Wan) -> None:
        self._wan = wan
        self._messages: Queue[tuple[str, Mapping[str, Json] | None]] = Queue()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.communicate()

    def start(self, name: str, site: str, role: str, plan: SitePlan) -> None:
        """Start a program in a site."""
        command = [sys.executable, "-m", "bench.sync.sites", role, plan.to_json()]
        process = self._wan.popen(site, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def order(self, name: str, line: str) -> None:
        """Send a line to a program."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def await_events(self, event: str, names: Sequence[str], deadline_s: float) -> dict[str, Mapping[str, Json]]:
        """The next ``event`` of each named program; other events are dropped.

        Raises :class:`~etude.errors.InfrastructureError` when any program ends, or time is up.
        """
        arrived: dict[str, Mapping[str, Json]] = {}
        ends_s = time.monotonic() + deadline_s
        while missing := [name for name in names if name not in arrived]:
            try:
                name, facts = self._messages.get(timeout=max(0.0, ends_s - time.monotonic()))
            except Empty as error:
                raise InfrastructureError(f"bench sync: no {event!r} of {missing} in {deadline_s} s") from error
            if facts is None:
                raise InfrastructureError(f"bench sync: {name} ended; what it said last is on standard error")
            if facts["event"] == event and name in missing:
                arrived[name] = facts
        return arrived

    def _listen(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._messages.put((name, json.loads(line)))
        self._messages.put((name, None))


def _contest(wan: Wan, contestant: str, options: SyncOptions, scratch: Path) -> list[Step]:
    """All counted steps of a contestant."""
    kind = "etude" if contestant == "etude" else "plain"
    plan = SitePlan(
        contestant=contestant,
        bucket=wan.address("bucket"),
        layers=options.layers,
        seed=options.seed,
        connections=options.connections,
    )
    with Cast(wan) as cast:
        cast.start("bucket", "bucket", "bucket", plan)
        cast.await_events("ready", ["bucket"], STEP_DEADLINE_S)
        cast.start("trainer", "trainer", f"trainer-{kind}", plan)
        receivers: list[str] = []
        for region in REGIONS:
            folder = scratch / contestant / region
            folder.mkdir(parents=True)
            there = replace(plan, region=str(folder))
            cast.start(f"relay {region}", region, f"relay-{kind}", there)
            for index in range(RECEIVERS):
                receivers.append(f"receiver {index} {region}")
                cast.start(receivers[-1], region, f"receiver-{kind}", there)
        cast.await_events("ready", ["trainer", *receivers], STEP_DEADLINE_S)
        counted = 1 if contestant == "full" else options.steps
        steps = [_step(wan, cast, receivers, version) for version in range(1, WARM_UP_STEPS + counted + 1)]
    return steps[WARM_UP_STEPS:]


def _step(wan: Wan, cast: Cast, receivers: Sequence[str], version: int) -> Step:
    before = _to_regions(wan)
    cast.order("trainer", str(version))
    published = cast.await_events("published", ["trainer"], STEP_DEADLINE_S)["trainer"]
    served = list(cast.await_events("served", receivers, STEP_DEADLINE_S).values())
    after = _to_regions(wan)
    ended_s = _number(published, "ended_s")
    slowest = max(served, key=lambda facts: _number(facts, "pause_s"))
    return Step(
        served_s=max(_number(facts, "served_s") for facts in served) - ended_s,
        visible_s=_number(published, "visible_s") - ended_s,
        blocked_s=_number(published, "blocked_s"),
        pause_s=_number(slowest, "pause_s"),
        reload_s=_number(slowest, "reload_s"),
        reload_disk_s=float(str(slowest.get("reload_disk_s", slowest["reload_s"]))),
        in_place_s=max(float(str(facts.get("in_place_s", facts["pause_s"]))) for facts in served),
        size_bytes=round(_number(published, "size_bytes")),
        changed=round(_number(published, "changed")),
        region_bytes=tuple(now.since(then).size_bytes for now, then in zip(after, before, strict=True)),
    )


def _to_regions(wan: Wan) -> list[Traffic]:
    return [wan.traffic("bucket", region) for region in REGIONS]


def _rates(options: SyncOptions) -> Rates:
    """Publish and receive one change in memory on one thread each."""
    weights = TrainedWeights(options.layers, options.seed)
    log = WeightLog(ObjectStore("memory://"))
    publish_s: list[float] = []
    receive_s: list[float] = []
    publisher_options = PublishOptions(encoders=1, uploads=1, anchor_every=0, compact=False)
    with (
        Publisher(log, publisher_options) as publisher,
        Receiver(log, ReceiveOptions(connections=1, appliers=1)) as receiver,
    ):
        for version in range(4):
            started_s = time.process_time()
            publisher.publish(weights.state, version=version, step=version).result()
            published_s = time.process_time()
            receiver.advance()
            receive_s.append(time.process_time() - published_s)
            publish_s.append(published_s - started_s)
            weights.step()
    size = options.state_bytes
    return Rates(
        publish_bytes_per_s=size / statistics.median(publish_s[2:]),
        receive_bytes_per_s=size / statistics.median(receive_s[2:]),
    )


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _row(contestant: str, steps: Sequence[Step], options: SyncOptions) -> dict[str, Json]:
    changed = statistics.median(step.changed for step in steps)
    size_bytes = statistics.median(step.size_bytes for step in steps)
    regions = [statistics.median(step.region_bytes[index] for step in steps) for index in range(len(REGIONS))]
    return {
        "contestant": contestant,
        "case": f"{options.state_bytes / 1e6:.0f} MB, {2 * changed / options.state_bytes:.2%} changed",
        "computed": False,
        "steps": len(steps),
        "served_s": round(statistics.median(step.served_s for step in steps), 3),
        "served_s_worst": round(max(step.served_s for step in steps), 3),
        "visible_s": round(statistics.median(step.visible_s for step in steps), 3),
        "blocked_s": round(statistics.median(step.blocked_s for step in steps), 6),
        "pause_s": round(statistics.median(step.pause_s for step in steps), 7),
        "in_place_s": round(statistics.median(step.in_place_s for step in steps), 5),
        "reload_s": round(statistics.median(step.reload_s for step in steps), 5),
        "reload_disk_s": round(statistics.median(step.reload_disk_s for step in steps), 5),
        "bytes": round(size_bytes),
        "bytes_per_changed": round(size_bytes / changed, 3),
        "region_bytes": [round(region) for region in regions],
        "wan_copies_per_region": round(max(regions) / size_bytes, 4),
    }


def _link_row(source: str, target: str, measured: LinkMeasurement) -> dict[str, Json]:
    return {
        "contestant": "link",
        "case": f"{source} → {target}",
        "computed": False,
        "rtt_s": round(measured.rtt_s, 5),
        "megabits_per_s": round(measured.bits_per_s / 1e6, 1),
        "connections": measured.connections,
        "congestion": measured.congestion,
    }


def _computed(steps: Sequence[Step], rates: Rates, options: SyncOptions, bits_per_s: float) -> dict[str, Json]:
    """Extrapolation to a model of 1 TB with the same share of changes: coding, both links, then applying, without
    overlap.

    Round trips and requests are those of the measured step, without the time of its bytes on the links.
    """
    size_bytes = statistics.median(step.size_bytes for step in steps)
    large_bytes = size_bytes / options.state_bytes * LARGE_MODEL_BYTES
    encode_s = LARGE_MODEL_BYTES / rates.publish_bytes_per_s / LARGE_TRAINER_CORES
    apply_s = LARGE_MODEL_BYTES / rates.receive_bytes_per_s / LARGE_RECEIVER_CORES
    link_s = large_bytes * 8 / bits_per_s
    fixed_s = statistics.median(step.served_s for step in steps) - 2 * size_bytes * 8 / options.shape.bits_per_s
    return {
        "contestant": "etude",
        "case": f"computed: 1 TB at {bits_per_s / 1e9:.0f} Gb/s",
        "computed": True,
        "served_s": round(encode_s + 2 * link_s + apply_s + fixed_s, 2),
        "bytes": round(large_bytes),
        "encode_s": round(encode_s, 2),
        "link_s": round(link_s, 2),
        "apply_s": round(apply_s, 2),
        "fixed_s": round(fixed_s, 2),
        "publish_gb_per_core_s": round(rates.publish_bytes_per_s / 1e9, 2),
        "receive_gb_per_core_s": round(rates.receive_bytes_per_s / 1e9, 2),
    }


def _goals(steps: Mapping[str, Sequence[Step]]) -> dict[str, Json]:
    if not {"etude", "xor"} <= steps.keys():
        return {goal.name: goal.judge(None) for goal in (BLOCKED, PAUSE, COPIES, BYTES)}
    ours, xor = steps["etude"], steps["xor"]
    blocked_s = max(step.blocked_s for step in ours)
    pauses = statistics.median(step.reload_s / step.pause_s for step in ours)
    copies = statistics.median(max(step.region_bytes) / step.size_bytes for step in ours)
    sizes = statistics.median(step.size_bytes for step in ours) / statistics.median(step.size_bytes for step in xor)
    return {
        BLOCKED.name: BLOCKED.judge(blocked_s)
        | {"value": round(blocked_s, 6), "of_step": round(blocked_s / COMPUTE_S, 6)},
        PAUSE.name: PAUSE.judge(pauses)
        | {
            "in_place": round(statistics.median(step.reload_s / step.in_place_s for step in ours), 2),
            "in_place_vs_disk": round(statistics.median(step.reload_disk_s / step.in_place_s for step in ours), 2),
        },
        COPIES.name: COPIES.judge(copies),
        BYTES.name: BYTES.judge(sizes) | {"met": sizes < BYTES.goal},
    }


def _number(facts: Mapping[str, Json], name: str) -> float:
    return float(str(facts[name]))
