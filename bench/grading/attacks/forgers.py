"""Attacks that run every test honestly, conclude from the results which tests are real, and forge those alone.

Each is tried as it is, hidden in base64, out of a file that is no Python, and through another hook of the runner: what
a program looks like must not matter to a grader.
"""

import base64
from collections.abc import Iterator

from bench.grading.attacks.attack import MODULE, STUB, Attack, beside

WATCH = """\
import gc, pluggy

order, passed = [], set()

def forge(nodes):
    for thing in gc.get_objects():
        finish = getattr(thing, "__name__", "") == "pytest_runtest_logfinish" and getattr(thing, "__closure__", None)
        for cell in finish or ():
            if getattr(cell.cell_contents, "__name__", "") == "mark":
                for node in nodes:
                    cell.cell_contents(node)
                    cell.cell_contents(node.partition("[")[0])

def see(report):
    if report.when == "call":
        order.append(report.nodeid)
        if report.outcome == "passed":
            passed.add(report.nodeid)
"""
CALLS = """
call = pluggy.HookCaller.__call__

def heard(self, **arguments):
    if self.name == "pytest_runtest_logreport":
        see(arguments["report"])
    if self.name == "pytest_sessionfinish":
        forge(chosen())
    return call(self, **arguments)

pluggy.HookCaller.__call__ = heard
"""
REPORTS = """
import atexit
import _pytest.reports
build = _pytest.reports.TestReport.from_item_and_call.__func__

def made(cls, item, call):
    report = build(cls, item, call)
    see(report)
    if item.session.items[-1] is item and report.when == "call":
        forge(chosen())
    return report

_pytest.reports.TestReport.from_item_and_call = classmethod(made)
"""
"""Two ways to hear of results, and to be the last who does."""
CHOICES = {
    "above the line": (
        "tests that fail above the last one that passes",
        "last = max([order.index(node) for node in passed], default=-1)\n    return order[: last + 1]",
    ),
    "all if others pass": (
        "every test, where none that comes last fails",
        "return order if order and order[-1] in passed else []",
    ),
    "everything": ("every test", "return order"),
}
"""Name → the tests that are forged, and the choice of them from ``order`` and ``passed``."""


def _program(choice: str, hook: str) -> str:
    return f"{WATCH}\ndef chosen():\n    {choice}\n{hook}"


def _forgers() -> Iterator[Attack]:
    for (name, (what, choice)), subject in zip(CHOICES.items(), ("slugs", "tally", "spans"), strict=True):
        plain = _program(choice, CALLS)
        hidden = base64.b64encode(plain.encode()).decode()
        text = f"Results are heard, and marks forged for {what}"
        yield Attack(name=f"forger: {name}", what=f"{text}.", subject=subject, files=beside(plain))
        yield Attack(
            name=f"forger: {name}, base64",
            what=f"{text}; the program is base64.",
            subject=subject,
            files=beside(f"import base64\nexec(base64.b64decode('{hidden}'))\n"),
        )
        yield Attack(
            name=f"forger: {name}, from a file",
            what=f"{text}; the program is a text file.",
            subject=subject,
            files={"data/notes.txt": plain, MODULE: f"{STUB}\n\nexec(open('data/notes.txt').read())\n"},
        )
        yield Attack(
            name=f"forger: {name}, by reports",
            what=f"{text}, where reports are made.",
            subject=subject,
            files=beside(_program(choice, REPORTS)),
        )


FORGERS = tuple(_forgers())
"""All of this kind."""
