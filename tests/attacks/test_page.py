"""Attacks by text that a model, a suite or a bucket provides on the person who reads it, in a browser or a terminal."""

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from etude.cli.actions.conversation import ReplyPrinter
from etude.cli.main import main
from etude.config.recipe import LedgerConfig
from etude.dashboard.formatting import visible
from etude.dashboard.terminal import light_table
from etude.errors import ConfigError
from etude.gateway.upstream.calls import Upstream
from etude.ui.server import PAGE, SECURITY, STATIC

CONTROLS = {
    "the clipboard": "\x1b]52;c;cm0gLXJmIH4=\x07",
    "the title": "\x1b]0;root@prod\x07",
    "a link": "\x1b]8;;https://attacker.example\x1b\\here\x1b]8;;\x1b\\",
    "what was printed": "\x1b[2J\x1b[H",
    "the same by one byte": "\x9b2J",
    "the line": "harmless\rrm -rf ~",
    "its direction": "\u202egnp.exe",
    "letters": "\u200b\u2066x",
}


@pytest.mark.parametrize("text", CONTROLS.values(), ids=CONTROLS)
def test_to_have_a_terminal_obey_a_reply(text: str) -> None:
    out = io.StringIO()
    printer = ReplyPrinter(out, colour=True)
    for letter in text:  # one token after the other
        printer.take({"choices": [{"delta": {"content": letter}}]})
    assert out.getvalue() == visible(text)
    assert visible(text).isprintable()


@pytest.mark.parametrize("text", [*CONTROLS.values(), "[link=https://attacker.example]here[/link]", "[/x]", "[red]"])
def test_to_have_a_terminal_obey_a_name_in_a_table(text: str) -> None:
    table = light_table("tensor", "changed")
    table.add_row(text, "1")
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    assert visible(text).split()[0] in out.getvalue()
    assert out.getvalue().replace("\n", "").isprintable()


def test_to_have_a_terminal_obey_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["suite", "run", str(tmp_path / CONTROLS["the title"]), "--url", "http://x", "--model", "m", *out]) == 2
    error = capsys.readouterr().err
    assert "root@prod" in error
    assert error.replace("\n", "").isprintable()


class _Scripts(HTMLParser):
    """The scripts that a page would run, and the addresses that it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if (tag == "script" and "src" not in names) or any(name.startswith("on") for name in names):
            self.inline.append(tag)


def test_to_run_a_script_in_the_page() -> None:
    """The page has no inline script, and its security policy runs only scripts of the page's own server."""
    policy = SECURITY["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    page = _Scripts()
    page.feed(PAGE.read_text(encoding="utf-8"))
    assert page.inline == []
    script = (STATIC / "app.js").read_text(encoding="utf-8")
    for word in ("document.write", "insertAdjacentHTML", "new Function(", "eval("):
        assert word not in script


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:SECRET@h/d",
        "postgresql://u@h/d?password=SECRET",
        "postgresql://u@h/d?pass%77ord=SECRET",
        "postgresql://u@h/d?ssl%70assword=SECRET",
        "postgresql://a@h1,b:SECRET@h2/d",
    ],
)
def test_to_read_a_password_in_a_run_folder(url: str) -> None:
    with pytest.raises(ValueError, match="has a password in it"):
        LedgerConfig(url=url)


@pytest.mark.parametrize("url", ["https://me:SECRET@api.example/v1", "https://api.example/v1?key=SECRET"])
def test_to_read_a_key_in_the_results_of_a_suite(url: str) -> None:
    with pytest.raises(ConfigError, match="more than a place") as refused:
        Upstream(url=url, model="m")
    assert "SECRET" not in str(refused.value)
    assert "SECRET" not in json.dumps(repr(Upstream(url="https://api.example", model="m", key="SECRET")))
