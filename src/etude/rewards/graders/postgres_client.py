"""A PostgreSQL client that needs only the standard library, for the sandbox in which migrations are graded.

``psql`` executes backslash commands such as ``\\!`` in its scripts. This client sends a script unchanged to the server
(the simple query protocol, version 3.0), so that it can only do what its role may do. Each step has its own connection:
settings, temporary tables and prepared statements do not outlive a step. Also a program: it reads a JSON list of steps
from stdin and writes their results to a file.

Owns messages and values. :mod:`etude.rewards.graders.queries` owns the steps and the judgement of their results.
Imports nothing of étude, because its source is copied into the sandbox.
"""

import json
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, TypedDict

PROTOCOL = 196608
"""Version 3.0."""
CHUNK_BYTES = 1 << 16
ROWS_BYTES = 1 << 16
"""Maximum size of the values of one result; further rows are dropped, and the result says so."""
MESSAGE_CHARACTERS = 500
"""Limit of a server's error message."""
BOOL, INTEGERS, FLOATS, DOCUMENTS = 16, (20, 21, 23, 26), (700, 701), (114, 3802)
"""Object ids of types whose values are not text in JSON."""
LOST, LATE = "lost", "late"
"""Values in place of an SQLSTATE: the connection broke, or the time was up."""


class ServerFault(Exception):
    """An error of the PostgreSQL server; ``state`` is its SQLSTATE."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class QueryStep(TypedDict):
    """SQL scripts that run over one connection, until one of them fails."""

    user: str
    database: str
    settings: dict[str, str]
    """Settings of the session; they override those of the database and the role."""
    scripts: list[str]
    timeout_s: float
    """Time limit of all scripts together."""
    vital: bool
    """True if the following steps are pointless after its failure."""


class PostgresConnection:
    """One connection over a socket file; every wait ends at ``deadline``, in seconds of ``time.monotonic``."""

    def __init__(self, folder: str, step: QueryStep, deadline: float) -> None:
        """Log in without a password. Raises ``ServerFault``, ``OSError``, ``TimeoutError``."""
        self._deadline = deadline
        self._socket = socket.socket(socket.AF_UNIX)
        self._pending = b""
        settings = {"user": step["user"], "database": step["database"], "client_encoding": "UTF8", **step["settings"]}
        pairs = b"".join(part.encode() + b"\0" for pair in settings.items() for part in pair)
        try:
            self._in_time()
            self._socket.connect(f"{folder}/.s.PGSQL.5432")
            self._send(b"", struct.pack("!I", PROTOCOL) + pairs + b"\0")
            self._read_answer()
        except BaseException:
            self.close()
            raise

    def ask(self, sql: str) -> dict[str, Any]:
        """Send one script and return the result of its last statement. Raises like the constructor.

        A dict: ``rows``, a list of lists of JSON values; ``cut``, whether rows were dropped; ``open``,
        whether a transaction was left open.
        """
        self._send(b"Q", sql.encode("utf-8", "replace") + b"\0")
        return self._read_answer()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read_answer(self) -> dict[str, Any]:
        """Read everything up to the server's next prompt, then raise the first error, if any."""
        fault: ServerFault | None = None
        types: list[int] = []
        rows: list[list[Any]] = []
        size_bytes = 0
        while True:
            try:
                kind, body = self._message()
            except ConnectionError:
                if fault is not None:
                    raise fault from None  # the server sends its last error before it closes the connection
                raise
            if kind == b"T":
                types, rows, size_bytes = _types(body), [], 0
            elif kind == b"D":
                size_bytes += len(body)
                if size_bytes <= ROWS_BYTES:
                    rows.append(_values(body, types))
            elif kind == b"E":
                fault = fault or _fault(body)
            elif kind == b"G":
                self._send(b"f", b"there is no file to copy from\0")
            elif kind == b"R" and body[:4] != b"\0\0\0\0":
                raise ServerFault("28000", "the server asks for a password")
            elif kind == b"Z":
                if fault is not None:
                    raise fault
                return {"rows": rows, "cut": size_bytes > ROWS_BYTES, "open": body != b"I"}

    def _message(self) -> tuple[bytes, bytes]:
        """Receive a message: its kind and its body, which is cut if it is too long to be useful."""
        head = self._exactly(5)
        size_bytes = struct.unpack("!I", head[1:])[0] - 4
        value = self._exactly(min(size_bytes, ROWS_BYTES + 1))
        remaining = size_bytes - len(value)
        while remaining > 0:
            remaining -= len(self._exactly(min(remaining, CHUNK_BYTES)))
        return head[:1], value

    def _exactly(self, size_bytes: int) -> bytes:
        while len(self._pending) < size_bytes:
            self._in_time()
            received = self._socket.recv(max(CHUNK_BYTES, size_bytes - len(self._pending)))
            if not received:
                raise ConnectionError("the server hung up")
            self._pending += received
        taken, self._pending = self._pending[:size_bytes], self._pending[size_bytes:]
        return taken

    def _send(self, kind: bytes, body: bytes) -> None:
        self._in_time()
        self._socket.sendall(kind + struct.pack("!I", len(body) + 4) + body)

    def _in_time(self) -> None:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the time is up")
        self._socket.settimeout(remaining_s)


def answer(folder: str, step: QueryStep) -> dict[str, Any]:
    """The result of a step's last script, or of the first that failed: a dict.

    In addition to the keys of :meth:`PostgresConnection.ask`: ``state``, an SQLSTATE, ``LOST``, ``LATE`` or empty;
    ``message``; ``done``, the number of scripts that succeeded.
    """
    result: dict[str, Any] = {"rows": [], "cut": False, "open": False, "state": "", "message": "", "done": 0}
    try:
        connection = PostgresConnection(folder, step, time.monotonic() + step["timeout_s"])
        try:
            for sql in step["scripts"]:
                result.update(connection.ask(sql))
                result["done"] += 1
        finally:
            connection.close()
    except ServerFault as fault:
        result.update(state=fault.state, message=str(fault)[:MESSAGE_CHARACTERS])
    except TimeoutError as error:
        result.update(state=LATE, message=str(error))
    except (OSError, ValueError, RecursionError, struct.error) as error:
        result.update(state=LOST, message=f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS])
    return result


def _types(body: bytes) -> list[int]:
    """The object ids of the columns in a row description."""
    types: list[int] = []
    place = 2
    for _ in range(struct.unpack("!H", body[:2])[0]):
        place = body.index(b"\0", place) + 1
        types.append(struct.unpack("!I", body[place + 6 : place + 10])[0])
        place += 18
    return types


def _values(body: bytes, types: list[int]) -> list[Any]:
    """One row as JSON values."""
    values: list[Any] = []
    place = 2
    for kind in types:
        (size_bytes,) = struct.unpack("!i", body[place : place + 4])
        place += 4
        if size_bytes < 0:
            values.append(None)
            continue
        values.append(_value(body[place : place + size_bytes].decode("utf-8", "replace"), kind))
        place += size_bytes
    return values


def _value(text: str, kind: int) -> Any:
    """One value; a type that JSON lacks (dates, money, decimals, NaN) stays text."""
    if kind == BOOL:
        return text == "t"
    if kind in INTEGERS:
        return int(text)
    if kind in FLOATS:
        return text if text.lstrip("-")[:1] in ("N", "I") else float(text)
    return json.loads(text) if kind in DOCUMENTS else text


def _fault(body: bytes) -> ServerFault:
    fields = {part[:1]: part[1:].decode("utf-8", "replace") for part in body.split(b"\0") if part}
    return ServerFault(fields.get(b"C", "XX000"), fields.get(b"M", ""))


def main(arguments: list[str]) -> None:
    """Run the steps on stdin in order, write their results to the named file, stop after a failed ``vital`` step."""
    folder, target = arguments
    answers = []
    for step in json.load(sys.stdin):
        answers.append(answer(folder, step))
        if step["vital"] and answers[-1]["state"]:
            break
    Path(target).write_text(json.dumps(answers, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
