"""Short Python functions and every plausible way to get their decisive line wrong.

A *template* is an abstract problem (``comp|at least k|double x|sum``): a specification and its one right program. A
*naming* fills in variable names. Each :class:`ProgramKind` lists its templates and namings and writes a program for any
pair, so that the whole space can be enumerated and held out exactly (:mod:`etude.tasks.bugfix`).

Owns source text only; nothing is executed here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from random import Random

from etude.types import Json

Naming = Mapping[str, str]
"""Placeholder → variable name."""
Parts = tuple[str, ...]
"""The choices that make up one template of a kind."""
Lines = tuple[str, ...]
"""A program, line by line, without line ends."""

FUNCTION_NAMES = ("total", "score", "tally", "calc", "work", "pick", "fold", "gain")

FILE_NAMES = ("util.py", "core.py", "main.py", "lib.py", "app.py", "tool.py")
FOLDERS = ("api", "auth", "data", "jobs", "mail", "shop", "test", "web")
PATHS = tuple(f"{folder}/{name}" for folder in FOLDERS for name in FILE_NAMES)
"""Paths of the files of a task with several files: too many to guess one."""
LABELS = (
    *("ant", "ape", "bat", "bee", "cat", "cow", "dog", "eel", "elk", "emu", "fox", "hen", "hog", "owl", "pig", "ram"),
    *("ash", "elm", "fig", "fir", "hay", "ivy", "nut", "oak", "pea", "rye", "gem", "ink", "jug", "key", "pan", "urn"),
)
"""Words that a right line may return in addition to its value."""

CONDITIONS = {
    "greater than {k}": "{x} > {k}",
    "less than {k}": "{x} < {k}",
    "at least {k}": "{x} >= {k}",
    "at most {k}": "{x} <= {k}",
    "equal to {k}": "{x} == {k}",
    "not equal to {k}": "{x} != {k}",
    "even": "{x} % 2 == 0",
    "odd": "{x} % 2 == 1",
    "divisible by 3": "{x} % 3 == 0",
    "positive": "{x} > 0",
    "negative": "{x} < 0",
}
EXPRESSIONS = {
    "{x}": "{x}",
    "{x} times {k}": "{x} * {k}",
    "{x} plus {k}": "{x} + {k}",
    "{x} minus {k}": "{x} - {k}",
    "{k} minus {x}": "{k} - {x}",
    "{x} squared": "{x} * {x}",
    "double {x}": "{x} * 2",
    "absolute {x}": "abs({x})",
    "{x} plus one": "{x} + 1",
}
COMPREHENSIONS = {
    "sum": "sum({e} for {{x}} in {{xs}} if {c})",
    "list": "[{e} for {{x}} in {{xs}} if {c}]",
    "largest": "max([{e} for {{x}} in {{xs}} if {c}], default=0)",
    "smallest": "min([{e} for {{x}} in {{xs}} if {c}], default=0)",
}
ACCUMULATORS = {
    "sum": ("0", "{{t}} += {e} if {c} else 0"),
    "product": ("1", "{{t}} *= {e} if {c} else 1"),
    "list": ("[]", "{{t}} += [{e}] if {c} else []"),
}
OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
SLICES = {
    "first {n}": "{s}[:{n}]",
    "last {n}": "{s}[-{n}:]",
    "all but first {n}": "{s}[{n}:]",
    "all but last {n}": "{s}[:-{n}]",
    "every second": "{s}[::2]",
    "all but ends": "{s}[1:-1]",
}
ENDINGS = {
    "": "",
    "upper case": ".upper()",
    "lower case": ".lower()",
    "swapped case": ".swapcase()",
    "reversed": "[::-1]",
    "twice": " * 2",
    "title case": ".title()",
}
RANGES = {
    "up to and including {b}": "range({a}, {b} + 1)",
    "up to but not {b}": "range({a}, {b})",
    "after {a} up to {b}": "range({a} + 1, {b} + 1)",
}
RANGE_AGGREGATES = {"sum": "sum({e} for {{x}} in {r})", "list": "[{e} for {{x}} in {r}]"}
RANGE_EXPRESSIONS = {spec: code for spec, code in EXPRESSIONS.items() if "{k}" not in spec}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramKind:
    """A family of templates that share a shape."""

    name: str
    choices: tuple[Parts, ...]
    """Values of each part of a template; templates are all combinations."""
    namings: tuple[Naming, ...]
    write: Callable[[Parts, Naming], Lines]
    """The right program of a template; its function is called ``{f}``."""
    answer: int
    """Index of the one line that depends on the whole template; bugs are planted there."""
    arguments: Callable[[Random], tuple[Json, ...]]
    """Random arguments of a call."""

    @property
    def templates(self) -> tuple[Parts, ...]:
        """Every template, in a fixed order."""
        return tuple(product(*self.choices))

    def title(self, parts: Parts) -> str:
        """A template as one string, e.g. ``comp|at least {k}|double {x}|sum``."""
        return "|".join((self.name, *parts))

    def program(self, parts: Parts, naming: Naming, function: str) -> Lines:
        """The right program of a template, whose function is called ``function``."""
        return tuple(line.format(f=function) for line in self.write(parts, naming))

    def answer_line(self, parts: Parts, naming: Naming) -> str:
        """The line at index ``answer`` of a right program, indented."""
        return self.write(parts, naming)[self.answer]

    def mistakes(self, parts: Parts, naming: Naming) -> list[str]:
        """Wrong answer lines, each one choice away from the right one, like the mistakes of a person."""
        right = self.answer_line(parts, naming)
        lines = (self.answer_line(other, naming) for other in _one_part_away(parts, self.choices))
        return sorted({line for line in lines if line != right})


def with_label(line: str, label: str) -> str:
    """An answer line that also returns a label: ``return [a + b, 'elm']``."""
    before, value = line.split("return ", 1)
    return f"{before}return [{value}, '{label}']"


def _one_part_away(parts: Parts, choices: tuple[Parts, ...]) -> Iterator[Parts]:
    for place, options in enumerate(choices):
        for option in options:
            if option != parts[place]:
                yield (*parts[:place], option, *parts[place + 1 :])


def _namings(**names: Sequence[str]) -> tuple[Naming, ...]:
    return tuple(dict(zip(names, choice, strict=True)) for choice in product(*names.values()))


def _write_arith(parts: Parts, naming: Naming) -> Lines:
    first, second, order = parts
    p, q, r = (naming[place] for place in order)
    return (
        f"def {{f}}({naming['0']}, {naming['1']}, {naming['2']}):",
        f"    # {p} {first} {q}, then {second} {r}",
        f"    return ({p} {OPERATORS[first]} {q}) {OPERATORS[second]} {r}",
    )


def _write_slice(parts: Parts, naming: Naming) -> Lines:
    part, ending = parts
    spec = f"{part} of {{s}}" + (f", {ending}" if ending else "")
    lines = "def {{f}}({s}, {n}):", f"    # {spec}", f"    return {SLICES[part]}{ENDINGS[ending]}"
    return tuple(line.format(**naming) for line in lines)


def _write_comp(parts: Parts, naming: Naming) -> Lines:
    condition, expression, aggregate = parts
    body = COMPREHENSIONS[aggregate].format(e=EXPRESSIONS[expression], c=CONDITIONS[condition])
    spec = f"    # {aggregate} of {expression} where {{x}} is {condition}"
    return tuple(line.format(**naming) for line in ("def {{f}}({xs}, {k}):", spec, f"    return {body}"))


def _write_loop(parts: Parts, naming: Naming) -> Lines:
    condition, expression, aggregate = parts
    start, update = ACCUMULATORS[aggregate]
    lines = (
        "def {{f}}({xs}, {k}):",
        f"    # {aggregate} of {expression} where {{x}} is {condition}",
        f"    {{t}} = {start}",
        "    for {x} in {xs}:",
        f"        {update.format(e=EXPRESSIONS[expression], c=CONDITIONS[condition])}",
        "    return {t}",
    )
    return tuple(line.format(**naming) for line in lines)


def _write_range(parts: Parts, naming: Naming) -> Lines:
    span, expression, aggregate = parts
    lines = (
        "def {{f}}({a}, {b}):",
        f"    # {aggregate} of {expression} for {{x}} from {{a}} {span}",
        f"    return {RANGE_AGGREGATES[aggregate].format(e=RANGE_EXPRESSIONS[expression], r=RANGES[span])}",
    )
    return tuple(line.format(**naming) for line in lines)


def _three_numbers(rng: Random) -> tuple[Json, ...]:
    return tuple(rng.randint(-9, 20) for _ in range(3))


def _text_and_count(rng: Random) -> tuple[Json, ...]:
    return "".join(rng.choice("abcDEFgh") for _ in range(rng.randint(5, 8))), rng.randint(1, 3)


def _list_and_number(rng: Random) -> tuple[Json, ...]:
    numbers: list[Json] = [rng.randint(-9, 12) for _ in range(rng.randint(3, 6))]
    return numbers, rng.randint(-3, 6)


def _two_ends(rng: Random) -> tuple[Json, ...]:
    low = rng.randint(-4, 6)
    return low, low + rng.randint(2, 7)


_LISTS = {"xs": ("xs", "nums", "data", "items", "rows"), "k": ("k", "n", "m", "y", "z", "h"), "x": ("x", "v", "e")}
"""Names in programs about lists: with two names a small model learns to guess, with six to copy the one it has read."""

KINDS: dict[str, ProgramKind] = {
    kind.name: kind
    for kind in (
        ProgramKind(
            name="arith",  # return (a + b) * c
            choices=(tuple(OPERATORS), tuple(OPERATORS), tuple("".join(order) for order in permutations("012"))),
            namings=tuple({"0": a, "1": b, "2": c} for a, b, c in combinations("abcpq", 3)),
            write=_write_arith,
            answer=2,
            arguments=_three_numbers,
        ),
        ProgramKind(
            name="slice",  # return s[-n:].upper()
            choices=(tuple(SLICES), tuple(ENDINGS)),
            namings=_namings(s=("s", "w", "text"), n=("n", "k")),
            write=_write_slice,
            answer=2,
            arguments=_text_and_count,
        ),
        ProgramKind(
            name="comp",  # return sum(x * 2 for x in xs if x >= k)
            choices=(tuple(CONDITIONS), tuple(EXPRESSIONS), tuple(COMPREHENSIONS)),
            namings=_namings(**_LISTS),
            write=_write_comp,
            answer=2,
            arguments=_list_and_number,
        ),
        ProgramKind(
            name="loop",  # t += x * 2 if x >= k else 0
            choices=(tuple(CONDITIONS), tuple(EXPRESSIONS), tuple(ACCUMULATORS)),
            namings=_namings(**_LISTS, t=("t", "acc", "res")),
            write=_write_loop,
            answer=4,
            arguments=_list_and_number,
        ),
        ProgramKind(
            name="range",  # return sum(i * 2 for i in range(a, b + 1))
            choices=(tuple(RANGES), tuple(RANGE_EXPRESSIONS), tuple(RANGE_AGGREGATES)),
            namings=_namings(a=("a", "lo"), b=("b", "hi"), x=("i", "j")),
            write=_write_range,
            answer=2,
            arguments=_two_ends,
        ),
    )
}
"""Every kind by name."""
