"""The built-in coding agent: one tool call in plain text per turn, until it submits or a limit is reached.

    prompt ──▶ model ──call──▶ sandbox ──observation──▶ model ──▶ … ──▶ submit

Owns the conversation and what tools do in a sandbox. The words are those of :mod:`etude.sandboxes.tools`, the way to
the model is :mod:`etude.harnesses.completions`. Does not grade.
"""

from collections import Counter

import aiohttp

from etude.config.rollouts import HarnessConfig
from etude.harnesses.completions import CompletionClient, Message
from etude.protocols import HarnessResult, Sandbox, Session
from etude.sandboxes import tools
from etude.sandboxes.calls import call_function, same_value
from etude.types import Checks, FunctionChecks, QueryChecks, ScriptChecks, Task, TestChecks

OBSERVATION_CHARACTERS = 20_000
"""Longest observation: far beyond any context here, far below what a gateway refuses to read."""
PYTEST_OPTIONS = ("-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider")
"""Say which test failed first, and leave nothing behind."""
COUNTED_AS = {
    tools.ReadFile: tools.READ,
    tools.EditFile: tools.EDIT,
    tools.RunTests: tools.TEST,
    tools.Submit: tools.SUBMIT,
    tools.Malformed: "malformed",
}
"""Kind of call → its name in the counts."""


class CodingHarness:
    """Drives the model with the text tools; implements :class:`~etude.protocols.Harness`."""

    def __init__(self, config: HarnessConfig, http: aiohttp.ClientSession) -> None:
        """``http`` is shared by all sessions and stays the caller's to close."""
        self._max_turns = config.max_turns
        self._model = CompletionClient(http, max_tokens=config.max_tokens_per_turn, timeout_s=config.turn_timeout_s)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Work until ``submit``, the last turn (``turns``), a cut turn (``length``) or a full context (``context``).

        Counts calls by the tool's word, and ``malformed``; a turn that was cut is no call. Raises
        :class:`~etude.errors.InfrastructureError` for trouble with gateway, session or sandbox.
        """
        messages: list[Message] = [{"role": "user", "content": task.prompt}]
        counts: Counter[str] = Counter()
        for _ in range(self._max_turns):
            reply = await self._model.complete(session, messages, temperature=temperature)
            if reply.finish != "stop":
                return HarnessResult(reason=reply.finish, counts=counts)
            call = tools.parse_call(reply.text)
            counts[COUNTED_AS[type(call)]] += 1
            if isinstance(call, tools.Submit):
                return HarnessResult(reason=tools.SUBMIT, counts=counts)
            messages.append({"role": "assistant", "content": reply.text})
            messages.append({"role": "user", "content": await observe(call, task.checks, sandbox)})
        return HarnessResult(reason="turns", counts=counts)


async def observe(call: tools.Call, checks: Checks, sandbox: Sandbox) -> str:
    """Carry a call out in a sandbox and say what the agent sees. Raises :class:`~etude.errors.SandboxError`."""
    match call:
        case tools.ReadFile(path, first):
            text = await _read(sandbox, path)
            return tools.NO_FILE if text is None else tools.number_lines(text, first)[:OBSERVATION_CHARACTERS]
        case tools.EditFile():
            return await _edit(sandbox, call)
        case tools.RunTests():
            return (await _test(sandbox, checks))[:OBSERVATION_CHARACTERS]
        case tools.Submit() | tools.Malformed():
            return tools.BAD_CALL


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        return await sandbox.read_file(path)
    except ValueError:
        return None  # a path out of the sandbox, or no plain file: there is none for the agent


async def _edit(sandbox: Sandbox, edit: tools.EditFile) -> str:
    text = await _read(sandbox, edit.path)
    edited = None if text is None else tools.apply_edit(text, edit)
    if edited is None:
        return tools.BAD_EDIT
    try:
        await sandbox.write_file(edit.path, edited)
    except ValueError:
        return tools.BAD_EDIT  # a program may have made its own file read-only
    return tools.OK


async def _test(sandbox: Sandbox, checks: Checks) -> str:
    """Run what the agent may see of its tests and describe the first that fails."""
    match checks:
        case FunctionChecks():
            return await _call_visible(sandbox, checks)
        case TestChecks():
            command = [*checks.command, *PYTEST_OPTIONS, *checks.visible]
            result = await sandbox.exec(command, timeout_s=checks.timeout_s)
            return tools.PASS if result.exit_code == 0 else tools.render_summary(result.stdout)
        case ScriptChecks() | QueryChecks():
            return tools.NO_TESTS


async def _call_visible(sandbox: Sandbox, checks: FunctionChecks) -> str:
    calls = [case.arguments for case in checks.visible]
    outcomes = await call_function(sandbox, checks.path, checks.function, calls)
    for outcome, case in zip(outcomes, checks.visible, strict=True):
        if not (outcome.ok and same_value(outcome.value, case.expected)):
            return tools.render_failure(checks.function, case, outcome.shown)
    return tools.PASS
