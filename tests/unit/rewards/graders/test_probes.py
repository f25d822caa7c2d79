"""Probes: their answers can only be computed, not guessed or read."""

import asyncio

import pytest

from command_results import ended
from etude.errors import SandboxError
from etude.protocols import ExecResult, Sandbox
from etude.rewards.graders.hidden_tests import check_interpreter, count_passed
from etude.sandboxes.local.provider import LocalSandboxes
from etude.types import Case, Json, Probe


def probed(files: dict[str, str], cases: dict[int, Json], module: str = "pkg.half", function: str = "half") -> int:
    """The number of passed cases."""

    async def act() -> int:
        provider = LocalSandboxes(1)
        try:
            sandbox = await provider.create(files)
            await check_interpreter(sandbox)
            made = tuple(Case(arguments=(argument,), expected=expected) for argument, expected in cases.items())
            return await count_passed(sandbox, [Probe(module=module, function=function, cases=made)] * 2, 20.0)
        finally:
            await provider.close()

    return asyncio.run(act())


def half(body: str) -> dict[str, str]:
    return {"pkg/half.py": f"def half(n):\n    {body}\n"}


def test_right_results_count() -> None:
    assert probed(half("return n // 2"), {4: 2, 5: 2, 6: 4}) == 4


def test_a_method_of_a_package() -> None:
    files = {"pkg/__init__.py": "class A:\n    @staticmethod\n    def half(n):\n        return n // 2\n"}
    assert probed(files, {4: 2}, "pkg", "A.half") == 2


@pytest.mark.parametrize(
    "body",
    [
        "return type('Any', (int,), {'__eq__': lambda *_: True})(2)",
        "return True",
        "return 1.0",
        "return '1'",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import sys; print([f.f_locals for f in sys._current_frames().values()]); return None",
    ],
)
def test_nothing_else_does(body: str) -> None:
    assert probed(half(body), {2: 1}) == 0


def test_what_is_not_there_passes_nothing() -> None:
    assert probed({}, {2: 1}) == 0
    assert probed(half("return 1"), {2: 1}, function="third") == 0
    assert probed({"pkg/half.py": "def half("}, {2: 1}) == 0


class NoPython:
    """A sandbox in which no interpreter starts."""

    async def exec(self, *_: object, **__: object) -> ExecResult:
        return ended(127, stderr="not found")


def test_a_sandbox_without_an_interpreter_is_our_fault() -> None:
    sandbox: Sandbox = NoPython()  # type: ignore[assignment]  # only exec is called
    with pytest.raises(SandboxError, match="not found"):
        asyncio.run(check_interpreter(sandbox))
