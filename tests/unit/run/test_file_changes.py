"""Changes to files are derived only from what a conversation shows."""

from etude.dashboard.rollouts import ReadLine
from etude.run.file_changes import MOST_COMPARED, MOST_LINES, FileChanges

SOURCE = "def f(x):\n    y = x\n    return y\n"


def drawn(lines: tuple[ReadLine, ...]) -> list[str]:
    return [f"{'' if line.number is None else line.number}{line.mark}{line.text}" for line in lines]


def edit(line: int, text: str) -> dict[str, str]:
    return {"path": "f.py", "line": str(line), "text": text}


def test_edits_of_the_built_in_tools_are_followed_as_they_are_accepted() -> None:
    changes = FileChanges({"f.py": SOURCE})
    _, first = changes.call("edit", edit(2, "    y = x\n    y += 1"), "ok\nThe context is full.")
    assert drawn(first) == ["1 def f(x):", "2-    y = x", "2+    y = x", "3+    y += 1", "4     return y"]
    path, second = changes.call("edit", edit(4, "    return y + 1"), "bad edit")
    assert (path, drawn(second)[-2:]) == ("f.py", ["4-    return y", "4+    return y + 1"])
    (file,) = changes.files()
    assert drawn(file.diff) == ["1 def f(x):", "2     y = x", "3+    y += 1", "4     return y"]


def test_lines_of_a_file_of_the_image_are_known_once_they_were_shown() -> None:
    changes = FileChanges({})
    assert drawn(changes.call("edit", {"path": "g.py", "line": "8", "text": "b"}, "")[1]) == ["8+b"]
    assert changes.call("read", {"path": "g.py", "line": "7"}, "7 before\n8 a\n[cut]") == ("", ())
    assert drawn(changes.call("edit", {"path": "g.py", "line": "8", "text": "b"}, "ok")[1]) == [
        "7 before",
        "8-a",
        "8+b",
    ]


def test_changes_of_other_harnesses_are_known_by_their_arguments() -> None:
    changes = FileChanges({"f.py": SOURCE})
    replaced = {
        "command": "str_replace",
        "path": "f.py",
        "old_str": "    y = x\n    return y",
        "new_str": "    return x",
    }
    assert drawn(changes.call("str_replace_editor", replaced, "")[1]) == [
        "-    y = x",
        "-    return y",
        "+    return x",
    ]
    written = {"file_path": "f.py", "content": "def f(x):\n    return x\n"}
    assert drawn(changes.call("write", written, "")[1])[0] == "1 def f(x):"
    patch = "*** Begin Patch\n*** Update File: f.py\n@@ -1,2 +1,2 @@\n def f(x):\n-    y = x\n+    y = 2\n*** End Patch"
    path, lines = changes.call("apply_patch", {"input": patch}, "")
    assert (path, drawn(lines)) == ("patch", ["1 def f(x):", "-    y = x", "2+    y = 2"])
    assert changes.call("bash", {"command": "sed -i s/x/y/ f.py"}, "") == ("", ())


def test_a_text_of_any_size_makes_a_diff_of_bounded_size() -> None:
    changes = FileChanges({"f.py": "a\n" * (MOST_COMPARED + 1)})
    _, lines = changes.call("write", {"path": "f.py", "content": "b\n" * 200_000}, "")
    assert len(lines) == MOST_LINES
    assert len(changes.call("edit", edit(1, "c\n" * 200_000), "ok")[1]) <= MOST_LINES + 7
