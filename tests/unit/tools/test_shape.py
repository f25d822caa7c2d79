"""Every house rule fires on a small offender and stays silent on its nearest innocent neighbour."""

import subprocess
import sys
from pathlib import Path

import pytest

import shape

REPOSITORY = Path(__file__).parents[3]
PRODUCT = "src/etude/stage/thing.py"


def lines(count: int, indent: str = "") -> str:
    return f"{indent}x = 1\n" * count


def function_of(count: int) -> str:
    return "def f():\n" + lines(count - 1, "    ")


def class_of(count: int) -> str:
    return "class C:\n" + lines(count - 1, "    ")


def class_with(methods: int) -> str:
    return "class C:\n    def __init__(self): ...\n" + "".join(f"    def _m{i}(self): ...\n" for i in range(methods))


def nested(depth: int, innermost: str = "pass") -> str:
    return "".join(f"{' ' * level}if x:\n" for level in range(depth)) + " " * depth + innermost + "\n"


def rules(text: str, path: str = "tests/unit/test_thing.py") -> dict[str, int]:
    """Rule → line of its first fault. Tests are spared the docstring rules, so that snippets can be short."""
    return {result.rule: result.fault.line for result in reversed(shape.inspect(path, text))}


OFFENDERS = [
    ("long-file", lines(601), 1),
    ("file-lines", lines(901), 1),
    ("function-lines", "\n" + function_of(101), 2),
    ("function-lines", "class C:\n    async def m(self):\n" + lines(100, " " * 8), 2),
    ("class-lines", class_of(401), 1),
    ("class-methods", class_with(21), 1),
    ("nesting", nested(5), 5),
    (
        "nesting",
        "def f():\n def g():\n  for a in b:\n   with c:\n    try:\n     while d:\n      pass\n    finally: pass",
        6,
    ),
    ("hasattr", "y = 1\nx = hasattr(y, 'z')", 2),
    ("global", "def f():\n    global x\n    x = 1", 2),
    ("mutable-global", "cache = {}", 1),
    ("mutable-global", "cache: dict[str, int] = dict()", 1),
    ("mutable-global", "import collections\n_queue = collections.deque()", 2),
    ("mutable-global", "SEEN = set()\ndef f(x):\n    SEEN.add(x)", 1),
    ("mutable-global", "TABLE = {}\ndef f(x):\n    TABLE[x] = 1", 1),
    ("mutable-global", "NAMES = []\nNAMES += [1]", 1),
    ("broad-except", "try:\n    f()\nexcept:\n    pass", 3),
    ("broad-except", "try:\n    f()\nexcept Exception:\n    pass", 3),
    ("broad-except", "try:\n    f()\nexcept (OSError, BaseException) as e:\n    print(e)", 3),
    ("broad-except", "try:\n    f()\nexcept Exception as e:\n    raise ValueError from e", 3),
    ("broad-except", "import contextlib\nwith contextlib.suppress(Exception):\n    f()", 2),
    ("suppressed-cancellation", "with suppress(OSError, asyncio.CancelledError):\n    await task", 1),
    ("unfinished", "x = 1  # TODO: more", 1),
    ("unfinished", "x = 1\n# FIXME\n", 2),
    ("syntax", "x = 1\ndef", 2),
]

INNOCENTS = [
    ("long-file", lines(600)),
    ("file-lines", lines(900)),
    ("function-lines", "@mark\n" + function_of(100)),
    ("class-lines", class_of(400)),
    ("class-methods", class_with(20)),
    ("nesting", nested(4)),
    ("nesting", nested(4, "x") + "if x: pass\n" + "elif x: pass\n" * 9),
    ("mutable-global", "__all__ = ['f']\nTABLE = {'a': 1}\ndef f():\n    local = []\n    local.append(TABLE['a'])"),
    ("broad-except", "try:\n    f()\nexcept ValueError:\n    pass"),
    ("broad-except", "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
    ("unfinished", "x = 'the agent wrote: # TODO'"),
]


@pytest.mark.parametrize(("rule", "text", "line"), OFFENDERS)
def test_an_offender_is_found_at_its_line(rule: str, text: str, line: int) -> None:
    assert rules(text).get(rule) == line


@pytest.mark.parametrize(("rule", "text"), INNOCENTS)
def test_an_innocent_neighbour_is_left_alone(rule: str, text: str) -> None:
    assert rule not in rules(text)


def test_a_long_file_is_only_warned_about() -> None:
    (finding,) = shape.inspect("tests/test_x.py", lines(601))
    assert finding.is_warning
    assert str(finding) == "tests/test_x.py:1: warning: long-file: 601 lines, typically at most 600"


def test_the_package_may_have_six_parameters_besides_self() -> None:
    six = "class C:\n    def _m(self, a, b, /, c, *d, e, **f): ...\n"
    assert "parameters" not in rules(six, PRODUCT)
    seven = six.replace("e,", "e, g,")
    assert rules(seven, PRODUCT)["parameters"] == 2
    assert "parameters" not in rules(seven), "tests may"
    fields = "@dataclass(kw_only=True)\nclass C:\n" + "".join(f"    field_{i}: int\n" for i in range(9))
    assert "parameters" not in rules(fields, PRODUCT)


def test_docstrings_are_asked_of_modules_and_public_names() -> None:
    text = "def _private(): ...\n\n\ndef public(): ...\n\n\nclass C:\n    '''Doc.'''\n    def method(self): ...\n"
    result = [str(finding) for finding in shape.inspect(PRODUCT, text)]
    assert result == [
        f"{PRODUCT}:1: module-docstring: no docstring: say what the module owns and what it does not",
        f"{PRODUCT}:4: public-docstring: public has no docstring: first line a full sentence",
        f"{PRODUCT}:9: public-docstring: method has no docstring: first line a full sentence",
    ]
    assert rules(text) == {}, "tests are described by their names"


def test_an_overriding_method_inherits_its_docstring() -> None:
    text = "'''Doc.'''\nclass C(B):\n    '''Doc.'''\n    @override\n    def method(self): ...\n"
    assert rules(text, PRODUCT) == {}


@pytest.mark.parametrize("path", ["src/etude/utils.py", "src/etude/common/nouns.py", "tests/helpers.py"])
def test_vague_names_are_refused(path: str) -> None:
    assert rules("'''Doc.'''", path) == {"vague-name": 1}


def test_packages_export_nothing_but_the_top_one() -> None:
    assert rules("'''Doc.'''\n", "src/etude/stage/__init__.py") == {"init-content": 1}
    assert rules("", "src/etude/stage/__init__.py") == {}
    assert rules("'''Doc.'''\n", "src/etude/__init__.py") == {}


def test_the_allow_list_covers_whole_files() -> None:
    allowed = next(iter(shape.BROAD_EXCEPT_ALLOWED))
    assert rules("'''Doc.'''\ntry:\n    f()\nexcept Exception:\n    pass", allowed) == {}


def test_every_allowance_gives_a_reason_and_is_needed() -> None:
    for path, reason in shape.BROAD_EXCEPT_ALLOWED.items():
        assert len(reason) > 20, path
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        assert "except Exception" in text or "except BaseException" in text, f"{path} no longer needs it"


def test_every_rule_has_an_offender_here() -> None:
    elsewhere = {"parameters", "module-docstring", "public-docstring", "vague-name", "init-content"}
    assert {rule for rule, _, _ in OFFENDERS} | elsewhere == {*shape.RULES, "syntax"}


def test_the_command_prints_faults_and_fails(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("'''Doc.'''\n")
    outcome = subprocess.run(
        [sys.executable, REPOSITORY / "tools/shape.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 1
    assert outcome.stdout.splitlines() == [
        f"{tmp_path}/utils.py:1: vague-name: 'utils' says nothing of what is inside: name it after the noun it owns",
        "1 files, 1 faults, 0 warnings",
    ]


def test_the_gate_passes_its_own_rules() -> None:
    path = REPOSITORY / "tools/shape.py"
    assert shape.inspect("tools/shape.py", path.read_text(encoding="utf-8")) == []
