"""The two processes that the bench kills: a gateway with a fake engine that records live sessions, and the one that
joins them.

    python -m bench.live.ingest_process gateway  FOLDER PORT WINDOW_S
    python -m bench.live.ingest_process feedback FOLDER WINDOW_S         joined sessions into FOLDER/taken.db

The feedback process stops for a moment between what the sink took and noting it, so that kills fall in between.
"""

import asyncio
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from etude.clock import SystemClock, unix_s
from etude.config.feedback import FeedbackConfig
from etude.config.inference import GatewayConfig
from etude.engines.fake import FakeEngine
from etude.feedback.follow_up import WordRule
from etude.feedback.joiner import Joiner
from etude.feedback.store import FeedbackStore
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.run.folder import RunFolder, feedback_place
from etude.run.gateway import GatewaySpec, open_gateway
from etude.run.live_sessions import open_live_sessions
from etude.run.process_name import GATEWAY
from etude.run.serving import listening
from etude.tokens.chat import ChatTemplate
from etude.types import JoinedSession

PRODUCT_KEY, BROWSER_KEY = "product", "browser"
"""Secrets of the keys that the gateway has."""
VOCAB_SIZE, MAX_LENGTH = 300, 512
IDLE_S = 0.05
SINK = "taken.db"
UNNOTED_S = 0.05
"""Time between taking and noting."""


async def serve_gateway(folder: RunFolder, port: int, window_s: float) -> None:
    """Serve until killed."""
    chat = ChatTemplate.train(["return total\n"] * 4, vocab_size=VOCAB_SIZE)
    engine = FakeEngine(SystemClock(), vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH, token_s=0.001)
    keys = (
        Key(key_id="product", digest=digest_of(PRODUCT_KEY), scope=Scope.PRODUCTION),
        Key(key_id="browser", digest=digest_of(BROWSER_KEY), scope=Scope.FEEDBACK, opener="product"),
    )
    async with open_live_sessions(folder, FeedbackConfig(window_s=window_s), GATEWAY) as live:
        spec = GatewaySpec(
            chat=chat,
            max_length=MAX_LENGTH,
            recorder=Recorder(None),
            engines=(EngineEntry(name="one", url="http://fake"),),
            keys=keys,
            live=live.recorder,
            more_routes=live.routes,
        )
        async with (
            open_gateway(spec, GatewayConfig(), SystemClock(), lambda _url: engine) as parts,
            listening(http_server(parts.gateway.handle), port),
        ):
            await parts.wait()


class TakenSessions:
    """A sink that keeps each session once, as the ledger does, and counts how often one was handed on again."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, turns INTEGER, times INTEGER)")
        self._db.execute("CREATE TABLE IF NOT EXISTS signals (event_id TEXT, session_id TEXT)")

    def take(self, sessions: Sequence[JoinedSession]) -> Sequence[str]:
        """Keep the sessions that are new, whole or not at all."""
        self._db.execute("BEGIN IMMEDIATE")
        for joined in sessions:
            session = joined.session
            sql = "INSERT INTO sessions VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET times = times + 1 RETURNING times"
            ((times,),) = self._db.execute(sql, (session.session_id, session.turns)).fetchall()
            if times == 1:
                rows = [(signal.event_id, session.session_id) for signal in joined.signals]
                self._db.executemany("INSERT INTO signals VALUES (?, ?)", rows)
        self._db.execute("COMMIT")
        time.sleep(UNNOTED_S)
        return ["admitted"] * len(sessions)


def join_sessions(folder: RunFolder, window_s: float) -> None:
    """Join until killed."""
    with FeedbackStore.open(feedback_place(folder), window_s=window_s) as store:
        joiner = Joiner(store, TakenSessions(folder.path / SINK), WordRule(), batch=20)
        while True:
            if not joiner.step(unix_s()):
                time.sleep(IDLE_S)


def main(role: str, path: str, *numbers: str) -> None:
    """Run one of the two."""
    folder = RunFolder(Path(path))
    if role == "gateway":
        asyncio.run(serve_gateway(folder, int(numbers[0]), float(numbers[1])))
    join_sessions(folder, float(numbers[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
