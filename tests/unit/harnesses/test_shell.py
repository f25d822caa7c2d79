"""An agent with a shell, in a real sandbox."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from command_results import ended
from etude.config.rollouts import ShellOptions
from etude.config.tasks import TaskConfig
from etude.harnesses.completions import HarnessContext
from etude.harnesses.shell import NO_BLOCK, SYSTEM, ShellHarness, describe, read_command
from etude.protocols import HarnessResult
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.types import Json
from playhouse import TASK
from scripted_model import ScriptedModel, serving


def work(model: ScriptedModel, options: ShellOptions, folder: Path) -> tuple[HarnessResult, str | None]:
    """The result of a session, and the file that it was about."""

    async def run() -> tuple[HarnessResult, str | None]:
        provider = NamespaceSandboxes(scratch=folder)
        try:
            async with aiohttp.ClientSession() as http, serving(model) as session:
                context = HarnessContext(http=http, tasks=TaskConfig(), on_close=lambda close: None)
                sandbox = await provider.create(TASK.files)
                result = await ShellHarness.open(options, context).run(TASK, session, sandbox, temperature=1.0)
                return result, await sandbox.read_file("util.py")
        finally:
            await provider.close()

    return asyncio.run(run())


def plays(*replies: str) -> ScriptedModel:
    def say(messages: Sequence[dict[str, Json]]) -> str:
        return replies[sum(each["role"] == "assistant" for each in messages)]

    return ScriptedModel(say)


def test_commands_change_files_and_what_they_print_is_shown(tmp_path: Path) -> None:
    model = plays(
        "First a look.\n```bash\ncat util.py\n```",
        "no block at all",
        "```bash\nsed -i 's/a - b/a + b/' util.py; echo oh >&2; false\n```",
        "```bash\nsubmit\n```",
    )
    result, text = work(model, ShellOptions(), tmp_path)
    assert text == TASK.files["util.py"].replace("a - b", "a + b")
    assert (result.reason, dict(result.counts)) == ("submit", {"shell": 2, "malformed": 1, "submit": 1})
    assert result.measures == {"tool_errors": 2}
    messages = model.requests[-1]["messages"]
    assert isinstance(messages, list)
    texts = [each["content"] for each in messages if isinstance(each, dict)]
    assert texts[:2] == [SYSTEM, TASK.prompt]
    assert texts[3] == f"[exit status 0]\n{TASK.files['util.py']}"
    assert texts[5] == NO_BLOCK
    assert texts[7] == "[exit status 1]\n\n[stderr]\noh"


def test_turns_run_out(tmp_path: Path) -> None:
    result, _ = work(plays(*["```bash\ntrue\n```"] * 3), ShellOptions(max_turns=3), tmp_path)
    assert (result.reason, result.counts["shell"]) == ("turns", 3)


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("```bash\nls\n```", "ls"),
        ("```\nls\n```\n", "ls"),
        ("text\n```sh\na\nb\n```\nmore", "a\nb"),
        ("```bash\nls\n```\n```bash\npwd\n```", None),
        ("ls", None),
        ("```bash\nls", None),
    ],
)
def test_a_reply_has_one_block(reply: str, command: str | None) -> None:
    assert read_command(reply) == command


def test_the_middle_of_a_long_output_is_left_out() -> None:
    result = ended(stdout="a" * 20_000 + "z", timed_out=True)
    shown = describe(result)
    assert shown.startswith("[it ran out of time]\naaa")
    assert "4001 characters left out" in shown
    assert shown.endswith("z")
