"""Both feedback clients report to a real gateway, which joins their signals with the right session."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import etude
from etude.config.feedback import FeedbackConfig
from etude.feedback.store import FeedbackStore
from etude.run.folder import RunFolder, feedback_place
from etude.run.keys import write_run_key
from etude.run.live_sessions import open_live_sessions
from etude.run.process_name import GATEWAY
from etude.tokens.chat import ChatTemplate
from gateways import BROWSER_KEY, CHAT, PRODUCT_KEY, QUESTION, Setting, fake_engine, gateway
from waiting import WAIT_S

CLIENT = Path(__file__).resolve().parents[2] / "clients" / "typescript"
WINDOW_S = 3600.0
SESSIONS = ("python", "typescript")
CUT = 203
"""Status of an answer that ends before its announced length."""
FORKED = """
import os
import etude
client = etude.FeedbackClient("http://127.0.0.1:9", "key")
child = os.fork()
if child == 0:
    try:
        client.report("kept", session="s")
    except etude.EtudeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
"""A program in which a client's thread is gone: threads do not survive a fork."""


@dataclass(frozen=True)
class Product:
    folder: RunFolder
    url: str
    completion: str
    """Id of the answer in the session ``typescript``."""

    def signals(self, session: str) -> list[tuple[str, float, int | None]]:
        with FeedbackStore.open(feedback_place(self.folder), window_s=WINDOW_S) as store:
            store.end_all_of(str(GATEWAY), 1e10)
            store.close_windows(1e12, 100)
            (joined,) = [one for one in store.closed(10)[0] if one.session.name == session]
        return [(one.kind.value, one.value, one.turn) for one in joined.signals]


@pytest.fixture
def product(tmp_path: Path) -> Iterator[Product]:
    write_run_key(tmp_path)
    folder, ready, over = RunFolder(tmp_path), threading.Event(), threading.Event()
    ChatTemplate.train(["a b c"], vocab_size=300).save(folder.model)
    made: list[Product] = []

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            opened = open_live_sessions(folder, FeedbackConfig(window_s=WINDOW_S), GATEWAY)
            live = await stack.enter_async_context(opened)
            caller = await stack.enter_async_context(gateway(Setting(fake_engine(), live=live)))
            for name in SESSIONS:
                body = {"messages": QUESTION, "max_tokens": 4}
                about = {"X_Etude_Session": name, "X_Etude_Consent": "train"}
                answer = await caller.send("POST", CHAT, PRODUCT_KEY, body, **about)
            made.append(Product(folder, caller.url, str(answer.at("id"))))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    yield made[0]
    over.set()
    thread.join(WAIT_S)


def test_python(product: Product) -> None:
    with etude.FeedbackClient(product.url, BROWSER_KEY, interval_s=0.01) as feedback:
        feedback.report("edited", 0.25, session="python", turn=0, span=[0, 2], user="ada")
        mine = feedback.report("tests", 0.5, session="python", event_id="mine")
        feedback.report("tests", 0.5, session="python", event_id="mine")
        feedback.report("thumbs", 3, session="python")
        assert feedback.flush(WAIT_S)
    assert mine == "mine"
    assert feedback.counts == {"accepted": 2, "duplicate": 1, "refused": 1}
    assert "value=3 of thumbs: expected 1 or -1" in feedback.refused[0].reason
    assert sorted(product.signals("python")) == [("edited", 0.25, 0), ("tests", 0.5, None)]


class Answers:
    """A gateway that answers each POST with the next of some (status, body), and then with the last one."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Answerer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                status, text = answers[min(len(bodies), len(answers)) - 1]
                self.send_response(status)
                self.send_header("Content-Length", str(len(text) + (status == CUT)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answerer)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def events(self) -> list[list[str]]:
        """The ids of each request's events."""
        return [[one["event_id"] for one in json.loads(body)] for body in self.bodies]


def accepted(*names: str) -> tuple[int, str]:
    return 200, json.dumps({"results": [{"event_id": name, "result": "accepted"} for name in names]})


def test_a_gateway_that_comes_back_gets_each_event_once_and_the_buffer_is_bounded() -> None:
    with (
        Answers((503, ""), (401, "")) as away,
        etude.FeedbackClient(away.url, "key", max_buffered=3, interval_s=0.2) as client,
    ):
        for index in range(5):
            client.report("kept", session="s", event_id=str(index))
        assert client.flush(WAIT_S)
    assert away.bodies[0] == away.bodies[1], "the same ids again"
    assert client.counts == {"dropped": 2, "refused": 3}
    assert [(one.event_id, one.reason) for one in client.refused] == [(name, "HTTP 401: ") for name in "234"]
    with pytest.raises(ValueError, match="the client is closed"):
        client.report("kept", session="s")
    with pytest.raises(etude.ConfigError, match="expected http://HOST:PORT"):
        etude.FeedbackClient("gateway", "key")


@pytest.mark.parametrize(
    ("field", "value"), [("value", float("nan")), ("value", np.float32(0.5)), ("user", uuid.UUID(int=1))]
)
def test_a_value_that_json_cannot_express_is_refused_at_once_and_stops_nothing(field: str, value: object) -> None:
    with Answers(accepted("good")) as gateway_, etude.FeedbackClient(gateway_.url, "key", interval_s=0.01) as client:
        fields: dict[str, Any] = {"session": "s", field: value}
        with pytest.raises(ValueError, match=rf"{field} = .* cannot be sent as JSON"):
            client.report("edited", **fields)
        client.report("edited", 0.5, session="s", event_id="good")
        assert client.flush(WAIT_S)
    assert client.counts == {"accepted": 1}


@pytest.mark.parametrize(
    "answer", [(CUT, '{"results": ['), (200, "[1]"), (200, '{"results": 3}'), (200, '{"results": [{}]}'), (200, "<p>")]
)
def test_a_wrong_or_cut_answer_is_logged_once_and_the_events_are_sent_again(
    answer: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Answers(answer, answer, accepted("a")) as gateway_,
        etude.FeedbackClient(gateway_.url, "key", interval_s=0.01) as client,
    ):
        client.report("kept", session="s", event_id="a")
        assert client.flush(WAIT_S)
    assert client.counts == {"accepted": 1}
    assert gateway_.events == [["a"]] * 3
    assert len([one for one in caplog.messages if "is tried until it answers" in one]) == 1


def test_a_batch_refused_as_a_whole_is_divided_so_that_good_events_arrive(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Answers((413, ""), (400, ""), (400, "bad"), accepted("b"), accepted("c", "d")) as gateway_,
        etude.FeedbackClient(gateway_.url, "key", interval_s=60.0) as client,
    ):
        for name in "abcd":
            client.report("kept", session="s", event_id=name)
    assert gateway_.events == [["a", "b", "c", "d"], ["a", "b"], ["a"], ["b"], ["c", "d"]]
    assert client.counts == {"accepted": 3, "refused": 1}
    assert [(one.event_id, one.reason) for one in client.refused] == [("a", "HTTP 400: bad")]
    assert any("refused event 'a': HTTP 400: bad" in one for one in caplog.messages)


def test_dropped_events_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        Answers(accepted("c")) as gateway_,
        etude.FeedbackClient(gateway_.url, "key", max_buffered=1, interval_s=60.0) as client,
    ):
        for name in "abc":
            client.report("kept", session="s", event_id=name)
    assert client.counts == {"dropped": 2, "accepted": 1}
    assert len([one for one in caplog.messages if "more than 1 events wait" in one]) == 1


def test_a_client_whose_thread_has_ended_raises_rather_than_queue() -> None:
    forked = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True)
    assert forked.stdout == "the client's thread has ended: make another client, after any os.fork()\n", forked.stderr


@pytest.mark.heavy("Node.js, npm", missing=shutil.which("npm") is None)
def test_typescript_its_own_tests_and_its_package(product: Product, tmp_path: Path) -> None:
    package = tmp_path / "package"
    shutil.copytree(CLIENT, package, ignore=shutil.ignore_patterns("node_modules", "dist", "*.tgz"))
    installed = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=package, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"npm cannot fetch the compiler: {installed.stderr[-300:]}")
    packed = subprocess.run(["npm", "pack", "--json"], cwd=package, capture_output=True, text=True, check=True)
    assert all(f'"path": "{name}"' in packed.stdout for name in ("dist/client.js", "dist/client.d.ts", "package.json"))
    names = {"ETUDE_URL": product.url, "ETUDE_FEEDBACK_KEY": BROWSER_KEY, "ETUDE_COMPLETION": product.completion}
    tests = subprocess.run(
        ["npm", "test"], cwd=package, capture_output=True, text=True, env={**os.environ, **names}, timeout=300
    )
    assert tests.returncode == 0, tests.stdout
    assert "# skipped 0" in tests.stdout
    assert sorted(product.signals("typescript")) == [("edited", 0.25, 0), ("thumbs", -1, 0)]
