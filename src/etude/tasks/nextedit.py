"""The next-edit family: after a variable was renamed in real code, complete the next line that uses it.

    [-data-]{+buf+} = self.read()    the prompt: the edit, in the form of ``git diff --word-diff`` …
    if not data:                     … and the next line that contains the variable

    answer if not buf:               a suggestion, accepted if it equals the renamed line, ignoring white space
    submit                           no suggestion: better than a wrong one

The code is the Python standard library: every local variable or parameter of every function, at any two consecutive
lines that contain it. Whole modules are held out, by the same hash as text for mid-training, so that no weight is
trained on held-out lines (the tokenizer may have seen them); held-out lines that also occur in a training module are
left out. The new names are the most frequent names of other variables: a tokenizer with a few hundred words encodes
them in one or two tokens.

Owns the material and the split. Does not grade (:mod:`etude.rewards.graders.functions`) and does not set the cost of a
wrong suggestion, which is in the recipe (``[reward]``).
"""

import ast
import hashlib
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TypeAlias

from etude.config.tasks import NextEditOptions
from etude.protocols import FamilyContext
from etude.tasks.corpora.corpus import STDLIB_CHARACTERS
from etude.tasks.corpora.mixture import Side
from etude.tasks.heldout import HeldoutTasks
from etude.types import AnswerChecks, Split, Task

MODULES = 100
"""Number of standard-library modules to read, in order of their names; parsing them takes a second or two."""
SHORTEST_LINE, LONGEST_LINE = 8, 32
"""Characters of a line, without its indent."""
LONGEST_NAME = 6
"""Characters of a variable's name."""
NEW_NAMES = 100
"""Number of names to choose a new name from."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Variable: TypeAlias = ast.Name | ast.arg


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """A line of code without its indent, and the columns of a variable in it."""

    text: str
    places: tuple[int, ...]
    """Columns, ascending."""

    def renamed(self, old: str, new: str) -> str:
        """The line with another name for its variable."""
        text = self.text
        for place in reversed(self.places):
            text = text[:place] + new + text[place + len(old) :]
        return text


@dataclass(frozen=True, slots=True)
class Site:
    """A variable and two consecutive lines of its function that contain it."""

    name: str
    edited: NumberedLine
    cursor: NumberedLine


@dataclass(frozen=True, slots=True, kw_only=True)
class LineEdit:
    """One next-edit problem: a site and the new name."""

    site: Site
    new: str

    @property
    def prompt(self) -> str:
        """The edit, and the next line that needs it."""
        old, edited = self.site.name, self.site.edited
        return f"{edited.renamed(old, f'[-{old}-]{{+{self.new}+}}')}\n{self.site.cursor.text}"

    @property
    def line(self) -> str:
        """The right replacement of that line."""
        return self.site.cursor.renamed(self.site.name, self.new)


class NextEditFamily:
    """An endless stream of next-edit tasks; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: NextEditOptions, context: FamilyContext) -> "NextEditFamily":
        """The family of a recipe."""
        return cls(seed=context.seed, one_in=context.texts_heldout_every)

    def __init__(self, *, seed: int, one_in: int) -> None:
        """About one in ``one_in`` modules is held out."""
        self._seed = seed
        train, heldout = sites_of(Split.TRAIN, one_in), sites_of(Split.HELDOUT, one_in)
        recorded = set(train)
        self._sites: Mapping[Split, Sequence[Site]] = {
            Split.TRAIN: train,
            Split.HELDOUT: [site for site in heldout if site not in recorded],
        }
        names = Counter(site.name for site in train if len(site.name) > 1)
        self.names: Sequence[str] = [name for name, _ in names.most_common(NEW_NAMES)]
        """New names, for both sides."""
        by_name: defaultdict[str, list[Site]] = defaultdict(list)
        for site in self._sites[Split.HELDOUT]:
            by_name[site.name].append(site)
        self._heldout_tasks = HeldoutTasks(
            sorted(by_name), lambda name, rng: _task(self._renamed(rng.choice(by_name[name]), rng), Split.HELDOUT)
        )

    def size(self, split: Split) -> int | None:
        """None: the supply of tasks is unlimited."""
        return None

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split; deterministic in the seed (training) or fixed (held out)."""
        if split is Split.HELDOUT:
            return self._heldout_tasks.task(index)
        return _task(self.edit(split, Random(f"nextedit|{self._seed}|{split}|{index}")), split)

    def edit(self, split: Split, rng: Random) -> LineEdit:
        """Draw a site, and a name that neither of its lines contains."""
        return self._renamed(rng.choice(self._sites[split]), rng)

    def _renamed(self, site: Site, rng: Random) -> LineEdit:
        taken = set(re.findall(r"\w+", f"{site.edited.text} {site.cursor.text}"))
        return LineEdit(site=site, new=rng.choice([name for name in self.names if name not in taken]))


def _task(edit: LineEdit, split: Split) -> Task:
    return Task(
        task_id=hashlib.sha256(edit.prompt.encode()).hexdigest()[:16],
        family="nextedit",
        template=edit.site.name,
        split=split,
        prompt=edit.prompt,
        files={},
        checks=AnswerChecks(answer=edit.line),
    )


@cache
def sites_of(split: Split, one_in: int) -> tuple[Site, ...]:
    """The sites of the modules of one side, in order, without duplicates."""
    side = Side(split=split, seed=0, one_in=one_in)
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in _modules())
    chosen = (text for text in texts if side.has(text[:STDLIB_CHARACTERS].encode()))
    return tuple(dict.fromkeys(site for text in chosen for site in sites(text)))


def sites(source: str) -> Iterator[Site]:
    """Every site of a module, in the order of its functions."""
    lines = source.split("\n")
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))
    variables = (pair for function in functions for pair in sorted(_variables(function).items()))
    for name, places in variables:
        for numbers in pairwise(sorted(places)):
            edited, cursor = (_line(lines[number - 1], name, places[number]) for number in numbers)
            if edited is not None and cursor is not None:
                yield Site(name, edited, cursor)


def _variables(function: Function) -> Mapping[str, Mapping[int, set[int]]]:
    """Local names of a function → line → columns where they occur."""
    nodes = [node for node in ast.walk(function) if isinstance(node, Variable)]
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    bound = {_name(node) for node in nodes if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)} - shared
    chosen = {name for name in bound - {"self", "cls"} if len(name) <= LONGEST_NAME}
    columns: dict[str, defaultdict[int, set[int]]] = {name: defaultdict(set) for name in chosen}
    for node in nodes:
        if _name(node) in columns:
            columns[_name(node)][node.lineno].add(node.col_offset)
    return columns


def _name(node: Variable) -> str:
    return node.arg if isinstance(node, ast.arg) else node.id


def _line(whole: str, name: str, columns: set[int]) -> NumberedLine | None:
    """A line that contains a variable; ``None`` if its length is wrong or the name also occurs as another word."""
    text = whole.strip()
    indent = len(whole) - len(whole.lstrip())
    if not (SHORTEST_LINE <= len(text) <= LONGEST_LINE and text.isascii()):
        return None
    places = tuple(sorted(column - indent for column in columns))
    output = tuple(match.start() for match in re.finditer(rf"\b{re.escape(name)}\b", text))
    return NumberedLine(text, places) if places == output else None


def _modules() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(folder.glob("*.py"))[:MODULES]
