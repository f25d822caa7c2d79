"""The connection to one sandbox server: sends requests and validates the answers.

Owns connections, deadlines of requests and retries of repeatable ones. The messages are in
:mod:`etude.sandboxes.remote.wire`.

States: closed ──a request──▶ open ──close──▶ closed, ──cut──▶ cut ──resume──▶ closed. While it is cut, all requests
fail at once with the reason, including those in progress.
"""

import asyncio
import io
import resource
from typing import TypeVar

import aiohttp

from etude.errors import SandboxError
from etude.sandboxes.remote import wire

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 120.0
"""Timeout for a file, an archive or statistics."""
RETRY_S = 0.5
"""Pause between two attempts of a repeatable request."""
MOST_CONNECTIONS = 16_384
"""Maximum number of connections to one server: each needs one of some 28,000 local ports."""

M = TypeVar("M", bound=wire.WireMessage)


def usual_connections(servers: int) -> int:
    """Default number of connections to each server: half of this process's open-file limit, shared equally."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, files // 2 // servers))


class ServerConnection:
    """The other end."""

    def __init__(self, url: str, key: str, connections: int) -> None:
        """``url`` includes the version; at most ``connections`` requests run concurrently, further ones wait."""
        self._url = url
        self._key = key
        self._connections = connections
        self._http: aiohttp.ClientSession | None = None
        self._fault = ""

    async def ask(
        self,
        kind: type[M],
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        attempts: int = 1,
    ) -> M:
        """Send a request and parse the JSON answer. Raises the server's error,
        or :class:`~etude.errors.SandboxError`.
        """
        answer = await self.fetch(
            method, path, body, limit_bytes=wire.JSON_LIMIT_BYTES, timeout_s=timeout_s, attempts=attempts
        )
        try:
            return wire.read_message(kind, answer)
        except ValueError as error:
            raise SandboxError(f"the server of {self._url} answered {error}") from error

    async def fetch(
        self, method: str, path: str, body: bytes, *, limit_bytes: int, timeout_s: float, attempts: int = 1
    ) -> bytes:
        """Send a request; return the bytes of the answer, at most ``limit_bytes``. Raises like :meth:`ask`."""
        for attempt in range(1, attempts + 1):
            self._check_whole()
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._request(method, path, body, limit_bytes)
            except (aiohttp.ClientError, OSError) as error:
                self._check_whole()
                if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
                    raise SandboxError(f"the server of {self._url} gave no answer within {timeout_s:g} s") from None
                if attempt == attempts:
                    words = str(error) or f"no connection within {CONNECT_TIMEOUT_S:g} s"
                    raise SandboxError(f"the server of {self._url} cannot be reached: {words}") from error
                await asyncio.sleep(RETRY_S * attempt)
        raise AssertionError("no attempt was made")

    async def cut(self, reason: str) -> None:
        """Disconnect, and fail all requests, including those in progress, until :meth:`resume` is called."""
        self._fault = reason
        await self.close()

    def resume(self) -> None:
        """Allow requests again."""
        self._fault = ""

    async def close(self) -> None:
        """Disconnect."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def _check_whole(self) -> None:
        if self._fault:
            raise SandboxError(self._fault)

    async def _request(self, method: str, path: str, body: bytes, limit_bytes: int) -> bytes:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            headers = {"Authorization": f"Bearer {self._key}"}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._http = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        is_tar = path.endswith("/load")
        headers = {"Content-Type": "application/x-tar" if is_tar else "application/json"}
        async with self._http.request(
            method, f"{self._url}/{path}", data=io.BytesIO(body), headers=headers, allow_redirects=False
        ) as response:
            answer = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                answer += chunk
                if len(answer) > limit_bytes:
                    response.close()
                    raise SandboxError(f"the server of {self._url} sent more than {limit_bytes} bytes: not read")
        if response.status == 200:
            return bytes(answer)
        try:
            reply = wire.read_message(wire.ErrorReply, bytes(answer))
        except ValueError:
            raise SandboxError(f"the server of {self._url} answered {response.status} {response.reason}") from None
        raise reply.error()
