"""`bench live`, ingestion: events joined per second on both databases; lost and doubled ones under ``kill -9``.

Speed: one process, one connection. Events are read from JSON as clients send them, reported in batches, and joined once
their windows are over, into a sink that does nothing; five events a session of one turn.

Loss: a gateway with a fake engine and the feedback process, both real, both killed with SIGKILL every second or so and
started again. Users call the model over HTTP and report on what they got: every event twice, in any order, some before
their session. Then the sink is compared with what users were told. *Lost* is a turn whose answer a user got, or an
event that was acknowledged in time, that no joined session has; *doubled* is one that the sink has twice.

Per second of the clock, and per second of this process's CPU time: with SQLite that is all there is, and holds on a
machine that others use, too; of PostgreSQL the server's own is not in it. It runs without fsync, in a batch of 10,000
events an fsync is nothing.
"""

import asyncio
import contextlib
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
from aiohttp import ClientError, ClientSession, ClientTimeout

from bench.faults.database import Database, programs
from bench.live.ingest_process import BROWSER_KEY, PRODUCT_KEY, SINK, UNNOTED_S
from etude.feedback.joiner import Joiner, StoreOnlySink
from etude.feedback.signals import Event, read_report
from etude.feedback.store import FeedbackStore
from etude.run.folder import RunFolder, feedback_place
from etude.run.keys import write_run_key
from etude.types import Finish, Json, LiveAnswer, LiveSession, Turn

OWNER = "product"
PER_SESSION, EVENTS, BATCH = 5, 100_000, 10_000
"""Events of a session, in all, and in one transaction."""
SESSIONS_AT_A_TIME = 200
WINDOW_S = 20.0
"""Longer than a gateway takes to start on a machine with other work, as events wait so long for their session."""
USERS, LOAD_S, KILL_EVERY_S = 24, 20.0, (0.6, 1.6)
TURN_TOKENS = 200
RETRY_S, GIVE_UP_S = 0.05, 60.0
DRAIN_S, DRAIN_KILLS = 120.0, 8


def measure_ingest() -> dict[str, Json]:
    """All figures of ingestion; those of PostgreSQL are ``None`` where it is not installed."""
    with tempfile.TemporaryDirectory(prefix="etude-ingest-", dir="/tmp") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        figures = {f"sqlite_{key}": value for key, value in measure_speed(str(scratch / "feedback.db")).items()}
        installed = programs()
        if installed is not None:
            with Database(installed, scratch / "postgres") as server:
                speed = measure_speed(f"{server.url}#feedback")
                figures |= {f"postgres_{key}": value for key, value in speed.items()}
        else:
            figures["postgres_joined_per_s"] = None
        return {**figures, **measure_loss(scratch / "run")}


def measure_speed(place: str, events: int = EVENTS, batch: int = BATCH) -> dict[str, Json]:
    """Events per second that are reported, and that are reported and joined."""
    sessions = events // PER_SESSION
    order = random.Random(0)
    names = [f"s{index % sessions}" for index in range(events)]
    order.shuffle(names)
    bodies = [
        orjson.dumps(
            [
                {"event_id": f"e{start + index}", "session": session, "kind": "thumbs", "value": 1, "turn": 0}
                for index, session in enumerate(names[start : start + 1000])
            ]
        )
        for start in range(0, events, 1000)
    ]
    with FeedbackStore.open(place, window_s=1.0) as store:
        stored = _timed(lambda: _keep_sessions(store, sessions))
        reported = _timed(lambda: _report(store, bodies, batch // 1000))
        store.end([f"s{index}" for index in range(sessions)], 10.0)
        joined = _timed(lambda: _join(store, sessions))
        assert store.counts() == {"accepted": events, "session_kept": sessions}, store.counts()
    return {
        "turns_kept_per_s": round(sessions / stored.wall_s),
        "turns_kept_per_cpu_s": round(sessions / stored.cpu_s),
        "reported_per_s": round(events / reported.wall_s),
        "joined_per_s": round(events / (reported.wall_s + joined.wall_s)),
        "joined_per_cpu_s": round(events / (reported.cpu_s + joined.cpu_s)),
    }


def _keep_sessions(store: FeedbackStore, sessions: int) -> None:
    works = [store.keeping(_answer(f"s{index}"), "gateway", 1.0) for index in range(sessions)]
    for start in range(0, sessions, 256):  # as many as the gateway's writer takes at a time
        store.all_or_each(works[start : start + 256])


def _report(store: FeedbackStore, bodies: list[bytes], at_a_time: int) -> None:
    for start in range(0, len(bodies), at_a_time):
        events = [one for body in bodies[start : start + at_a_time] for one in read_report(body, str)]
        store.report(OWNER, [one for one in events if isinstance(one, Event)], lambda: 2.0)


def _join(store: FeedbackStore, sessions: int) -> None:
    joiner = Joiner(store, StoreOnlySink(), None)
    while sessions > 0:
        sessions -= joiner.step(100.0)


class Spent(NamedTuple):
    """Time that some work took."""

    wall_s: float
    cpu_s: float


def _timed(work: Callable[[], None]) -> Spent:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _answer(session_id: str) -> LiveAnswer:
    tokens = np.arange(TURN_TOKENS, dtype=np.int32)
    turn = Turn(
        prompt_ids=tokens,
        completion_ids=tokens,
        logprobs=np.zeros(TURN_TOKENS, np.float32),
        versions=np.zeros(TURN_TOKENS, np.int32),
        finish=Finish.STOP,
    )
    session = LiveSession(
        session_id=session_id,
        owner=OWNER,
        name="",
        user="u",
        template="",
        region="",
        consent=True,
        opened_at=1.0,
        ended_at=None,
        arm="",
        first_version=None,
        last_version=None,
        turns=0,
    )
    return LiveAnswer(
        session=session, first=0, turns=(turn,), completion=f"c{session_id}", follows=None, earlier=None, message="go"
    )


@dataclass
class Acknowledged:
    """Answers and acknowledgements that users got."""

    turns: Counter[str] = field(default_factory=Counter)
    """Live session → answers that its user got."""
    events: set[str] = field(default_factory=set)
    """Events that were acknowledged in time."""
    results: Counter[str] = field(default_factory=Counter)


def measure_loss(path: Path, load_s: float = LOAD_S) -> dict[str, Json]:
    """Lost and doubled turns and events while both processes are killed again and again."""
    path.mkdir()
    write_run_key(path)
    with closing(socket.socket()) as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    commands = {
        "gateway": [str(path), str(port), str(WINDOW_S)],
        "feedback": [str(path), str(WINDOW_S)],
    }
    processes = {role: _start(role, arguments) for role, arguments in commands.items()}
    answered, kills = Acknowledged(), Counter[str]()
    try:
        asyncio.run(_load(f"http://127.0.0.1:{port}", answered, processes, commands, kills, load_s))
        _drained(path, processes, commands, kills)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return _compared(path, answered) | {"kills": kills.total(), "duplicates": answered.results["duplicate"]}


def _start(role: str, arguments: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "bench.live.ingest_process", role, *arguments])


async def _load(
    url: str,
    answered: Acknowledged,
    processes: "dict[str, subprocess.Popen[bytes]]",
    commands: dict[str, list[str]],
    kills: Counter[str],
    load_s: float,
) -> None:
    async with ClientSession(timeout=ClientTimeout(total=10)) as http:
        await _answered(http, "GET", f"{url}/healthz", "", None)
        ends = asyncio.get_running_loop().time() + load_s
        users = [asyncio.create_task(_user(http, url, number, answered, ends)) for number in range(USERS)]
        dice = random.Random(1)
        while not all(user.done() for user in users):
            await asyncio.sleep(dice.uniform(*KILL_EVERY_S))
            if asyncio.get_running_loop().time() >= ends:
                break
            role = dice.choice(sorted(processes))
            processes[role].send_signal(signal.SIGKILL)
            processes[role].wait()
            kills[role] += 1
            processes[role] = _start(role, commands[role])
        await asyncio.gather(*users)


async def _user(http: ClientSession, url: str, number: int, answered: Acknowledged, ends: float) -> None:
    """Open one session after the other, and report on each turn, every event twice and in any order."""
    dice, count = random.Random(number), 0
    while asyncio.get_running_loop().time() < ends:
        name, count = f"u{number}.{count}", count + 1
        messages: list[Json] = []
        events: list[Json] = []
        early: Json = {"event_id": f"{name}.early", "session": name, "kind": "latency", "value": 1}
        await _report_on(http, url, [early], answered)
        for turn in range(dice.randint(1, 4)):
            messages.append({"role": "user", "content": f"turn {turn}"})
            headers = {"X-Etude-Session": name, "X-Etude-Consent": "train", "X-Etude-User": f"user {number}"}
            body: Json = {"messages": messages, "max_tokens": 8}
            answer, session = await _answered(http, "POST", f"{url}/v1/chat/completions", PRODUCT_KEY, body, headers)
            answered.turns[session] += 1
            messages.append(answer["choices"][0]["message"])
            about: dict[str, Json] = {"completion": str(answer["id"])}
            events.append({"event_id": f"{name}.{turn}.kept", "kind": "kept", "value": 0.5, **about})
            events.append({"event_id": f"{name}.{turn}.thumbs", "kind": "thumbs", "value": 1, **about})
        events = [*events, *events]
        dice.shuffle(events)
        for start in range(0, len(events), 3):
            await _report_on(http, url, events[start : start + 3], answered)


async def _report_on(http: ClientSession, url: str, events: list[Json], answered: Acknowledged) -> None:
    answer, _ = await _answered(http, "POST", f"{url}/feedback", BROWSER_KEY, events)
    for one in answer["results"]:
        answered.results[one["result"]] += 1
        if one["result"] in ("accepted", "unknown_session"):  # the latter waits for its session, which comes
            answered.events.add(one["event_id"])


async def _answered(
    http: ClientSession, method: str, url: str, key: str, body: Json, headers: dict[str, str] | None = None
) -> "tuple[dict[str, list[dict[str, str]]], str]":
    """The answer to a request that is tried until there is one, as clients do; and the live session that it names."""
    gives_up = asyncio.get_running_loop().time() + GIVE_UP_S
    while asyncio.get_running_loop().time() < gives_up:
        with contextlib.suppress(ClientError, TimeoutError):
            named = {"Authorization": f"Bearer {key}", **(headers or {})}
            async with http.request(method, url, json=body, headers=named) as response:
                data = await response.read()
                if response.status < 300:
                    return orjson.loads(data), response.headers.get("X-Etude-Session-Id", "")
        await asyncio.sleep(RETRY_S)
    raise TimeoutError(f"{method} {url} had no answer for {GIVE_UP_S:g} s")


def _drained(
    path: Path,
    processes: "dict[str, subprocess.Popen[bytes]]",
    commands: dict[str, list[str]],
    kills: Counter[str],
) -> None:
    """Wait until every session was delivered: they end now, and their windows with them.

    The feedback process is killed meanwhile, also between the sink's commit and its record of it.
    """
    dice = random.Random(2)
    with FeedbackStore.open(feedback_place(RunFolder(path)), window_s=WINDOW_S) as store:
        store.end_all_of("gateway", time.time())
    deadline_s, total = time.monotonic() + DRAIN_S, 0
    while time.monotonic() < deadline_s:
        with _reading(path / "feedback.db") as db:
            ((left,),) = db.execute("SELECT count(*) FROM sessions WHERE taken_at IS NULL").fetchall()
        if not left:
            return
        total = max(left, total)
        if left < total and kills["handing on"] < DRAIN_KILLS:
            time.sleep(dice.uniform(0, 3 * UNNOTED_S))
            processes["feedback"].kill()
            processes["feedback"].wait()
            kills["handing on"] += 1
            total = left
            processes["feedback"] = _start("feedback", commands["feedback"])
        time.sleep(0.02)
    raise TimeoutError(f"{left} sessions were not handed on within {DRAIN_S:g} s")


def _compared(path: Path, answered: Acknowledged) -> dict[str, Json]:
    with _reading(path / SINK) as db:
        turns = dict(db.execute("SELECT id, turns FROM sessions"))
        events = Counter(event_id for (event_id,) in db.execute("SELECT event_id FROM signals"))
        ((again,),) = db.execute("SELECT count(*) FROM sessions WHERE times > 1").fetchall()
    reported = {event_id: number for event_id, number in events.items() if not event_id.startswith("follow-up")}
    lost_turns = sum(max(0, number - turns.get(session, 0)) for session, number in answered.turns.items())
    lost_events = len(answered.events - reported.keys())
    return {
        "lost": lost_turns + lost_events,
        "doubled": sum(number - 1 for number in reported.values()),
        "answers": answered.turns.total(),
        "events": len(answered.events),
        "handed_on_again": again,
        "late": answered.results["late"],
    }


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        yield db
