"""A provider's connection to its launcher: the process, requests and answers.

    request, descriptors ──▶ launcher ──▶ future

Owns the launcher process (:mod:`etude.sandboxes.ns.launcher`) and the futures that wait for it. States: new ──start──▶
open ──close, or the launcher dies──▶ closed. Once the launcher is gone, every future and every request fails.
"""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import etude
from etude.errors import SandboxError
from etude.sandboxes.ns import wire

START_TIMEOUT_S = 30.0
"""Timeout for a launcher to report what the machine grants; it takes some 100 ms on an idle machine."""
EXIT_TIMEOUT_S = 30.0
"""Timeout for a launcher to end all processes and itself after the connection was closed."""
SEND_TIMEOUT_S = 30.0
"""Timeout for a busy launcher to accept a message."""


class LauncherGone(SandboxError):
    """Error: the launcher ended before it answered; requests that can start afresh may go to another launcher."""


class LauncherLink:
    """Sends requests to a launcher."""

    def __init__(self, process: Process, control: socket.socket, grants: Mapping[str, Any]) -> None:
        self._process = process
        self._control = control
        self._receiver = wire.MessageReceiver(control)
        self.grants = grants
        """The fields of :class:`~etude.sandboxes.ns.wire.Grants`."""
        self._requests = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ends: dict[int, asyncio.Future[str]] = {}
        self._sending = asyncio.Lock()
        self._closed = False
        asyncio.get_running_loop().add_reader(control, self._receive)

    @classmethod
    async def start(cls, options: wire.Options) -> Self:
        """Start a launcher. Raises :class:`~etude.errors.SandboxError` if it fails, or the machine allows
        no sandboxes.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = ("-P", "-s", "-S", "-B", "-X", "utf8", "-m", "etude.sandboxes.ns.launcher", str(theirs.fileno()))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                stdin=DEVNULL,
                stdout=DEVNULL,
                cwd="/",
                env={"PYTHONPATH": str(Path(etude.__file__).parents[1])},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        try:
            wire.send(ours, options)
            ours.setblocking(False)
            grants = await receive(ours, START_TIMEOUT_S)
            if grants is None:
                raise SandboxError("the launcher of sandboxes died at its start; its messages are on stderr")
            if grants.body["error"]:
                raise SandboxError(f"this machine grants no sandboxes with namespaces: {grants.body['error']}")
        except BaseException:
            ours.close()
            await _wait(process)
            raise
        return cls(process, ours, grants.body)

    @property
    def pid(self) -> int:
        """Process number of the launcher."""
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        """True once the launcher is gone."""
        return self._closed

    def next_number(self) -> int:
        """An unused number for a request or a sandbox."""
        self._requests += 1
        return self._requests

    def watch_box(self, box: int) -> asyncio.Future[str]:
        """Wait for the end of a sandbox; return the reason, empty if it was closed."""
        return self._ends.setdefault(box, asyncio.get_running_loop().create_future())

    async def ask(self, body: Mapping[str, Any], descriptors: Sequence[int] = ()) -> asyncio.Future[dict[str, Any]]:
        """Send a request that is answered under its ``id``; the future fails if the request does."""
        answer = asyncio.get_running_loop().create_future()
        self._answers[body["id"]] = answer
        try:
            await self.send(body, descriptors)
        except BaseException:
            self._answers.pop(body["id"], None)  # a launcher that ended already failed all its requests
            if answer.done():
                answer.exception()  # the error raised here is the same
            raise
        return answer

    async def send(self, body: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises :class:`LauncherGone`."""
        async with self._sending:
            while not self._closed:
                try:
                    return wire.send(self._control, body, descriptors)
                except BlockingIOError:
                    await _writable(self._control)
                except (BrokenPipeError, ConnectionResetError):
                    self._fail()
        raise LauncherGone("the launcher of sandboxes has ended")

    async def close(self) -> None:
        """Close the connection, and wait until the launcher has ended everything; calling it twice is harmless."""
        self._fail()
        await _wait(self._process)

    def _receive(self) -> None:
        try:
            message = self._receiver.receive()
        except BlockingIOError:
            return
        except ConnectionResetError:
            message = None
        if message is None:
            self._fail()
        elif message.body["kind"] in ("closed", "died"):
            self._settle_end(message.body)
        else:
            self._settle_answer(message)

    def _settle_end(self, body: Mapping[str, Any]) -> None:
        end = self._ends.pop(body["box"], None)
        reason = "" if body["kind"] == "closed" else "its first process was killed"
        if end is not None and not end.done():
            end.set_result(body["error"] or reason)

    def _settle_answer(self, message: wire.LauncherMessage) -> None:
        body = message.body
        answer = self._answers.pop(body["id"], None)
        if answer is None or answer.done():  # the caller was cancelled
            for descriptor in message.descriptors:
                os.close(descriptor)
        elif body["kind"] == "failed":
            answer.set_exception(ValueError(body["error"]) if body["refused"] else SandboxError(body["error"]))
            answer.exception()  # the caller may be cancelled just now
        else:
            answer.set_result({**body, "descriptors": message.descriptors})

    def _fail(self) -> None:
        """Fail all requests and sandboxes: the launcher is gone."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(LauncherGone("the launcher of sandboxes has ended"))
                answer.exception()  # the caller may have been cancelled
        for end in self._ends.values():
            if not end.done():
                end.set_result("the launcher of sandboxes has ended")
        self._answers.clear()
        self._ends.clear()


async def receive(connection: socket.socket, timeout_s: float) -> wire.LauncherMessage | None:
    """Receive the next message of a non-blocking socket; ``None`` when the other end is closed.

    Raises :class:`~etude.errors.SandboxError` if there is none in time.
    """
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ready.wait()
        return wire.MessageReceiver(connection).receive()
    except TimeoutError:
        raise SandboxError(f"no word from a sandbox within {timeout_s:g} s") from None
    except ConnectionResetError:
        return None
    finally:
        loop.remove_reader(connection)


async def _writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await ready.wait()
    except TimeoutError:
        raise SandboxError(f"the launcher of sandboxes took no message for {SEND_TIMEOUT_S:g} s") from None
    finally:
        loop.remove_writer(connection)


async def _wait(process: Process) -> None:
    try:
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
