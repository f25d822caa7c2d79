"""An agent whose only tool is a shell: for models that can use a shell but do not know étude's own tools.

    system message, task ──▶ model ──```bash block──▶ sandbox ──output──▶ model ──▶ … ──▶ submit

Each reply has one fenced block, which ``bash`` runs in the working folder; a block with only ``submit`` ends the
session. Owns the texts and the loop; :mod:`etude.harnesses.completions` calls the model. Does not grade.
"""

import re
from collections import Counter

from etude.config.rollouts import ShellOptions
from etude.errors import AgentFault, OutOfTime
from etude.harnesses.completions import CompletionClient, HarnessContext, Message
from etude.protocols import ExecResult, HarnessResult, Sandbox, Session
from etude.types import Task

SUBMIT, SHELL, MALFORMED = "submit", "shell", "malformed"
"""Names of actions in the counts."""
BLOCK = re.compile(r"^```(?:bash|sh|shell)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A fenced block of shell."""
OUTPUT_CHARACTERS = 16_000
"""Limit of a command's output in an observation: half from its beginning and half from its end."""
SYSTEM = """\
You are a software engineer who works in a Linux sandbox without a network. Your only tool is a shell.

Answer with one or two sentences of thought and exactly one block:

```bash
the commands to run
```

They run with bash in the working folder of the project; every block is a new shell. You then see what they print. Make
the change that you are asked for in the files, and try it. When you are done, answer with:

```bash
submit
```"""
"""System message with the form of a tool call."""
NO_BLOCK = (
    "Your answer has no block of bash, or more than one. Answer with exactly one; `submit` alone in it ends the work."
)
"""The observation of a malformed reply."""


class ShellHarness:
    """Drives the model with a shell; implements :class:`~etude.protocols.Harness`."""

    @classmethod
    def open(cls, options: ShellOptions, context: HarnessContext) -> "ShellHarness":
        """The harness of a recipe."""
        model = CompletionClient(context.http, max_tokens=options.max_tokens_per_turn, timeout_s=options.turn_timeout_s)
        return cls(options, model)

    def __init__(self, options: ShellOptions, model: CompletionClient) -> None:
        self._options = options
        self._model = model

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Work until ``submit``, the last turn (``turns``), a conversation that is too long (``context``), the end of
        the time for commands (``time``), or damage to its sandbox (``agent_fault``). A truncated block is malformed.

        Counts commands and ``malformed`` replies; measures ``tool_errors``: failed commands and malformed replies.
        Raises :class:`~etude.errors.InfrastructureError` for failures of gateway, session or sandbox.
        """
        before: list[Message] = [{"role": each.role, "content": each.content} for each in task.history]
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            *before,
            {"role": "user", "content": task.prompt},
        ]
        counts, errors, reason = Counter[str](), 0, "turns"
        for _ in range(self._options.max_turns):
            reply = await self._model.complete(session, messages, temperature=temperature)
            if reply.finish == "context":
                reason = "context"
                break
            command = read_command(reply.text)
            counts[SHELL if command not in (None, SUBMIT) else command or MALFORMED] += 1
            if command == SUBMIT:
                reason = SUBMIT
                break
            try:
                observation, failed = await self._observe(command, sandbox)
            except (OutOfTime, AgentFault) as over:
                reason = over.REASON
                break
            errors += failed
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": observation}]
        return HarnessResult(reason=reason, counts=counts, measures={"tool_errors": errors})

    async def _observe(self, command: str | None, sandbox: Sandbox) -> tuple[str, bool]:
        """The observation of a reply, and true if the tool failed."""
        if command is None:
            return NO_BLOCK, True
        result = await sandbox.exec(["bash", "-c", command], timeout_s=self._options.command_timeout_s)
        return describe(result), result.exit_code != 0


def read_command(reply: str) -> str | None:
    """The command in a reply; ``None`` if there is not exactly one block."""
    blocks = BLOCK.findall(reply if reply.endswith("\n") else reply + "\n")
    return blocks[0].strip() if len(blocks) == 1 else None


def describe(result: ExecResult) -> str:
    """The observation of a command: its status and its output, truncated in the middle if it is long."""
    printed = result.stdout + (f"\n[stderr]\n{result.stderr}" if result.stderr.strip() else "")
    if len(printed) > OUTPUT_CHARACTERS:
        half = OUTPUT_CHARACTERS // 2
        printed = f"{printed[:half]}\n[… {len(printed) - 2 * half} characters left out …]\n{printed[-half:]}"
    status = "it ran out of time" if result.timed_out else f"exit status {result.exit_code}"
    return f"[{status}]\n{printed}".rstrip()
