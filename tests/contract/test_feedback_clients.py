"""Both feedback clients report to a real gateway, which joins their signals with the right session."""

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


def test_a_gateway_that_comes_back_gets_each_event_once_and_the_buffer_is_bounded() -> None:
    bodies: list[bytes] = []

    class Away(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(503 if len(bodies) == 1 else 401)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Away)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with etude.FeedbackClient(
        f"http://127.0.0.1:{server.server_port}", "key", max_buffered=3, interval_s=0.2
    ) as client:
        for index in range(5):
            client.report("kept", session="s", event_id=str(index))
        assert client.flush(WAIT_S)
    server.shutdown()
    server.server_close()
    assert bodies[0] == bodies[1], "the same ids again"
    assert client.counts == {"dropped": 2, "refused": 3}
    assert [(one.event_id, one.reason) for one in client.refused] == [(name, "HTTP 401: ") for name in "234"]
    with pytest.raises(ValueError, match="the client is closed"):
        client.report("kept", session="s")
    with pytest.raises(etude.ConfigError, match="expected http://HOST:PORT"):
        etude.FeedbackClient("gateway", "key")


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
