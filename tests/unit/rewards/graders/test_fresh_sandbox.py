"""Grading in a fresh sandbox: only the requested file counts, whatever else an agent left."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from etude.protocols import Grade, HarnessResult, Sandbox
from etude.rewards.graders.functions import FreshGrader, HiddenTests
from etude.sandboxes.local.provider import LocalSandboxes
from etude.types import Case, FunctionChecks, Split, Task

RIGHT = "def half(n):\n    return n // 2\n"
TASK = Task(
    task_id="t",
    family="bugfix",
    template="half",
    split=Split.TRAIN,
    prompt="fix half in a.py",
    files={},
    checks=FunctionChecks(
        path="a.py", function="half", visible=(), hidden=tuple(Case(arguments=(n,), expected=n // 2) for n in (2, 7))
    ),
)


def grade(files: Mapping[str, str], plant: str = "") -> Grade:
    """Grade an agent's files, after running its own program in the sandbox."""

    async def act() -> Grade:
        provider = LocalSandboxes(1)
        try:
            sandbox: Sandbox = await provider.create(files)
            if plant:
                assert (await sandbox.exec(["python", "-c", plant])).exit_code == 0
            result = HarnessResult(reason="submit", counts={})
            return await FreshGrader(HiddenTests(timeout_s=10), provider).grade(TASK, sandbox, result)
        finally:
            await provider.close()

    return asyncio.run(act())


def test_a_right_file_is_rewarded() -> None:
    assert grade({"a.py": RIGHT}).value == 1.0


def test_a_file_that_is_gone_or_no_file_is_not() -> None:
    assert grade({}).value == 0.0
    assert grade({}, plant="import os; os.mkdir('a.py')").value == 0.0
    assert grade({"b.py": RIGHT}, plant="import os; os.symlink('b.py', 'a.py')").value == 0.0


def test_modules_that_were_planted_are_not_there() -> None:
    """A planted module would be imported instead of one of the standard library."""
    cheat = "from planted import half\n"
    assert grade({"a.py": cheat, "planted.py": RIGHT}).value == 0.0


def test_the_fresh_sandbox_is_closed(tmp_path: Path) -> None:
    async def act() -> list[str]:
        provider = LocalSandboxes(1, tmp_path)
        try:
            sandbox = await provider.create({"a.py": RIGHT})
            result = HarnessResult(reason="submit", counts={})
            await FreshGrader(HiddenTests(timeout_s=10), provider).grade(TASK, sandbox, result)
            return [folder.name for folder in folders_in(tmp_path)]
        finally:
            await provider.close()

    assert asyncio.run(act()) == ["000001"]


def folders_in(scratch: Path) -> list[Path]:
    """The sandboxes that a provider has on disk."""
    return list(scratch.glob("*/*"))
