"""Code that a deletion removes, and code that stays."""

import ast

from etude.taskgen.deletions import body_deletions, class_deletions, signature, whole_deletions
from etude.tasks.repositories.spans import SourceText

MODULE = '''"""A module."""

__all__ = ["double_all", "Stack"]


@deco(1)
def double_all(values: list[int], *, by: dict = {1: 2}) -> dict[str, int]:
    # what comes first
    """Double them."""
    # the trick
    result = []
    for value in values:
        result.append(value * 2)  # twice
    return result
    # the end


class Stack:
    """A stack."""

    def __init__(self):
        self.items = []
        self.count = 0
        self.top = None

    def push(self, item):
        """Put one on."""
        self.items.append(item)
        self.count += 1
        return self.count
'''


def test_a_body_goes_with_its_comments_and_the_docstring_stays() -> None:
    deletions = {deletion.target: deletion for deletion in body_deletions(SourceText("m.py", MODULE))}
    text = deletions["double_all"].changed["m.py"]
    assert deletions.keys() == {"double_all", "Stack.__init__", "Stack.push"}
    assert deletions["double_all"].lines == (6,)
    assert '    """Double them."""\n    raise NotImplementedError\n\n\nclass Stack' in text
    assert "trick" not in text
    assert "the end" not in text
    assert "result" not in text
    assert "# the trick" in deletions["double_all"].bodies[0]


def test_a_class_loses_the_bodies_of_all_its_methods() -> None:
    (deletion,) = class_deletions(SourceText("m.py", MODULE))
    text = deletion.changed["m.py"]
    assert deletion.target == "Stack"
    assert text.count("raise NotImplementedError") == 2
    assert '"""Put one on."""' in text
    assert "self.items" not in text


def test_a_whole_function_goes_with_its_exports_and_mentions() -> None:
    source = SourceText("pkg/m.py", MODULE)
    init = SourceText(
        "pkg/init.py", "from .m import (\n    Stack as S,\n    double_all,\n)\nfrom .m import double_all\n"
    )
    stub = SourceText(
        "pkg/m.pyi", "def double_all(\n    values: list[int],\n) -> dict[str, int]: ...\nclass Stack: ...\n"
    )
    documents = {"README.md": "# Title\n\nUse double_all.\nOr Stack.\n", "other.md": "nothing"}
    package = {file.path: file for file in (source, init, stub)}
    (deletion,) = whole_deletions(source, package, documents)
    assert deletion.gone == "double_all"
    assert deletion.changed.keys() == {"pkg/m.py", "pkg/init.py", "pkg/m.pyi", "README.md"}
    assert not any("double_all" in text for text in deletion.changed.values())
    assert all(ast.parse(text) for path, text in deletion.changed.items() if not path.endswith(".md"))
    assert "Stack as S" in deletion.changed["pkg/init.py"]
    assert '__all__ = ["Stack"]' in deletion.changed["pkg/m.py"]
    assert deletion.changed["README.md"] == "# Title\n\nOr Stack.\n"


def test_a_function_that_is_used_or_mentioned_where_nothing_can_be_changed_is_not_deleted_whole() -> None:
    source = SourceText("pkg/m.py", MODULE)
    user = SourceText("pkg/user.py", "from .m import double_all\nprint(double_all([1]))\n")
    assert not list(whole_deletions(source, {"pkg/m.py": source, "pkg/user.py": user}, {}))
    assert not list(whole_deletions(source, {"pkg/m.py": source}, {}, ['script = "pkg:double_all"']))


def test_a_signature_is_as_it_was_written() -> None:
    function = next(SourceText("m.py", MODULE).functions())
    assert signature(SourceText("m.py", MODULE), function) == (
        "@deco(1)\ndef double_all(values: list[int], *, by: dict = {1: 2}) -> dict[str, int]:"
    )


def test_bodies_that_are_not_worth_it_are_left() -> None:
    text = (
        "def small(): return 1\n\n\n@overload\ndef f(a):\n    'What it does.'\n    a = 1\n    a = 2\n    return a\n"
        "def undescribed(a):\n    a = 1\n    a = 2\n    return a\n"
    )
    assert not list(body_deletions(SourceText("m.py", text)))


def test_windows_line_ends_are_kept() -> None:
    text = "def f(a):\r\n    'Gives what it is given.'\r\n    a = 1\r\n    a = 2\r\n    return a\r\nx = 1\r\n"
    (deletion,) = body_deletions(SourceText("m.py", text))
    assert (
        deletion.changed["m.py"]
        == "def f(a):\r\n    'Gives what it is given.'\r\n    raise NotImplementedError\r\nx = 1\r\n"
    )
