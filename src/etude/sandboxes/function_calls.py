"""Calls of one function of a file in a sandbox, with the results separated from the program's other output.

Owns the driver that runs inside, and the comparison of results. Only arguments enter the sandbox, never the expected
results. A program that forges the driver's lines, overrides ``json`` or ``print`` or ends the process gains nothing: to
be useful, a forged line must contain the right answer, which the program would have to compute. The nonce prevents
other output from being read as results; the driver draws it, so that equal calls are equal commands and a rollout can
be replayed. A value's own ``==`` is never called: results are plain JSON, compared outside.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from etude.protocols import ExecResult, Sandbox
from etude.types import Json

CALL_TIMEOUT_S = 2.0
"""Timeout for all calls of one function: hundreds of times the need of a correct program."""
TIMED_OUT, NO_RESULT = "TimeoutError", "SystemExit"
"""Exception names for a call that timed out, or whose process ended without a result."""

DRIVER = """
def drive():
    import json, os, sys
    request = json.load(sys.stdin)
    results = os.dup(1)
    os.dup2(2, 1)
    dumps, write, nonce = json.dumps, os.write, os.urandom(8).hex()
    write(results, f"{nonce}\\n".encode())
    def plain(value):
        kind = type(value)
        if kind is list:
            return all(plain(item) for item in value)
        if kind is dict:
            return all(type(key) is str and plain(item) for key, item in value.items())
        return value is None or kind in (bool, int, float, str)
    def attempt(action):
        try:
            value = action()
            return dumps([True, value] if plain(value) else [False, type(value).__name__])
        except BaseException as error:
            return dumps([False, type(error).__name__])
    def load():
        with open(request["path"], encoding="utf-8") as file:
            exec(compile(file.read(), request["path"], "exec"), names)
        function.append(names[request["function"]])
    names, function = {"__name__": "solution"}, []
    loading = attempt(load)
    for index, arguments in enumerate(request["calls"]):
        outcome = attempt(lambda: function[0](*arguments)) if function else loading
        write(results, f"{nonce} {index} {outcome}\\n".encode())
drive()
"""
"""Program that prints a nonce, then a line per call: the nonce, the call's index, and JSON: true with the plain value
that it returned, or false with a class name.
"""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of one call."""

    ok: bool
    """True if it returned plain JSON (no tuple, no subclass)."""
    value: Json
    """Its return value, if ``ok``."""
    error: str
    """The class of the exception or of the non-JSON value, unless ``ok``; in ASCII, since the program chooses the name.
    """

    @property
    def shown(self) -> str:
        """A short form of the outcome: ``repr`` of the value, or the class."""
        try:
            return repr(self.value) if self.ok else self.error
        except RecursionError as error:  # deeply nested lists
            return type(error).__name__


async def call_function(
    sandbox: Sandbox,
    path: str,
    function: str,
    argument_lists: Sequence[Sequence[Json]],
    timeout_s: float = CALL_TIMEOUT_S,
) -> list[CallOutcome]:
    """Call ``function`` of the file ``path`` once per argument list, in one fresh process; return the outcomes.

    If the program cannot be loaded, every call ends with the exception that it raised.
    Raises :class:`~etude.errors.SandboxError` if the sandbox failed, not the program.
    """
    request = {"path": path, "function": function, "calls": [list(call) for call in argument_lists]}
    result = await sandbox.exec(["python", "-c", DRIVER], stdin=json.dumps(request), timeout_s=timeout_s)
    outcomes = _read_outcomes(result)
    missing = CallOutcome(False, None, TIMED_OUT if result.timed_out else NO_RESULT)
    return [outcomes.get(index, missing) for index in range(len(argument_lists))]


def same_value(got: Json, expected: Json) -> bool:
    """Compare two JSON values; their types must agree throughout: neither ``True`` nor 1.0 equals 1.

    Stricter than ``==``, so that a difference is visible in the text that the agent sees (``= 3.0 want 3``).
    """
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[key], expected[key]) for key in got)
    return type(got) is type(expected) and got == expected


def _read_outcomes(result: ExecResult) -> dict[int, CallOutcome]:
    """Outcome by index of the call; lines that are not the driver's are ignored."""
    outcomes: dict[int, CallOutcome] = {}
    nonce, *lines = result.stdout.split("\n")
    for line in lines:
        if not line.startswith(f"{nonce} "):
            continue
        try:
            _, index, outcome = line.split(" ", 2)
            ok, value = json.loads(outcome)
            outcomes.setdefault(int(index), _outcome(ok is True, value))
        except (ValueError, TypeError, RecursionError):
            continue  # truncated by the output limit, or forged
    return outcomes


def _outcome(ok: bool, value: Json) -> CallOutcome:
    if ok:
        return CallOutcome(True, value, "")
    return CallOutcome(False, None, str(value).encode("ascii", "backslashreplace").decode())
