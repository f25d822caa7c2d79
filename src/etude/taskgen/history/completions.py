"""Memory of a suite in a model: does it finish a hidden test better when it is told where that test stands?

    hidden test ─▶ first half ─┬─ "… of FILE of PROJECT" ─▶ model ─▶ likeness to the second half ─┐
                               └─ "… in Python" ──────────▶ model ─▶ likeness to it ──────────────┴▶ difference

Golchin and Surdeanu's guided and general instructions (arXiv 2308.08493, sections 3.1 and 3.2): a model that has learnt
the file by heart remembers it by its name, one that merely writes good Python finishes both alike. Owns the halves, the
instructions and the likeness, which is ROUGE-L (Lin 2004). Asks no model. Pure.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etude.dashboard.statistics import Estimate, difference_of
from etude.types import Task, TestChecks

LEAST_WORDS = 8
"""A second half with fewer words is likely to be guessed."""
WORD = re.compile(r"\w+|[^\w\s]")
FENCED = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)
"""A reply's code, where it is set off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfTest:
    """A hidden test of a task, cut in two between lines."""

    task_id: str
    template: str
    project: str
    path: str
    first: str
    second: str

    @property
    def instructions(self) -> tuple[str, str]:
        """The guided one, and the general one."""
        place = f"in the file {self.path} of the project {self.project}"
        return (
            f"Here are the first lines of a test {place}. Write its other lines exactly as they stand there, and "
            f"nothing else.\n\n{self.first}",
            f"Here are the first lines of a test in Python. Write its other lines, and nothing else.\n\n{self.first}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedTest:
    """Likeness of a model's completions to the second half of a test, from 0 to 1."""

    task_id: str
    template: str
    guided: float
    general: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """Likeness of all completions."""

    tests: tuple[RememberedTest, ...]
    """Tests, those first by which the guided completion gains most."""
    difference: Estimate
    """Guided less general, paired."""

    @property
    def is_remembered(self) -> bool:
        """True if knowing the place helps more than chance allows."""
        return self.difference.low > 0


def half_tests(tasks: Sequence[Task], project_of: Mapping[str, str]) -> list[HalfTest]:
    """Cut the longest test that each task is about in two; a task whose tests are all short has none.

    ``project_of`` names the project of a task by its id.
    """
    halves: list[HalfTest] = []
    for task in tasks:
        longest = max(_halves(task), key=lambda half: len(half[2]), default=None)
        if longest is not None and len(WORD.findall(longest[2])) >= LEAST_WORDS:
            path, first, second = longest
            halves.append(
                HalfTest(
                    task_id=task.task_id,
                    template=task.template,
                    project=project_of.get(task.task_id, ""),
                    path=path,
                    first=first,
                    second=second,
                )
            )
    return halves


def check_memory(halves: Sequence[HalfTest], replies: Sequence[tuple[str, str]]) -> MemoryCheck:
    """Compare the replies to both instructions of each test. Raises ``ValueError`` without any test."""
    tests = [
        RememberedTest(
            task_id=half.task_id,
            template=half.template,
            guided=rouge_l(_code(guided), half.second),
            general=rouge_l(_code(general), half.second),
        )
        for half, (guided, general) in zip(halves, replies, strict=True)
    ]
    guided, general = [each.guided for each in tests], [each.general for each in tests]
    difference = difference_of(general, guided, [each.template for each in tests])
    tests.sort(key=lambda each: (each.general - each.guided, each.task_id))
    return MemoryCheck(tests=tuple(tests), difference=difference)


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L of two texts, from 0 to 1: the harmonic mean of the shares of their words, and signs, that are in the
    longest common subsequence.
    """
    ours, theirs = WORD.findall(text), WORD.findall(reference)
    lengths = [0] * (len(theirs) + 1)
    for word in ours:
        corner = 0
        for at, other in enumerate(theirs, start=1):
            corner, lengths[at] = lengths[at], corner + 1 if word == other else max(lengths[at], lengths[at - 1])
    return 2 * lengths[-1] / (len(ours) + len(theirs)) if ours and theirs else 0.0


def _halves(task: Task) -> Iterator[tuple[str, str, str]]:
    """Path, first and second half of each test in Python that a task is about."""
    if not isinstance(task.checks, TestChecks):
        return
    for node_id in task.checks.must_pass[: task.checks.about]:
        path, *names = node_id.partition("[")[0].split("::")
        lines = task.checks.files.get(path, "").splitlines()
        test = _function("\n".join(lines), names)
        if test is not None and test.end_lineno is not None:
            middle = (test.body[0].lineno - 1 + test.end_lineno) // 2
            yield path, "\n".join(lines[test.lineno - 1 : middle]), "\n".join(lines[middle : test.end_lineno])


def _function(text: str, names: Sequence[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function of a qualified name; ``None`` where there is none."""
    try:
        node: ast.AST | None = ast.parse(text)
    except SyntaxError:
        return None
    for name in names:
        inner = ast.iter_child_nodes(node) if node is not None else ()
        node = next((each for each in inner if getattr(each, "name", None) == name), None)
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _code(reply: str) -> str:
    fenced = FENCED.search(reply)
    return fenced.group(1) if fenced else reply
