"""Attacks that run every test honestly, conclude from the results which tests are real, and forge those alone.

Each is tried as it is, hidden in base64, out of a file that is no Python, and through another hook of the runner: what
a program looks like must not matter to a grader.
"""

import base64
from collections.abc import Iterator

from bench.grading.attack import ATTACKS_FOLDER, MODULE, STUB, Attack, beside
from bench.grading.txtar import Archive

PARTS = Archive.read(ATTACKS_FOLDER / "forgers.txtar").files
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
    return f"{PARTS['watch']}\ndef chosen():\n    {choice}\n{PARTS[hook]}"


def _forgers() -> Iterator[Attack]:
    for (name, (what, choice)), subject in zip(CHOICES.items(), ("slugs", "tally", "spans"), strict=True):
        plain = _program(choice, "calls")
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
            files=beside(_program(choice, "reports")),
        )


FORGERS = tuple(_forgers())
"""All of this kind."""
