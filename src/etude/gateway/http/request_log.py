"""What is known of each request once it is over, and the log of it: one line of JSON per request.

    {"time":1785312000.123,"route":"POST /v1/chat/completions","status":200,"traffic":"rollout","key":"k3f9", …}

Owns which facts of a request are kept and how they reach a file without the event loop waiting for a disk: lines gather
in memory and a thread writes them once a second. What was said never gets here, and neither does a key or a path that
holds one: a route is the pattern that matched. The buffer is bounded; what does not fit is counted and the count is
written as soon as there is room again.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import final

import orjson

FLUSH_S = 1.0
"""How often lines are written."""
MAX_LINES = 100_000
"""Lines held while the disk does not take them: about 30 MB, and ten seconds of the fastest traffic."""


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request, filled in while it is served. Times are of the gateway's clock, in seconds."""

    began: float
    request_id: str = ""
    """Ours, as the answer's headers have it."""
    route: str = ""
    """Method and pattern, e.g. ``POST /s/{session}/v1/messages``."""
    dialect: str = ""
    """The wire format of a model call, by its path; empty for any other request."""
    status: int = 0
    """HTTP status; with a stream, what it would have been had its end been known at its start."""
    code: str = ""
    """The error's code, if it is one."""
    traffic: str = ""
    """The class of who samples; empty for any other request."""
    key_id: str = ""
    session_id: str = ""
    prompt_tokens: int = 0
    """Of a call that engines were asked to answer, or that was answered before."""
    completion_tokens: int = 0
    """Sampled so far; in the end those of the recorded answer."""
    reused_tokens: int = 0
    """Prompt tokens that continue an earlier turn of the session."""
    versions: tuple[int, ...] = ()
    """Weight versions that sampled the answer, ascending."""
    hurried: bool = False
    """Whether its caller set a deadline of its own."""
    taken: float | None = None
    """When the engine that works on it, or did, was given the call; of several replies the last one's."""
    first_token: float | None = None
    """When the first sampled token was known here."""
    ended: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def seconds(self) -> float:
        """From the first byte read to the last written."""
        return self.ended - self.began

    @property
    def waited_s(self) -> float:
        """How long no engine worked on the call, those that failed under it not counted; of one that is over."""
        return (self.ended if self.taken is None else self.taken) - self.began

    @property
    def first_token_s(self) -> float | None:
        """From the first byte read to the first token."""
        return None if self.first_token is None else self.first_token - self.began


@final
class AccessLog:
    """Appends visits to ``file``; :meth:`run` must be running for them to get there, :meth:`flush` writes the rest.

    ``wall_s`` says the time of day as Unix time.
    """

    def __init__(self, file: Path, wall_s: Callable[[], float]) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._wall_s = wall_s
        self._handover = Lock()
        """Held for a moment whenever the two below change: calls end in one thread, lines are written in another."""
        self._lines: list[bytes] = []
        self._lost = 0

    def add(self, visit: Visit) -> None:
        """Note a visit that is over."""
        line = _line(visit, self._wall_s())
        with self._handover:
            if len(self._lines) < MAX_LINES:
                self._lines.append(line)
            else:
                self._lost += 1

    async def run(self) -> None:
        """Write what was noted, for ever; waits for the second to pass and for the disk; on shutdown cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._lines:
                await asyncio.to_thread(self.flush)

    def flush(self) -> None:
        """Write what was noted so far. A disk that is full loses lines, not calls; they are counted."""
        with self._handover:
            lines, self._lines = self._lines, []
            lost, self._lost = self._lost, 0
        told = orjson.dumps({"time": self._wall_s(), "lost_lines": lost}) + b"\n" if lost else b""
        try:
            _write_all(self._descriptor, b"".join(lines) + told)
        except OSError:
            with self._handover:
                self._lost += len(lines) + lost

    def close(self) -> None:
        """Write the rest and let go of the file."""
        self.flush()
        with suppress(OSError):
            os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _line(visit: Visit, wall_s: float) -> bytes:
    first_token_s = visit.first_token_s
    facts = {
        "time": round(wall_s, 3),
        "request": visit.request_id,
        "route": visit.route,
        "status": visit.status,
        "code": visit.code,
        "traffic": visit.traffic,
        "key": visit.key_id,
        "session": visit.session_id,
        "prompt_tokens": visit.prompt_tokens,
        "completion_tokens": visit.completion_tokens,
        "reused_tokens": visit.reused_tokens,
        "versions": visit.versions,
        "first_token_s": None if first_token_s is None else round(first_token_s, 6),
        "waited_s": round(visit.waited_s, 6) if visit.dialect else None,
        "seconds": round(visit.seconds, 6),
        "bytes_in": visit.bytes_in,
        "bytes_out": visit.bytes_out,
    }
    return orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
