"""`bench gateway`: what our gateway costs beside LiteLLM's proxy and beside a proxy that does nothing.

    load (load.py) ──▶ a contestant (contestants.py) ──▶ the same upstream (upstream.py)

Everybody is asked the same conversations, whose every reply has N tokens. All contestants run from the start and are
asked in turn, one at a time, so that a machine that slows down slows down all of them; a figure is the median over
rounds, a ratio the median of the rounds' ratios. Where there are two cores a contestant has the last one to itself, and
load and upstream share the others. CPU time per call counts all threads and processes of a contestant, and for
``etude`` the opening and closing of sessions.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import orjson

from bench.engine.worker import available_cores
from bench.gateway.contestants import CONTESTANTS, NO_KEY, Server, Site
from bench.gateway.load import Endpoint, LoadProcess, Measured, Order
from bench.gateway.upstream import MODEL, Script
from bench.options import add_contestants, names
from bench.report import Goal, envelope, so_far
from bench.tables import results_page
from etude.errors import InfrastructureError, UserError
from etude.run.endpoints import probe_port
from etude.tokens.chat import ChatTemplate
from etude.types import Json

DIRECT = "direct"
OURS = ("etude", "etude-uncaptured")
JUDGED = 64
"""Callers at which throughput is judged."""
VOCABULARY = 1024
SYSTEM_TOKENS, USER_TOKENS = 150, 60
TURNS = 8
"""Calls of a conversation; the last prompt has all the replies before."""
MAX_LENGTH = 8192
"""Context of the model that the upstream pretends to be: a whole conversation fits."""
WARM_UP_S = 0.3

THROUGHPUT_VS_LITELLM = Goal(
    "throughput_vs_litellm",
    "at least",
    50.0,
    "Calls per second of 64 callers with replies of 16 tokens, over those of LiteLLM's proxy.",
)
ADDED_LATENCY_VS_LITELLM = Goal(
    "added_latency_vs_litellm",
    "at most",
    0.05,
    "Median time that the gateway adds to a single caller's call, over what LiteLLM's proxy adds.",
)
THROUGHPUT_VS_BARE_PROXY = Goal(
    "throughput_vs_bare_proxy",
    "at least",
    0.5,
    "Calls per second of 64 callers with replies of 300 tokens, over those of a proxy that only forwards.",
)
_COLUMNS = ("contestant", "per_s", "cpu_us", "p50_ms", "p99_ms", "added_p50_ms", "added_p99_ms", "first_text_ms",
            "peak_bytes")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Options of the measurement."""

    contestants: tuple[str, ...] = (DIRECT, *CONTESTANTS)
    lengths: tuple[int, ...] = (16, 300)
    """Tokens of a reply."""
    concurrencies: tuple[int, ...] = (1, 64, 256)
    streams: tuple[int, ...] = (1, 64)
    """Callers at which replies are streamed."""
    rounds: int = 3
    seconds: float = 2.0
    """Duration of a round."""

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.contestants) - {DIRECT, *CONTESTANTS}):
            listed = ", ".join((DIRECT, *CONTESTANTS))
            raise UserError(f"bench gateway: no contestant {unknown[0]!r}; there are {listed}")

    @property
    def cells(self) -> tuple["Cell", ...]:
        """All cells, for every contestant."""
        whole = [Cell(tokens=n, concurrency=c) for n in self.lengths for c in self.concurrencies]
        streamed = [Cell(tokens=n, concurrency=c, stream=True) for n in self.lengths for c in self.streams]
        single = [Cell(tokens=n, concurrency=max(self.concurrencies), turns=1) for n in self.lengths]
        return (*whole, *streamed, *single)


def gateway_options(contestants: tuple[str, ...] | None = None, *, quick: bool = False) -> GatewayOptions:
    """Options of a call; ``None`` stands for all contestants, or all except LiteLLM if ``quick``.

    A quick call checks that everything runs, not its speed. Raises :class:`~etude.errors.UserError` for invalid
    options.
    """
    if not quick:
        return GatewayOptions(contestants=contestants or (DIRECT, *CONTESTANTS))
    return GatewayOptions(
        contestants=contestants or (DIRECT, *(name for name in CONTESTANTS if name != "litellm")),
        lengths=(16,),
        concurrencies=(4,),
        streams=(4,),
        rounds=1,
        seconds=0.2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing that everybody does."""

    tokens: int
    concurrency: int
    stream: bool = False
    turns: int = TURNS
    """Calls of a conversation. With 1 a session has nothing to continue, so that what it costs is what capture costs:
    ours alone do that, with sessions and without.
    """

    @property
    def label(self) -> str:
        """For rows and goals."""
        streamed = ", streamed" if self.stream else ""
        return (
            f"{self.tokens} tokens, {self.concurrency} at a time{streamed}{', single calls' if self.turns == 1 else ''}"
        )

    def concerns(self, contestant: str) -> bool:
        """True if a contestant takes part in the cell."""
        return self.turns > 1 or contestant in OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Results of one contestant in one round."""

    measured: Measured
    cpu_s: float
    """CPU seconds of the contestant, for all calls of the round."""

    @property
    def cpu_us(self) -> float:
        """Microseconds per call."""
        return self.cpu_s / self.measured.calls * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one contestant in one cell."""

    contestant: str
    cell: Cell
    rounds: tuple[Round, ...] = ()
    peak_bytes: int = 0
    """Resident memory at its highest, up to the end of this cell."""
    missing: str | None = None
    """Why it could not run."""

    def median(self, figure: Callable[[Round], float]) -> float:
        """Over rounds."""
        return statistics.median(map(figure, self.rounds))

    def to_json(self, direct: "Row | None") -> dict[str, Json]:
        """The printed row; ``direct`` is the same load without a gateway."""
        row: dict[str, Json] = {"contestant": self.contestant, "case": self.cell.label, "missing": self.missing}
        if not self.rounds:
            return row
        p50_s, p99_s = self.median(lambda one: one.measured.p50_s), self.median(lambda one: one.measured.p99_s)
        row |= {
            "per_s": round(self.median(lambda one: one.measured.per_s), 1),
            "cpu_us": round(self.median(lambda one: one.cpu_us), 1),
            "p50_ms": _ms(p50_s),
            "p99_ms": _ms(p99_s),
            "peak_bytes": self.peak_bytes,
        }
        if direct is not None and direct.rounds:
            row["added_p50_ms"] = _ms(p50_s - direct.median(lambda one: one.measured.p50_s))
            row["added_p99_ms"] = _ms(p99_s - direct.median(lambda one: one.measured.p99_s))
        if self.cell.stream:
            row["first_text_ms"] = _ms(self.median(lambda one: one.measured.first_p50_s or 0.0))
        return row


Rows: TypeAlias = Mapping[tuple[str, Cell], Row]


@dataclass(slots=True)
class _Field:
    """The contestants: their targets and processes, and the reasons for missing ones."""

    load: LoadProcess
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def drop(self, name: str, reason: str) -> None:
        """Exclude a contestant from this cell and later ones."""
        self.missing[name] = reason
        self.endpoints.pop(name, None)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    add_contestants(parser)


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_gateway(gateway_options(names(options.contestants), quick=options.quick))


def bench_gateway(options: GatewayOptions | None = None) -> dict[str, Json]:
    """Measure and return the bench object; contestants that cannot run, or fail, are rows with the reason."""
    chosen = options or GatewayOptions()
    started_s = time.monotonic()
    rows: dict[tuple[str, Cell], Row] = {}
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch, ExitStack() as stack:
        script = write_script(Path(scratch) / "model", max(chosen.lengths))
        taking_part = _start(stack, script, Path(scratch), chosen)
        with so_far() as measured:
            for cell in chosen.cells:
                sys.stderr.write(f"{cell.label}\n")
                for row in _race(taking_part, cell, script, chosen):
                    rows[row.contestant, cell] = row
    return envelope(
        "gateway",
        time.monotonic() - started_s,
        {
            "rounds": chosen.rounds,
            "turns": TURNS,
            "results": [row.to_json(rows.get((DIRECT, cell))) for (_, cell), row in rows.items()],
            "capture_us": capture_us(rows),
            "goals": judged_rows(rows),
        },
        interrupted=measured.interrupted,
    )


def table(result: dict[str, Json]) -> str:
    """Calls, then the goals, the cost of capture and who is missing."""
    captured = f"cost of capture, us of CPU per call: {result['capture_us']}"
    return results_page(result, _COLUMNS, under="case", notes=[captured])


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────


def write_script(folder: Path, tokens: int) -> Script:
    """Create a tokenizer in ``folder`` and return the upstream's completion, of that many tokens."""
    text = _text()
    template = ChatTemplate.train([text], VOCABULARY)
    template.save(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": MAX_LENGTH}), encoding="utf-8")
    ids = template.encode(text)[:tokens]
    return Script(token_ids=tuple(ids), words=tuple(template.decode([token]) for token in ids))


def conversation(script: Script, cell: Cell) -> tuple[str, ...]:
    """The bodies of a conversation's calls, every reply as it was said."""
    words = _text().split()
    messages = [{"role": "system", "content": " ".join(words[:SYSTEM_TOKENS])}]
    bodies: list[str] = []
    for turn in range(cell.turns):
        request = " ".join(words[turn * USER_TOKENS : (turn + 1) * USER_TOKENS])
        messages.append({"role": "user", "content": request})
        call = {"model": MODEL, "messages": messages, "max_tokens": cell.tokens, "stream": cell.stream}
        bodies.append(orjson.dumps(call).decode())
        messages.append({"role": "assistant", "content": script.text(cell.tokens)})
    return tuple(bodies)


def _text() -> str:
    """Plain text: this bench's own source."""
    source = Path(__file__).read_text(encoding="utf-8")
    return "".join(mark for mark in source if mark.isascii())


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _start(stack: ExitStack, script: Script, scratch: Path, options: GatewayOptions) -> _Field:
    """Start upstream, load and every contestant."""
    *others, last = available_cores()
    with probe_port(0) as port:
        pass  # it is free
    plan = {**asdict(script), "lengths": options.lengths, "port": port}
    command = (sys.executable, "-m", "bench.gateway.upstream", json.dumps(plan))
    upstream = stack.enter_context(Server("the upstream", command, scratch / "upstream.log", {}))
    upstream.await_ready(f"http://127.0.0.1:{port}/health")
    load = stack.enter_context(LoadProcess())
    for pid in (upstream.pid, load.pid):
        os.sched_setaffinity(pid, others or (last,))
    taking_part = _Field(load=load)
    for name in options.contestants:
        if name == DIRECT:
            taking_part.endpoints[DIRECT], taking_part.servers[DIRECT] = Endpoint(port=port, key=NO_KEY), upstream
            continue
        folder = scratch / name
        folder.mkdir()
        with probe_port(0) as own:
            site = Site(upstream=f"http://127.0.0.1:{port}", model=scratch / "model", scratch=folder, port=own)
        try:
            launch = CONTESTANTS[name](site)
            server = stack.enter_context(Server(name, launch.command, folder / "log", launch.environment))
            os.sched_setaffinity(server.pid, (last,))
            server.await_ready(f"http://127.0.0.1:{own}{launch.ready}")
        except InfrastructureError as error:
            taking_part.missing[name] = str(error)
        else:
            taking_part.endpoints[name], taking_part.servers[name] = launch.endpoint, server
    return taking_part


def _race(taking_part: _Field, cell: Cell, script: Script, options: GatewayOptions) -> Iterator[Row]:
    """Everyone in turn, round after round. Who fails is out, in this cell and in later ones."""
    bodies = conversation(script, cell)
    names = [name for name in options.contestants if cell.concerns(name)]
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    for turn in range(options.rounds + 1):
        for name in [name for name in names if name in taking_part.endpoints]:
            order = Order(
                endpoint=taking_part.endpoints[name],
                bodies=bodies,
                expected="data: [DONE]" if cell.stream else f'"completion_tokens":{cell.tokens}',
                concurrency=cell.concurrency,
                seconds=options.seconds,
                stream=cell.stream,
            )
            try:
                if turn:
                    rounds[name].append(_round(taking_part, name, order))
                else:
                    taking_part.load.run(replace(order, seconds=WARM_UP_S))
            except InfrastructureError as error:
                taking_part.drop(name, f"{name}: {error}")
    for name in names:
        if reason := taking_part.missing.get(name):
            yield Row(contestant=name, cell=cell, missing=reason)
        else:
            peak_bytes = taking_part.servers[name].peak_bytes
            yield Row(contestant=name, cell=cell, rounds=tuple(rounds[name]), peak_bytes=peak_bytes)


def _round(taking_part: _Field, name: str, order: Order) -> Round:
    server = taking_part.servers[name]
    before_s = server.cpu_s
    measured = taking_part.load.run(order)
    return Round(measured=measured, cpu_s=server.cpu_s - before_s)


# ── judging ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def judged_rows(rows: Rows) -> dict[str, Json]:
    """Throughput at ``JUDGED`` callers, beside LiteLLM's with the shortest replies and beside the bare proxy's with the
    longest; what we add to the latency of a single caller, of what LiteLLM adds. All other ratios are listed.
    """
    whole = sorted(
        {cell for _, cell in rows if not cell.stream and cell.turns > 1},
        key=lambda cell: (cell.tokens, cell.concurrency),
    )
    rate = _ratios(rows, whole, "litellm", lambda ours, theirs: ours.measured.per_s / theirs.measured.per_s)
    bare = _ratios(rows, whole, "bare", lambda ours, theirs: ours.measured.per_s / theirs.measured.per_s)
    added = {cell: ratio for cell in whole if (ratio := _added_ratio(rows, cell)) is not None}
    shortest, longest = whole[0].tokens, whole[-1].tokens
    missing = {name: row.missing for (name, _), row in rows.items() if row.missing}
    return {
        goal.name: goal.judge(ratios.get(judged), missing.get("etude", missing.get(theirs)))
        | {"case": judged.label, "each": _labelled(ratios)}
        for goal, ratios, theirs, judged in (
            (THROUGHPUT_VS_LITELLM, rate, "litellm", Cell(tokens=shortest, concurrency=JUDGED)),
            (ADDED_LATENCY_VS_LITELLM, added, "litellm", Cell(tokens=shortest, concurrency=1)),
            (THROUGHPUT_VS_BARE_PROXY, bare, "bare", Cell(tokens=longest, concurrency=JUDGED)),
        )
    }


def capture_us(rows: Rows) -> dict[str, Json]:
    """CPU microseconds per call that sessions cost, by case: opening, storing, and returning the turns.

    Negative in conversations if not tokenising the history again saves more than that.
    """
    return {
        cell.label: round(ours.median(lambda one: one.cpu_us) - alone.median(lambda one: one.cpu_us), 1)
        for (name, cell), ours in rows.items()
        if name == "etude" and ours.rounds and (alone := rows.get(("etude-uncaptured", cell))) and alone.rounds
    }


def _ratios(
    rows: Rows, cells: Sequence[Cell], theirs: str, ratio: Callable[[Round, Round], float]
) -> dict[Cell, float]:
    """Median over rounds of a ratio between ours and another contestant's."""
    pairs = {cell: (rows.get(("etude", cell)), rows.get((theirs, cell))) for cell in cells}
    return {
        cell: statistics.median(map(ratio, ours.rounds, other.rounds))
        for cell, (ours, other) in pairs.items()
        if ours and other and ours.rounds and other.rounds
    }


def _added_ratio(rows: Rows, cell: Cell) -> float | None:
    """Median latency that our gateway adds, divided by LiteLLM's."""
    measured = [rows.get((name, cell)) for name in (DIRECT, "etude", "litellm")]
    if not all(row and row.rounds for row in measured):
        return None
    direct, ours, theirs = (row.median(lambda one: one.measured.p50_s) for row in measured if row)
    return (ours - direct) / (theirs - direct)


def _labelled(ratios: Mapping[Cell, float]) -> dict[str, Json]:
    return {cell.label: round(ratio, 4) for cell, ratio in ratios.items()}
