"""Probes: functions of the code under test called in a process that does not hold what they should return.

A hidden test has to bring its expected values into the process of the code that it tests, where they can be read. A
probe brings arguments alone; results come out as plain JSON, and are compared out here, by value and type. The only way
to pass is to compute them.
"""

import secrets
from collections.abc import Sequence

from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.sandboxes.function_calls import call_function, same_value
from etude.types import Probe

START_TIMEOUT_S = 60.0
"""For an interpreter to start on a busy machine."""
SHIM = """\
import importlib, operator
_target = operator.attrgetter({function!r})(importlib.import_module({module!r}))
def probe(*arguments):
    return _target(*arguments)
"""


async def check_interpreter(sandbox: Sandbox) -> None:
    """See that a world can be probed; to be asked before anything of an agent's is in it.

    Raises :class:`~etude.errors.SandboxError`.
    """
    result = await sandbox.exec(["python", "-c", ""], timeout_s=START_TIMEOUT_S)
    if result.exit_code != 0:
        raise SandboxError(f"no Python starts in this world, so it cannot be probed: {result.stderr.strip()[-200:]}")


async def count_passed(sandbox: Sandbox, probes: Sequence[Probe], timeout_s: float) -> int:
    """How many cases of all ``probes`` return what they should; each probe has a process and ``timeout_s``.

    Raises :class:`~etude.errors.SandboxError` when the sandbox failed, not what is probed.
    """
    passed = 0
    for probe in probes:
        path = f".{secrets.token_hex(6)}.py"
        await sandbox.write_file(path, SHIM.format(function=probe.function, module=probe.module))
        calls = [case.arguments for case in probe.cases]
        outcomes = await call_function(sandbox, path, "probe", calls, timeout_s)
        passed += sum(
            outcome.ok and same_value(outcome.value, case.expected)
            for outcome, case in zip(outcomes, probe.cases, strict=True)
        )
    return passed
