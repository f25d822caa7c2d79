"""The program that compares mathematical answers: ``python math_worker.py``, a process that can be killed.

    one line of JSON on stdin: [right answer, given answer] ──▶ fork ──▶ math-verify ──▶ one word on stdout

A model's output is hostile input, and math-verify passes it to antlr and sympy, which may compute for ever
(``9^{9^{9^9}}``) or exhaust the memory. So each comparison runs in its own process with hard limits of processor time,
elapsed time and memory. The kernel enforces them even inside C code, and all state ends with the process. sympy parses
numbers with ``eval``: here that accepts only a name, or a constructor with one number.
Imports only the standard library and math-verify; :mod:`etude.rewards.graders.math_checker` is the client.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

CPU_S, LONGEST_S = 3, 60.0
"""Seconds of processor time for one comparison, a thousand times the usual need; and of elapsed time, if it blocks."""
MEMORY_BYTES = 2 << 30
"""Address space of one comparison, including sympy's own modules."""
EVALUATED = re.compile(r"\s*(?:[A-Za-z]\w*|(?:Integer|Float|Rational|Symbol)\s*\(\s*'?[A-Za-z0-9_.+-]*'?\s*\))\s*")
"""All that sympy may evaluate: a name, or one of four constructors with one number or the name of a unit."""
RIGHT, WRONG = 10, 11
"""Exit statuses of a comparison; any other means that it failed to parse or exceeded a limit."""
WORDS = {RIGHT: "right", WRONG: "wrong"}
UNREADABLE = "unreadable"


def main() -> None:
    """Answer requests until stdin ends."""
    sys.dont_write_bytecode = True  # nothing may be written, not even by an import
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    is_equal = load()
    is_equal("x^2+1", "\\frac{2}{4}x+50\\%")  # triggers sympy's lazy imports, so that no comparison has to
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        right, given = json.loads(line)
        os.write(answers, f"{compare(is_equal, right, given)}\n".encode())


def load() -> Callable[[str, str], bool]:
    """The comparison function of math-verify, without unrestricted ``eval``."""
    logging.disable()
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.parsing import sympy_parser

    evaluate = sympy_parser.eval_expr

    def evaluate_constructor(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        if not EVALUATED.fullmatch(code):
            raise ValueError(f"{code[:80]!r} is neither a number nor a name")
        return evaluate(code, local_dict, global_dict)

    sympy_parser.eval_expr = evaluate_constructor
    latex = (LatexExtractionConfig(),)  # the other extractor, of plain expressions, evaluates its matches

    def is_equal(right: str, given: str) -> bool:
        expected, actual = (
            parse(f"${text.replace('$', '')}$", extraction_config=latex, parsing_timeout=None)
            for text in (right, given)
        )
        return bool(verify(expected, actual, timeout_seconds=None))

    return is_equal


def compare(is_equal: Callable[[str, str], bool], right: str, given: str) -> str:
    """The verdict of one comparison, which runs in its own process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            limit()
            status = RIGHT if is_equal(right, given) else WRONG
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return WORDS.get(os.waitstatus_to_exitcode(status), UNREADABLE)


def limit() -> None:
    """Let the kernel kill this process at its limits, and forbid it to write files."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main()
