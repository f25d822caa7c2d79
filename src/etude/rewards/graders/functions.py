"""The reward of a task with hidden tests: does the file the agent left behind compute what it should?

The agent is gone; its file runs in its own sandbox on the hidden cases' arguments. What they should give never enters
the sandbox, so there is nothing to find there and nothing to fake (:mod:`etude.sandboxes.function_calls`).
"""

from etude.protocols import Grade, HarnessResult, Sandbox
from etude.sandboxes.function_calls import CALL_TIMEOUT_S, call_function, same_value
from etude.types import Task

SUBMITTED = "submit"
"""The one reason for stopping that asks for a reward."""


class HiddenTests:
    """Rewards 1 for a submitted program that passes every hidden case; implements :class:`~etude.protocols.Grader`."""

    def __init__(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    async def grade(self, task: Task, sandbox: Sandbox, result: HarnessResult) -> Grade:
        """Run the hidden cases: 1.0 if the agent submitted and all pass, else 0.0.

        Parts: ``hidden_passed``, the share of cases passed, submitted or not; ``submitted``, 0 or 1. A program that
        does not load, hangs or ends the process fails its cases. Raises :class:`~etude.errors.SandboxError`.
        """
        checks = task.function_checks
        calls = [case.arguments for case in checks.hidden]
        outcomes = await call_function(sandbox, checks.path, checks.function, calls, self._timeout_s)
        passed = sum(
            outcome.ok and same_value(outcome.value, case.expected)
            for outcome, case in zip(outcomes, checks.hidden, strict=True)
        )
        submitted = result.reason == SUBMITTED
        return Grade(
            value=1.0 if submitted and passed == len(checks.hidden) else 0.0,
            parts={"hidden_passed": passed / len(checks.hidden), "submitted": float(submitted)},
        )
