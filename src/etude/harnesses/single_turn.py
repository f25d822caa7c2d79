"""A single call of the model, whose reply is the answer: for questions that need no tools.

    system message, conversation so far, prompt ──▶ model ──▶ reply

Runs no command: the sandbox stays empty. A grader compares the reply with the right answer.
"""

from etude.config.rollouts import SingleTurnOptions
from etude.harnesses.completions import CompletionClient, HarnessContext, Message
from etude.harnesses.tools import SUBMIT
from etude.protocols import HarnessResult, Sandbox, Session
from etude.types import Task


class SingleTurnHarness:
    """Calls the model once; implements :class:`~etude.protocols.Harness`."""

    @classmethod
    def open(cls, options: SingleTurnOptions, context: HarnessContext) -> "SingleTurnHarness":
        """The harness of a recipe."""
        model = CompletionClient(context.http, max_tokens=options.max_tokens_per_turn, timeout_s=options.turn_timeout_s)
        return cls(model, system=options.system)

    def __init__(self, model: CompletionClient, *, system: str = "") -> None:
        self._model = model
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Call the model and submit its reply (``submit``). A truncated reply (``length``), or none because the prompt
        fills the context (``context``), is not submitted. Raises :class:`~etude.errors.InfrastructureError` for
        failures of gateway or session.
        """
        before: list[Message] = [{"role": each.role, "content": each.content} for each in task.history]
        messages: list[Message] = [*self._system, *before, {"role": "user", "content": task.prompt}]
        reply = await self._model.complete(session, messages, temperature=temperature)
        if reply.finish != "stop":
            return HarnessResult(reason=reply.finish, counts={}, answer=reply.text)
        return HarnessResult(reason=SUBMIT, counts={SUBMIT: 1}, answer=reply.text)
