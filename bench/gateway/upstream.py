"""What stands behind every gateway of `bench gateway`: an engine that knows its answers by heart.

    POST /generate              ``max_tokens`` tokens in étude's engine protocol
    POST /stream                the same, a token per piece
    POST /v1/chat/completions   the same tokens as OpenAI's JSON, with ids and log probabilities; or as events
    GET  /health                weight version 1

One process serves all contestants, so that nobody's answers cost more to make. It reads no request further than it must
to know which answer to send; a stream sends each token by itself, in a turn of the event loop of its own.
"""

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final

import numpy as np
import orjson
import uvloop

from etude.engines.http import encode_chunk, encode_completion
from etude.protocols import Completion, TokenChunk
from etude.types import Finish, Json

VERSION = 1
LOGPROB = -0.123456
MODEL = "policy"
HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_STREAMED = re.compile(rb'"stream": ?true')
_HEALTH = orjson.dumps({"version": VERSION, "digest": "0" * 64, "running": 0, "waiting": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The completion, whatever the prompt."""

    token_ids: tuple[int, ...]
    words: tuple[str, ...]
    """The text of each token."""

    def text(self, tokens: int) -> str:
        """Text of the first ``tokens`` tokens."""
        return "".join(self.words[:tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Every answer of one length, as it goes over the wire."""

    generate: bytes
    stream: tuple[bytes, ...]
    chat: bytes
    events: tuple[bytes, ...]

    @classmethod
    def of(cls, script: Script, tokens: int) -> "Replies":
        """The first ``tokens`` tokens of a script, ended by the limit."""
        completion = Completion(
            token_ids=np.array(script.token_ids[:tokens], np.int32),
            logprobs=np.full(tokens, LOGPROB, np.float32),
            versions=np.full(tokens, VERSION, np.int32),
            finish=Finish.LENGTH,
        )
        return cls(
            generate=_answer("application/octet-stream", encode_completion(completion)),
            stream=_chunked("application/octet-stream", _chunks(completion)),
            chat=_answer("application/json", orjson.dumps(_chat(script, tokens))),
            events=_chunked("text/event-stream", [*_events(script, tokens), b"data: [DONE]\n\n"]),
        )


def _chunks(completion: Completion) -> list[bytes]:
    last = len(completion.token_ids) - 1
    return [
        encode_chunk(
            TokenChunk(
                token_ids=completion.token_ids[at : at + 1],
                logprobs=completion.logprobs[at : at + 1],
                versions=completion.versions[at : at + 1],
                completion=completion if at == last else None,
            )
        )
        for at in range(last + 1)
    ]


def _chat(script: Script, tokens: int) -> dict[str, Json]:
    usage: Json = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
    choice: Json = {
        "index": 0,
        "message": {"role": "assistant", "content": script.text(tokens)},
        "finish_reason": "length",
        "logprobs": {"content": [_logprob(word) for word in script.words[:tokens]]},
        "token_ids": list(script.token_ids[:tokens]),
    }
    return _object("chat.completion") | {"choices": [choice], "usage": usage}


def _events(script: Script, tokens: int) -> list[bytes]:
    deltas: list[dict[str, Json]] = [{"delta": {"role": "assistant", "content": ""}}]
    for word in script.words[:tokens]:
        deltas += [{"delta": {"content": word}, "logprobs": {"content": [_logprob(word)]}}]
    deltas.append({"delta": {}, "finish_reason": "length"})
    whole: dict[str, Json] = {"index": 0, "finish_reason": None}
    events = (_object("chat.completion.chunk") | {"choices": [whole | delta]} for delta in deltas)
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]


def _logprob(word: str) -> dict[str, Json]:
    return {"token": word, "logprob": LOGPROB, "bytes": list(word.encode()), "top_logprobs": []}


def _object(kind: str) -> dict[str, Json]:
    return {"id": "chatcmpl-0123456789", "object": kind, "created": 1, "model": MODEL}


def _answer(content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _chunked(content_type: str, chunks: Sequence[bytes]) -> tuple[bytes, ...]:
    """The head, then one write per chunk, then the end."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    return (head.encode(), *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n")


@final
class Connection(asyncio.Protocol):
    """Answers one request after the other."""

    def __init__(self, replies: dict[int, Replies], loop: asyncio.AbstractEventLoop) -> None:
        self._replies = replies
        self._loop = loop
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by descent

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._received += data
        while (head_end := self._received.find(HEAD_END)) >= 0:
            head = self._received[:head_end]
            length = _LENGTH.search(head)
            end = head_end + len(HEAD_END) + (int(length[1]) if length else 0)
            if len(self._received) < end:
                return
            body, self._received = self._received[head_end:end], self._received[end:]
            self._reply(head.split(b" ", 2)[1], body)

    def _reply(self, path: bytes, body: bytes) -> None:
        expected = _MAX_TOKENS.search(body)
        replies = self._replies.get(int(expected[1])) if expected else None
        if path == b"/health":
            self._transport.write(_answer("application/json", _HEALTH))
        elif replies is None:
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        elif path == b"/generate":
            self._transport.write(replies.generate)
        elif path == b"/stream":
            self._send(replies.stream, 0)
        elif _STREAMED.search(body):
            self._send(replies.events, 0)
        else:
            self._transport.write(replies.chat)

    def _send(self, chunks: tuple[bytes, ...], at: int) -> None:
        if at < len(chunks) and not self._transport.is_closing():
            self._transport.write(chunks[at])
            self._loop.call_soon(self._send, chunks, at + 1)


async def serve(script: Script, lengths: Sequence[int], port: int) -> None:
    """Answer on the loopback until the process is ended; requests for other lengths are refused."""
    loop = asyncio.get_running_loop()
    replies = {tokens: Replies.of(script, tokens) for tokens in lengths}
    server = await loop.create_server(lambda: Connection(replies, loop), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main(arguments: Sequence[str]) -> None:
    """Serve as one JSON argument specifies."""
    plan = json.loads(arguments[0])
    script = Script(token_ids=tuple(plan["token_ids"]), words=tuple(plan["words"]))
    uvloop.run(serve(script, plan["lengths"], plan["port"]))


if __name__ == "__main__":
    main(sys.argv[1:])
