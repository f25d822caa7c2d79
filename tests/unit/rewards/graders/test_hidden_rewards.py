"""Rewards of right, wrong and dishonest programs, in a real sandbox."""

import asyncio

import pytest

from etude.errors import SandboxError
from etude.protocols import Grade, HarnessResult
from etude.rewards.graders.functions import HiddenTests
from etude.sandboxes.local.provider import LocalSandboxes
from etude.types import Case, FunctionChecks, Split, Task

TASK = Task(
    task_id="t",
    family="bugfix",
    template="half",
    split=Split.TRAIN,
    prompt="fix half in a.py",
    files={},
    checks=FunctionChecks(
        path="a.py",
        function="half",
        visible=(Case(arguments=(8,), expected=4),),
        hidden=tuple(Case(arguments=(n,), expected=n // 2) for n in (2, 3, 7, 10)),
    ),
)
RIGHT = "def half(n):\n    return n // 2\n"


def grade(source: str, reason: str = "submit", timeout_s: float = 10.0) -> Grade:
    """The reward of a program."""

    async def act() -> Grade:
        provider = LocalSandboxes(1)
        try:
            sandbox = await provider.create({"a.py": source})
            result = HarnessResult(reason=reason, counts={})
            return await HiddenTests(timeout_s=timeout_s).grade(TASK, sandbox, result)
        finally:
            await provider.close()

    return asyncio.run(act())


def test_a_right_program_is_rewarded() -> None:
    assert grade(RIGHT) == Grade(value=1.0, parts={"hidden_passed": 1.0, "submitted": 1.0})


@pytest.mark.parametrize("reason", ["turns", "length", "context"])
def test_only_what_is_submitted_is_rewarded(reason: str) -> None:
    assert grade(RIGHT, reason) == Grade(value=0.0, parts={"hidden_passed": 1.0, "submitted": 0.0})


def test_almost_right_is_not_right() -> None:
    wrong = "def half(n):\n    return round(n / 2)\n"  # 1.5 → 2, 3.5 → 4
    assert grade(wrong) == Grade(value=0.0, parts={"hidden_passed": 0.5, "submitted": 1.0})


@pytest.mark.parametrize("source", ["", "def half(n:", "def half(n): return n / 2 if n % 2 else float(n // 2)"])
def test_what_does_not_load_or_returns_another_type_earns_nothing(source: str) -> None:
    assert grade(source) == Grade(value=0.0, parts={"hidden_passed": 0.0, "submitted": 1.0})


def test_a_program_that_hangs_earns_nothing() -> None:
    assert grade("while True: pass", timeout_s=0.3).value == 0.0


TAMPERING = {
    "leaves with success": "import os; os._exit(0)",
    "leaves in the call": "import sys\ndef half(n): sys.exit(0)",
    "prints results": "print('[true, 1]\\n' * 9)\ndef half(n): print('PASS'); return True",
    "is equal to everything": (
        "class Any(int):\n"
        "    def __eq__(self, other): return True\n"
        "    def __hash__(self): return 0\n"
        "def half(n): return Any()\n"
    ),
    "overrides the tools": (
        "import builtins, json, os, sys\n"
        "json.dumps = json.loads = lambda *a, **k: '[true, 1]'\n"
        "builtins.print = builtins.all = builtins.type = lambda *a: True\n"
        "sys.modules['json'] = sys.modules[__name__] = None\n"
        "def half(n): return 0\n"
    ),
    "forges the driver's lines": (
        "import os, sys\n"
        "frame = sys._getframe()\n"
        "while 'nonce' not in frame.f_locals: frame = frame.f_back\n"
        "names = frame.f_locals\n"
        "for index in range(len(names['request']['calls'])):\n"
        "    os.write(names['results'], f\"{names['nonce']} {index} [true, true]\\n\".encode())\n"
        "os._exit(0)\n"
    ),
    "looks for the answers": (
        "import gc, os\n"
        "found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "files = [os.path.join(d, f) for d, _, fs in os.walk('/') for f in fs if 'hidden' in f or 'expected' in f]\n"
        "def half(n): return found[0]['expected'] if found else int(files[0])\n"
    ),
    "is another file": "import os\nos.rename('a.py', 'b.py')\nopen('a.py', 'w').write('def half(n): return 1')",
    "rewrites its own visible case": "def half(n): return {8: 4}[n]",
}


@pytest.mark.parametrize("source", TAMPERING.values(), ids=TAMPERING.keys())
def test_tampering_earns_nothing(source: str) -> None:
    assert grade(source).value == 0.0


def test_a_failing_sandbox_is_no_reward_of_zero() -> None:
    async def act() -> None:
        provider = LocalSandboxes(1)
        sandbox = await provider.create({"a.py": RIGHT})
        await provider.close()
        with pytest.raises(SandboxError):
            await HiddenTests().grade(TASK, sandbox, HarnessResult(reason="submit", counts={}))

    asyncio.run(act())
