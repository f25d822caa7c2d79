"""Tests that speak of a name: those with the name among the words of their function, or of their class's name.

Only they can tell whether a slice of a release was made, so only they are run for it. Pure.
"""

import ast
import re
from collections.abc import Collection, Mapping
from functools import lru_cache

from etude.taskgen.hiding import place_of

WORD = re.compile(r"\w+")
MODULES = 256
"""Modules whose words are kept: a test module is asked for each of its tests, and may take a second to parse."""


def is_named(texts: Mapping[str, str], test: str, name: str) -> bool:
    """Return whether a test, by its node id, speaks of a name; without a name all of them do."""
    path, function = place_of(test)
    *classes, last = function.split(".")
    return not name or name in classes or name in words_of_functions(texts.get(path, "")).get(last, ())


def functions_naming(text: str, names: Collection[str]) -> list[str]:
    """The functions of a test module that speak of one of some names, and the classes that have one."""
    words = words_of_functions(text)
    classes = {name for name in names if re.search(rf"^\s*class {re.escape(name)}\b", text, re.MULTILINE)}
    return sorted({function for function, each in words.items() if not each.isdisjoint(names)} | classes)


@lru_cache(maxsize=MODULES)
def words_of_functions(text: str) -> Mapping[str, frozenset[str]]:
    """The words in each function of a module, by its own name; those of one name together. Empty for no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    lines, words = text.splitlines(), dict[str, frozenset[str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside = frozenset(WORD.findall("\n".join(lines[node.lineno - 1 : node.end_lineno])))
            words[node.name] = words.get(node.name, frozenset()) | inside
    return words
