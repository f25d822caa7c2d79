"""Literals that look like another one and are not equal to it: what canaries expect instead of the right answer. Pure.

A changed literal keeps the type and the shape of the first (a digit stays a digit, a list keeps its length), since one
that looks out of place could be told from the real ones by the code under test. Every part of it is changed: what is
compared may honestly not care about one (versions are equal whatever their build is called).
"""

import ast
import math
import random
import re
import string
from typing import TypeAlias

Constant: TypeAlias = bool | int | float | str | bytes | None

WORD = re.compile(r"[A-Za-z0-9]+")
"""Parts of a text; each gets one other letter."""


def is_literal(node: ast.expr) -> bool:
    """Whether an expression is made of constants alone, and of kinds that can be changed."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int | float | str | bytes | None)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and is_number(node.operand)
    if isinstance(node, ast.Dict):
        return all(key is not None and is_literal(key) for key in node.keys) and all(map(is_literal, node.values))
    return isinstance(node, ast.List | ast.Tuple | ast.Set) and all(map(is_literal, node.elts))


def is_number(node: ast.expr) -> bool:
    """Whether an expression is an int or a float, written out."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def changed_literal(text: str, rng: random.Random) -> str | None:
    """The source of another literal, or ``None`` where chance made an equal one (of ``{1, 2}``, say).

    ``text`` is the source of one that :func:`is_literal` holds for.
    """
    tree = ast.parse(f"({text}\n)", mode="eval")
    value = ast.literal_eval(tree)
    changed = ast.unparse(_Changing(rng).visit(tree))
    return None if ast.literal_eval(changed) == value else changed


def changed_constant(value: Constant, rng: random.Random) -> Constant:
    """Another value of the same type, far enough from a number to be told from it with any usual tolerance."""
    if value is None:
        return 0
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1)) * rng.randint(abs(value) // 10 + 1, abs(value) // 3 + 9)
    if isinstance(value, float):
        return _changed_float(value, rng)
    if isinstance(value, bytes):
        return _changed_text(value.decode("latin-1"), rng).encode("latin-1")
    return _changed_text(value, rng)


def _changed_float(value: float, rng: random.Random) -> float:
    if not math.isfinite(value):
        return float(rng.randint(1, 99))
    size = abs(value) or 1.0
    changed = float(f"{value + rng.choice((-1, 1)) * rng.uniform(0.3, 0.9) * size:.4g}")
    return changed if math.isfinite(changed) and changed != value else value / 2 or 1.0


def _changed_text(text: str, rng: random.Random) -> str:
    """One letter or digit of each word is another, and not only in its case."""
    changed = WORD.sub(lambda word: _changed_word(word[0], rng), text)
    return changed if changed != text else text + rng.choice(string.ascii_lowercase)


def _changed_word(word: str, rng: random.Random) -> str:
    place = rng.randrange(len(word))
    kinds = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    others = next(kind for kind in kinds if word[place] in kind).replace(word[place], "")
    return word[:place] + rng.choice(others) + word[place + 1 :]


class _Changing(ast.NodeTransformer):
    """Changes every constant but the keys of dictionaries, and puts a 0 into what is empty."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def visit(self, node: ast.AST) -> ast.AST:
        """Another literal for the one that ``node`` is."""
        if isinstance(node, ast.Constant | ast.UnaryOp):
            value: Constant = ast.literal_eval(node)
            return ast.parse(repr(changed_constant(value, self._rng)), mode="eval").body
        if isinstance(node, ast.Dict):
            values = [changed for old in node.values if isinstance(changed := self.visit(old), ast.expr)]
            return ast.Dict(node.keys or [ast.Constant(0)], values or [ast.Constant(0)])
        if isinstance(node, ast.List | ast.Tuple) and not node.elts:
            node.elts = [ast.Constant(0)]
            return node
        return self.generic_visit(node)
