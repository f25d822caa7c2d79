"""A harness: one call of the model, whose reply is the answer. ``harness.kind = "@harness.py:OneCall"``."""

from pydantic import Field

from etude.config.section import Section
from etude.harnesses.completions import CompletionClient, HarnessContext, Message
from etude.protocols import HarnessResult, Sandbox, Session
from etude.types import Task


class OneCallOptions(Section):
    """One call of the model."""

    max_tokens: int = Field(default=16, ge=1)
    """Tokens of the reply."""


class OneCall:
    Options = OneCallOptions

    def __init__(self, options: OneCallOptions, context: HarnessContext) -> None:
        self._model = CompletionClient(context.http, max_tokens=options.max_tokens, timeout_s=60.0)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        messages: list[Message] = [{"role": "user", "content": task.prompt}]
        reply = await self._model.complete(session, messages, temperature=temperature)
        return HarnessResult(reason="submit", counts={"submit": 1}, answer=reply.text)
