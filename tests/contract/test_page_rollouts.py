"""The tab *Rollouts* in a real browser: filters and links, use by keyboard, and hostile output shown as plain text."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from etude.config.loading import default_recipe
from etude.ledger.ledger import TRAIN, Ledger
from etude.run.folder import RunFolder
from etude.tokens.chat import ChatTemplate
from etude.types import Disposition, Finish, Hint, Rollout, Turn, Verdict
from ledgers import rollout, task

if TYPE_CHECKING:
    from playwright.sync_api import Page
sync_api = pytest.importorskip("playwright.sync_api", reason="the browser's driver is not installed")
expect = sync_api.expect
CHROMIUM = shutil.which("chromium") or ""
pytestmark = pytest.mark.heavy("a browser", missing=not CHROMIUM)
RUN = "hostile"
EVIL = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><svg onload=alert(1)>"
    "</pre></textarea>javascript:alert(1) {{constructor}} ${7*7} \x1b[31;1mred\x1b]8;;http://evil\x07link\x1b[2J"
    " \u202egnp.exe\u2066\u200b\u2028 a\x00b \x9b31m \ufeff"
)
LONG_LETTERS = 10_000_000
FIX = "edit shop.py 2\n    return 2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of sixty groups of two; the newest is as hostile as can be."""
    folder = RunFolder.create(tmp_path_factory.mktemp("page") / RUN, default_recipe())
    chat = ChatTemplate.train([EVIL, FIX, "x" * 4096], 420)
    chat.save(folder.model)
    with Ledger.open(folder.ledger) as ledger:
        for group in range(59):
            ledger.admit_group(replace(task(f"t{group}"), template=f"kind{group % 7}"), TRAIN, 2, 0)
            for slot in range(2):
                ledger.record(rollout(group, slot, reward=float(slot), name=f"{group:02d}{slot}" * 10), TRAIN)
        evil = replace(
            task(EVIL), template=EVIL, prompt=EVIL, files={EVIL: EVIL, "shop.py": "def f():\n    return 1\n"}
        )
        ledger.admit_group(evil, TRAIN, 2, 0)
        ledger.record(_hostile(chat), TRAIN)
    return folder


def _hostile(chat: ChatTemplate) -> Rollout:
    """A rollout with hostile text, an edit, and at its end a line of ten million letters and broken UTF-8."""
    evil = np.array(chat.encode(EVIL), np.int32)
    lone = np.array([chat.encode("é")[0]], np.int32)  # the first of two bytes
    word = chat.encode("x" * 4096)
    line = np.tile(np.array(word, np.int32), LONG_LETTERS // 4096 + 1)
    call = chat.encode('<tool_call>{"name": "<b>evil</b>", "arguments": {"<i>a</i>": "<script>\\u202e"}}</tool_call>')
    first = _turn(evil, np.concatenate([evil, lone]))
    second = _turn(_behind(first, evil), np.array(chat.encode(FIX), np.int32))
    third = _turn(_behind(second, np.array(chat.encode("ok"), np.int32)), np.array(call, np.int32))
    last = _turn(_behind(third, line), line[: len(word) * 4])
    made = rollout(59, 0, reward=0.0, name="evil" * 8)
    verdict = Verdict(disposition=Disposition.ZERO, reason=EVIL, flags=(EVIL,), hacked=True, graded=1.0)
    hints = (Hint(turn=0, text=EVIL, source=EVIL),)
    return replace(
        made, turns=(first, second, third, last), reason=EVIL, verdict=verdict, hints=hints, counts={EVIL: 1}
    )


def _turn(prompt: np.ndarray, reply: np.ndarray) -> Turn:
    return Turn(
        prompt_ids=prompt, completion_ids=reply, logprobs=np.full(len(reply), -0.5, np.float32),
        versions=np.zeros(len(reply), np.int32), finish=Finish.STOP,
    )  # fmt: skip


def _behind(turn: Turn, new: np.ndarray) -> np.ndarray:
    return np.concatenate([turn.prompt_ids, turn.completion_ids, new])


@pytest.fixture(scope="module")
def url(run: RunFolder) -> Iterator[str]:
    """The page of the run, served by the real command."""
    command = [sys.executable, "-m", "etude", "ui", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture
def page(url: str) -> Iterator["Page"]:
    """A page opened with the token; the test fails on any policy violation or script error."""
    faults: list[str] = []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.set_default_timeout(60_000)
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        opened.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
        opened.goto(url)
        opened.get_by_role("link", name="Rollouts").click()
        opened.wait_for_selector("[data-row='0'] a")
        yield opened
        browser.close()
    assert faults == []


def _go(page: "Page", place: str) -> None:
    page.evaluate("place => { location.hash = place }", f"#/{RUN}/rollouts{place}")


def test_hostile_output_is_shown_as_text(page: "Page") -> None:
    row = page.locator("[data-row='0']")
    assert "<script>document.title='owned'</script>" in row.inner_text()
    assert "⟨ESC⟩" in row.inner_text()
    row.get_by_role("link").click()
    page.wait_for_selector("#turn-3")
    body = page.locator("main")
    text = body.text_content() or ""
    assert text.count("<script>document.title='owned'</script>") >= 6  # template, task, heard, said, hint, verdict, …
    assert not re.search("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]", text)
    for spelt in ("ESC", "NUL", "U+202E", "U+2066", "U+2028", "BEL", "\ufffd"):
        assert spelt in text
    for hidden in ("script", "img", "iframe", "svg"):
        assert page.locator(f"main {hidden}").count() == 0
    assert "<b>evil</b>" in text
    assert page.title() != "owned"
    assert "return 2" in page.locator("#turn-1 .rollouts-diff").inner_text()


def test_a_line_of_ten_million_letters_is_cut_behind_a_button(page: "Page") -> None:
    _go(page, "/evil/turn/3")
    heard = page.locator("#turn-3 pre[aria-label='New in the context']")
    heard.wait_for()
    expect(heard).to_have_text("x" * 4_000)
    assert "more characters" in page.locator("#turn-3").inner_text()
    page.locator("#turn-3").get_by_role("button", name="Show more").first.click()
    expect(heard).to_have_text(re.compile("^x{40000}$"))


def test_a_token_is_reached_by_keyboard_and_by_link(page: "Page") -> None:
    _go(page, "/evil")
    page.get_by_label("Show").select_option("logprob")
    tokens = page.locator("#turn-1 .rollouts-tokens")
    tokens.focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "token 2" in page.locator("#turn-1 [role=status]").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url("**/turn/1/token/2*")
    page.reload()
    page.wait_for_selector("#turn-1 .is-at[data-token='2']")
    assert "probability" in page.locator("#turn-1 [role=status]").inner_text()


def test_the_table_is_filtered_as_one_types_and_walked_by_keyboard(page: "Page") -> None:
    _go(page, "")
    page.keyboard.press("/")
    page.keyboard.type("kind3")
    expect(page.locator(".rollouts-count")).to_have_text("16 rollouts")
    page.get_by_label("Reward").fill(">0")
    expect(page.locator(".rollouts-count")).to_have_text("8 rollouts")
    assert "task=kind3" in page.url
    page.locator("[data-row='0'] a").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    expect(page.locator("[data-row='7'] a")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("link", name="side by side").click()
    page.wait_for_selector(".rollouts-comparison")
    assert page.locator(".rollouts-comparison tbody tr").count() == 2
