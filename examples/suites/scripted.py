"""A scripted policy behind OpenAI's chat completions: the floor that every model has to be above.

    python examples/suites/scripted.py 8000
    etude suite run SUITE --url http://127.0.0.1:8000/v1 --model scripted --out RESULTS

It looks around, runs the tests that are there, and submits what it found. A task that it solves is no task.
"""

import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Reply: TypeAlias = Callable[[list[dict[str, Any]]], str]
"""The next message of a policy."""
LINES = ("ls -R | head -50", "python3 -m pytest -q 2>&1 | tail -5", "submit")
"""Its commands, one a turn."""


def reply(messages: list[dict[str, Any]]) -> str:
    """The next command, in the one block that the harness `shell` reads."""
    turn = sum(message["role"] == "assistant" for message in messages)
    return f"```bash\n{LINES[min(turn, len(LINES) - 1)]}\n```"


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions; counts words as tokens."""

    reply: Reply

    def do_POST(self) -> None:
        """One completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.reply(body["messages"])
        read, sampled = sum(len(str(each["content"]).split()) for each in body["messages"]), len(text.split())
        answer = {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # its name in the base class
        """Say nothing: the other side counts."""


def serve(port: int, policy: Reply = reply) -> ThreadingHTTPServer:
    """The server of a policy, at a port of this machine; 0 for any that is free."""
    return ThreadingHTTPServer(("127.0.0.1", port), type("PolicyHandler", (Handler,), {"reply": staticmethod(policy)}))


if __name__ == "__main__":
    serve(int(sys.argv[1])).serve_forever()
