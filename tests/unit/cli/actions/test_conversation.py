"""``etude chat``: its output, and the commands that it accepts."""

import io
from collections.abc import Iterator

import pytest

from etude.cli.actions.conversation import Chat, ReplyPrinter, Talk
from etude.cli.main import main
from etude.clock import SystemClock
from etude.engines.fake import FakeEngine
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.tokens.chat import ChatTemplate
from etude.types import Json
from gateways import gateway_in_a_thread

SECRET = "a product's key"
TEMPLATE = ChatTemplate.train(["return total\n"] * 4, vocab_size=300)


class GrowingEngine(FakeEngine):
    """Samples ``return``, with new weights after every second token."""

    def _draws(self, prompt_ids: object, params: object) -> Iterator[int]:
        for index, letter in enumerate("return"):
            self.version = index // 2
            yield TEMPLATE.encode(letter)[0]
        yield TEMPLATE.end_id


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a gateway that runs in its own thread."""
    keys = (Key(key_id="product", digest=digest_of(SECRET), scope=Scope.PRODUCTION),)
    engine = GrowingEngine(SystemClock(), vocab_size=300, max_length=64)
    with gateway_in_a_thread(TEMPLATE, engine, keys, 64) as url:
        yield url


def test_a_reply_is_printed_with_the_weights_that_said_it(url: str) -> None:
    out = io.StringIO()
    assert Chat(f"{url}/v1/", SECRET, out=out).ask("go")
    assert out.getvalue() == "re ‹v1› tu ‹v2› rn  [v0 → v1 → v2]\n"


def test_a_failed_reply_is_told_and_the_conversation_goes_on(url: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    chat = Chat(url, SECRET, out=out, err=err)
    assert not chat.ask("x" * 99)
    assert "context" in err.getvalue()
    assert chat.ask("go")
    assert not Chat(url, "wrong", out=out, err=err).ask("go")
    assert "401" in err.getvalue()
    assert not Chat("http://127.0.0.1:9", SECRET, out=out, err=err).ask("go")
    assert "no answer from" in err.getvalue()


def test_commands_are_obeyed(url: str) -> None:
    out = io.StringIO()
    chat = Chat(url, SECRET, out=out)
    assert chat.handle("/system be brief")
    assert chat.handle("go")
    assert chat.handle("/new")
    assert chat.handle("/what")
    assert "/quit" in out.getvalue()
    assert not chat.handle("/quit")


def test_instructions_outlive_what_was_said() -> None:
    talk = Talk()
    talk.reset("be brief")
    talk.add("user", "go")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    talk.reset("be kind")
    assert talk.messages == [{"role": "system", "content": "be kind"}]


def test_thoughts_are_printed_too() -> None:
    out = io.StringIO()
    line = ReplyPrinter(out, colour=False)
    choice: Json = {"delta": {"reasoning_content": "hm", "content": None}}
    line.take({"system_fingerprint": "v3", "choices": [choice]})
    line.end()
    assert out.getvalue() == "hm  [v3]\n"


@pytest.mark.parametrize("options", [(), ("--key-env", "OTHER")])
def test_the_key_comes_from_a_variable_and_never_from_the_command_line(
    url: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTHER" if options else "OPENAI_API_KEY", SECRET)
    monkeypatch.setattr("sys.stdin", io.StringIO("go"))
    assert main(["chat", "--url", url, *options]) == 0
    assert capsys.readouterr().out == "re ‹v1› tu ‹v2› rn  [v0 → v1 → v2]\n"
    assert main(["chat", "--url", url, "--key", SECRET]) == 2
    assert "--key-env" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "give either a run folder, or --url URL"),
        (("RUN", "--url", "http://x"), "give either a run folder, or --url URL"),
        (("RUN", "--key-env", "KEY"), "--key-env KEY has no effect on a run"),
        (("--url", "http://x"), "--url http://x needs a key: export OPENAI_API_KEY"),
        (("--url", "http://x", "--key-env", "KEY"), "--key-env KEY: the variable is not set"),
    ],
)
def test_a_run_or_a_gateway_with_a_key_is_needed(
    options: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["chat", *options]) == 2
    assert complaint in capsys.readouterr().err
