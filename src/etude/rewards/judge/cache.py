"""Verdicts that were already given: by digest of all that decides one, in a small SQLite file.

A key says judge, prompt, rubric, both texts and the number of the vote, so that nothing has to be thrown away by hand
when one of them changes. What is kept is the vote, never the key of an endpoint nor an unreadable reply: that one may
well be better the next time. A damaged entry is a miss, and a damaged file is begun anew; a cache may be lost.

Owns the file. One process writes it.
"""

import hashlib
import sqlite3
from contextlib import suppress
from pathlib import Path

import orjson

from etude.closing import Closing
from etude.rewards.judge.verdicts import Vote

SCHEMA = """
CREATE TABLE IF NOT EXISTS votes (key BLOB PRIMARY KEY, vote BLOB NOT NULL, sum BLOB NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON votes (used);
"""
SPARED = 16
"""When the cache is full, one in so many entries makes way at once, those that were not used for longest."""


def cache_key(*parts: str) -> bytes:
    """SHA-256 of some texts, in this order and with these borders between them."""
    return hashlib.sha256(orjson.dumps([part.encode(errors="surrogatepass").hex() for part in parts])).digest()


class VoteCache(Closing):
    """At most ``entries`` votes, in a file or, for ``None``, in memory."""

    def __init__(self, file: Path | None, entries: int) -> None:
        self._entries = entries
        self.hits = self.misses = 0
        """Questions that were and were not answered from here."""
        self._database = _open(file)
        (newest,) = self._database.execute("SELECT COALESCE(MAX(used), 0) FROM votes").fetchone()
        self._clock = int(newest)
        (count,) = self._database.execute("SELECT COUNT(*) FROM votes").fetchone()
        self._count = int(count)

    def get(self, key: bytes) -> Vote | None:
        """The vote under a key, unless there is none or it is damaged."""
        vote = self._read(key) if self._entries else None
        self.hits += vote is not None
        self.misses += vote is None
        return vote

    def put(self, key: bytes, vote: Vote) -> None:
        """Keep a vote; what was not used for longest makes way."""
        if not self._entries:
            return
        raw = orjson.dumps([vote.score, vote.reason.encode(errors="replace").decode(), vote.descending])
        with suppress(sqlite3.Error):
            self._delete("key = ?", key)
            row = (key, raw, _sum(key, raw), self._tick())
            self._database.execute("INSERT INTO votes VALUES (?, ?, ?, ?)", row)
            self._count += 1
            if self._count > self._entries:
                room = max(1, self._entries // SPARED)
                self._delete("key IN (SELECT key FROM votes ORDER BY used LIMIT ?)", room)

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _read(self, key: bytes) -> Vote | None:
        with suppress(sqlite3.Error, ValueError, TypeError):
            row = self._database.execute("SELECT vote, sum FROM votes WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            if isinstance(row[0], bytes) and row[1] == _sum(key, row[0]):
                self._database.execute("UPDATE votes SET used = ? WHERE key = ?", (self._tick(), key))
                score, reason, descending = orjson.loads(row[0])
                return Vote(score=score, reason=reason, descending=descending)
            self._delete("key = ?", key)
        return None

    def _delete(self, which: str, value: bytes | int) -> None:
        self._count -= self._database.execute(f"DELETE FROM votes WHERE {which}", (value,)).rowcount

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _open(file: Path | None) -> sqlite3.Connection:
    """The database, begun anew if what is there is none."""
    if file is None:
        return _connect(":memory:")
    try:
        return _connect(str(file))
    except sqlite3.DatabaseError:
        for part in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
            part.unlink(missing_ok=True)
        return _connect(str(file))


def _connect(name: str) -> sqlite3.Connection:
    database = sqlite3.connect(name, isolation_level=None, timeout=5.0)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")  # what a crash of the machine loses is asked again
        database.executescript(SCHEMA)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


def _sum(key: bytes, raw: bytes) -> bytes:
    return hashlib.sha256(key + raw).digest()
