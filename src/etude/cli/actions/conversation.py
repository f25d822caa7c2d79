"""The conversation of `etude chat` with the newest weights of a run, or with any gateway.

    line ─▶ POST /v1/chat/completions (stream) ─▶ text as it is sampled ─▶ the weight version that sampled it

Owns the conversation and what is printed. In a live run a chat is production traffic and has priority over rollouts. A
finished run gets an engine and a gateway of its own while the chat lasts.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO, final

import aiohttp
import orjson

from etude.dashboard.formatting import visible
from etude.errors import EngineUnavailable, UserError
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.process_name import GATEWAY
from etude.run.serve_version import serving_version, wait_until_ready
from etude.types import Json

HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
"""For a gateway's answer to a health check or a request for a key."""
CALL_TIMEOUT = aiohttp.ClientTimeout(total=600.0, sock_connect=5.0)
"""For one whole reply."""
KEY_S = 24 * 3600
"""Lifetime of a chat's key, in case it is never revoked."""
BARE = "a bare conversation with the model, without the agent, its tools or its sandbox; those: etude play RUN"
HELP = "/new forgets the conversation · /system TEXT sets the instructions and forgets the rest · /quit"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

Fields = dict[str, Json]


@final
@dataclass(slots=True, kw_only=True)
class Talk:
    """The messages of a conversation."""

    messages: list[Fields] = field(default_factory=list)

    def reset(self, system: str | None = None) -> None:
        """Forget everything but the instructions, or replace these, too."""
        instructions = [message for message in self.messages if message["role"] == "system"]
        self.messages = instructions if system is None else [{"role": "system", "content": system}]

    def add(self, role: str, content: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content})


@final
class ReplyPrinter:
    """Prints one reply, with the weight version wherever it changes."""

    def __init__(self, out: TextIO, *, colour: bool) -> None:
        self._out = out
        self._before, self._after = (DIM, PLAIN) if colour else ("", "")
        self._shown = visible if colour else str
        self._texts: list[str] = []
        self._versions: list[str] = []

    @property
    def text(self) -> str:
        """The reply so far."""
        return "".join(self._texts)

    def take(self, chunk: Fields) -> None:
        """Print what one event adds; the last events add no text and repeat all versions."""
        version = chunk.get("system_fingerprint")
        for text in _texts(chunk):
            if isinstance(version, str) and version not in self._versions[-1:]:
                if self._texts:
                    self._note(f" ‹{version}› ")
                self._versions.append(version)
            self._texts.append(text)
            self._out.write(self._shown(text))
        self._out.flush()

    def end(self) -> None:
        """Print the versions that sampled it."""
        self._note(f"  [{' → '.join(self._versions) or 'empty'}]")
        self._out.write("\n")
        self._out.flush()

    def _note(self, text: str) -> None:
        self._out.write(f"{self._before}{text}{self._after}")


@final
class Chat:
    """A conversation through the gateway at ``url``, printed to ``out``, with errors to ``err``."""

    def __init__(self, url: str, key: str, *, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._talk = Talk()

    def handle(self, line: str) -> bool:
        """Handle a line that was typed; false for ``/quit``."""
        command, _, argument = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/new":
                self._talk.reset()
            case "/system":
                self._talk.reset(argument.strip())
            case _ if command.startswith("/"):
                self._out.write(HELP + "\n")
            case _:
                self.ask(line)
        return True

    def ask(self, text: str) -> bool:
        """Print the reply to a message; a failed one leaves the conversation unchanged. Returns false if it failed."""
        self._talk.add("user", text)
        printer = ReplyPrinter(self._out, colour=self._out.isatty())
        try:
            asyncio.run(_stream(self._base, self._key, self._talk.messages, printer))
        except (UserError, EngineUnavailable) as error:
            self._talk.messages.pop()
            self._err.write(f"etude: {visible(str(error))}\n")
            return False
        except KeyboardInterrupt:  # what was printed so far stays in the conversation
            self._out.write("\n")
        else:
            printer.end()
        self._talk.add("assistant", printer.text)
        return True


def chat_with_run(folder: RunFolder) -> None:
    """Talk with a run through its own gateway if that answers, else through one that is started for the chat."""
    if folder.endpoints.file.exists() and asyncio.run(_answers(folder.endpoints.url(GATEWAY))):
        _chat_as_admin(folder)
        return
    sys.stderr.write("the run is not running: starting an engine with its newest weights …\n")
    with serving_version(folder) as served:
        wait_until_ready(served)
        _chat_as_admin(served.folder)


def chat_with(url: str, key: str) -> None:
    """Talk until the person quits; without a terminal, answer the text on stdin. Raises ``UserError``."""
    chat = Chat(url, key)
    if not sys.stdin.isatty():
        if not chat.ask(sys.stdin.read().strip()):
            raise UserError("there was no reply: see above")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - being imported is what gives input() its line editing
    sys.stdout.write(f"{BARE}\n{HELP}\n")
    for line in _lines():
        if not chat.handle(line):
            return


def _lines() -> Iterator[str]:
    """The typed lines, until the end of input."""
    while True:
        try:
            line = input("› ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        if line:
            yield line


async def _stream(base: str, key: str, messages: Sequence[Fields], printer: ReplyPrinter) -> None:
    body = orjson.dumps({"model": "policy", "messages": messages, "stream": True})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=CALL_TIMEOUT) as http,
            http.post(f"{base}/v1/chat/completions", data=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise UserError(f"{base} answered {response.status}: {_message(await response.read())}")
            async for chunk in _chunks(response.content):
                if "error" in chunk:
                    raise EngineUnavailable(_message(orjson.dumps(chunk)))
                printer.take(chunk)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"no answer from {base}: {type(error).__name__}: {error}") from error


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[Fields]:
    """The events of a stream, decoded."""
    async for raw in content:
        data = raw.removeprefix(b"data:").strip()
        if raw.startswith(b"data:") and data != b"[DONE]":
            yield orjson.loads(data)


def _texts(chunk: Fields) -> Iterator[str]:
    choices = chunk.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        for name in ("reasoning_content", "content"):
            text = delta.get(name) if isinstance(delta, dict) else None
            if isinstance(text, str) and text:
                yield text


def _chat_as_admin(folder: RunFolder) -> None:
    """Talk with a new production key, which is revoked at the end."""
    url, admin = folder.endpoints.url(GATEWAY), folder.key(KeyRole.ADMIN)
    key = asyncio.run(_request("POST", f"{url}/keys", admin, {"scope": "production", "expires_s": KEY_S}))
    try:
        chat_with(url, str(key["api_key"]))
    finally:
        with contextlib.suppress(EngineUnavailable):
            asyncio.run(_request("DELETE", f"{url}/keys/{key['key_id']}", admin))


async def _request(method: str, url: str, key: str, fields: Fields | None = None) -> Fields:
    body = None if fields is None else orjson.dumps(fields)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=HEALTH_TIMEOUT) as http,
            http.request(method, url, data=body, headers=headers) as response,
        ):
            answer = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"no answer from {url}: {type(error).__name__}: {error}") from error
    if response.status != 200:
        raise EngineUnavailable(f"{method} {url} → {response.status}: {_message(answer)}")
    reply: Fields = orjson.loads(answer)
    return reply


async def _answers(url: str) -> bool:
    """True if a gateway with an engine behind it answers at ``url``."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with aiohttp.ClientSession(timeout=HEALTH_TIMEOUT) as http, http.get(f"{url}/healthz") as response:
            return response.status == 200
    return False


def _message(answer: bytes) -> str:
    try:
        return str(orjson.loads(answer)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return answer[:200].decode(errors="replace")
