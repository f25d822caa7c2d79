"""Judge votes: parsing of replies, their tally, and a cache.

    {"reason": "clear, but too long", "score": 4, "aspect": "style", "nonce": "5d0c…"}     one reply

    votes requested ─┬─ unreadable: counted, never a score
                     ├─ "cannot tell": counted, never a score; a majority of them: declined
                     └─ scores ──▶ a majority of all? ──▶ their median; the rubric's rule for a tie

Parsing is strict on purpose. The nonce is random per call and comes after the judged text, in the instructions: a
verdict that was copied from the text does not have it. Replies are not repaired; the caller may repeat the request,
which names the fault and contains no word of the reply.

The median, not the mean: a single vote that was manipulated into the best score moves it no more than any other vote.

The cache is a small SQLite file that one process writes. A key covers judge, prompt, rubric, both texts and the number
of the vote, so that nothing has to be removed by hand when one of them changes. It stores votes, but neither API keys
nor unreadable replies: the next try may succeed. A damaged entry is a miss, and a damaged file is replaced by an empty
one, since a cache may be lost.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from etude.closing import Closing
from etude.rewards.judge.prompts import KEYS, ReplyFault, Rubric, TieRule
from etude.types import Json

LONGEST_REPLY = 20_000
"""Characters; a longer reply is not parsed."""
LONGEST_REASON = 1_000
"""Most characters of a reason that are stored."""
THOUGHTS = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
"""Reasoning that some servers leave in the reply."""
CODE_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
"""The only wrapping that is removed, because it cannot change the content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """One vote of a judge: a parsed reply."""

    score: int | None
    """``None``: the judge says that it cannot tell."""
    reason: str
    descending: bool = False
    """True: the judge saw the scale from best to worst."""


def read_vote(reply: str, rubric: Rubric, nonce: str, *, descending: bool = False) -> Vote | ReplyFault:
    """Parse the vote in a reply about ``rubric``, or the reason why there is none. Raises nothing."""
    fields = read_object(reply)
    if isinstance(fields, ReplyFault):
        return fields
    if fields.keys() != KEYS or not isinstance(fields["reason"], str):
        return ReplyFault.WRONG_KEYS
    if fields["nonce"] != nonce:
        return ReplyFault.WRONG_NONCE
    if fields["aspect"] != rubric.aspect:
        return ReplyFault.WRONG_ASPECT
    score = fields["score"]
    if score is not None and (type(score) is not int or not rubric.lowest <= score <= rubric.highest):
        return ReplyFault.OFF_SCALE
    return Vote(score=score, reason=fields["reason"][:LONGEST_REASON], descending=descending)


def read_object(reply: str) -> dict[str, Json] | ReplyFault:
    """Parse a reply that must be a single JSON object; otherwise return its fault. Duplicate keys are a fault."""
    if len(reply) > LONGEST_REPLY:
        return ReplyFault.TOO_LONG
    text = THOUGHTS.sub("", reply, count=1).strip() if THOUGHTS.match(reply) else reply.strip()
    wrapped = CODE_BLOCK.fullmatch(text)
    try:
        fields = json.loads(wrapped.group(1) if wrapped else text, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return ReplyFault.NOT_JSON
    return fields if isinstance(fields, dict) else ReplyFault.NOT_JSON


def _once(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of the votes on one aspect."""

    aspect: str
    score: float | None
    """On the rubric's scale; ``None``: there is no verdict."""
    value: float | None
    """The score from 0 to 1."""
    votes: tuple[Vote, ...]
    """The valid votes."""
    invalid: tuple[ReplyFault, ...] = ()
    """Faults of the invalid ones."""

    @property
    def is_declined(self) -> bool:
        """True if more than half of all votes say that they cannot tell, which is attributed to the judged text."""
        blank = sum(vote.score is None for vote in self.votes)
        return 2 * blank > len(self.votes) + len(self.invalid)


def tally(rubric: Rubric, replies: Sequence[Vote | ReplyFault]) -> Judgement:
    """Count the votes of one judgement.

    There is a verdict if more than half of them gave a score, unless the rubric's rule abstains on a tie.
    """
    votes = tuple(reply for reply in replies if isinstance(reply, Vote))
    scores = sorted(vote.score for vote in votes if vote.score is not None)
    score = middle(scores, rubric.tie) if 2 * len(scores) > len(replies) else None
    return Judgement(
        aspect=rubric.aspect,
        score=score,
        value=None if score is None else rubric.value(score),
        votes=votes,
        invalid=tuple(reply for reply in replies if isinstance(reply, ReplyFault)),
    )


def middle(scores: Sequence[int], tie: TieRule) -> float | None:
    """The median of at least one score, in ascending order."""
    lower, upper = scores[(len(scores) - 1) // 2], scores[len(scores) // 2]
    if lower == upper:
        return lower
    match tie:
        case TieRule.LOWER:
            return lower
        case TieRule.UPPER:
            return upper
        case TieRule.MEDIAN:
            return (lower + upper) / 2
        case TieRule.ABSTAIN:
            return None


SCHEMA = """
CREATE TABLE IF NOT EXISTS votes (key BLOB PRIMARY KEY, vote BLOB NOT NULL, sum BLOB NOT NULL, used INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS by_use ON votes (used);
"""
SPARED = 16
"""When the cache is full, one of this number of entries is evicted at once, least recently used first."""


def cache_key(*parts: str) -> bytes:
    """SHA-256 of a sequence of texts."""
    return hashlib.sha256(orjson.dumps([part.encode(errors="surrogatepass").hex() for part in parts])).digest()


class VoteCache(Closing):
    """Cache of at most ``entries`` votes, in a file or, for ``None``, in memory."""

    def __init__(self, file: Path | None, entries: int) -> None:
        self._entries = entries
        self.hits = self.misses = 0
        """Number of lookups that found a vote, and that did not."""
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
        """Store a vote; when the cache is full, the least recently used ones are evicted."""
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
                return _vote(row[0])
            self._delete("key = ?", key)
        return None

    def _delete(self, which: str, value: bytes | int) -> None:
        self._count -= self._database.execute(f"DELETE FROM votes WHERE {which}", (value,)).rowcount

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class StoredVotes(Closing):
    """Read-only votes in the caches of a run's judges, for people; an unreadable file counts as empty."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._databases: list[sqlite3.Connection] = []
        for file in files:
            with suppress(sqlite3.Error):
                self._databases.append(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0))

    def get(self, key: bytes) -> Vote | None:
        """The vote under a key, from the first cache that has it."""
        for database in self._databases:
            with suppress(sqlite3.Error, ValueError, TypeError):
                row = database.execute("SELECT vote, sum FROM votes WHERE key = ?", (key,)).fetchone()
                if row is not None and row[1] == _sum(key, row[0]):
                    return _vote(row[0])
        return None

    def close(self) -> None:
        """Close the files."""
        for database in self._databases:
            database.close()


def _vote(raw: bytes) -> Vote:
    score, reason, descending = orjson.loads(raw)
    return Vote(score=score, reason=reason, descending=descending)


def _open(file: Path | None) -> sqlite3.Connection:
    """Open the database; replace a file that is not a database by an empty one."""
    if file is None:
        return _connect(":memory:")
    try:
        return _connect(file)
    except sqlite3.DatabaseError:
        for part in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
            part.unlink(missing_ok=True)
        return _connect(file)


def _connect(name: str | Path) -> sqlite3.Connection:
    database = sqlite3.connect(name, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")  # votes that a crash of the machine loses are requested again
        database.executescript(SCHEMA)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


def _sum(key: bytes, raw: bytes) -> bytes:
    return hashlib.sha256(key + raw).digest()
