"""Attacks that run every test honestly, infer from the results which tests are real, and forge only those.

Each is tried in plain text, hidden in base64, in a file that is not Python, and through another hook of the runner: the
looks of a program must not matter to a grader.
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
        text = f"Results are observed and forged for {what}"
        yield Attack(name=f"forger: {name}", what=f"{text}.", subject=subject, files=beside(plain))
        yield Attack(
            name=f"forger: {name}, base64",
            what=f"{text}; the program is base64.",
            subject=subject,
            files=beside(f"import base64\nexec(base64.b64decode('{hidden}'))\n"),
        )
        yield Attack(
            name=f"forger: {name}, from a file",
            what=f"{text}; the program is in a text file.",
            subject=subject,
            files={"data/notes.txt": plain, MODULE: f"{STUB}\n\nexec(open('data/notes.txt').read())\n"},
        )
        yield Attack(
            name=f"forger: {name}, by reports",
            what=f"{text}, in the hook that makes reports.",
            subject=subject,
            files=beside(_program(choice, "reports")),
        )


FORGERS = tuple(_forgers())
"""All attacks of this kind."""
