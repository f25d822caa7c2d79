"""File changes requested by a rollout's calls, as lines for display. Pure functions.

    task's files, `read` outputs ──▶ known lines ──edit──▶ diff of the call ──accepted──▶ known lines, diff of the file

Nothing is executed again: a line is known from the task or because the model has seen it. This module understands the
built-in tools and, by argument names, the usual tools of other harnesses: an old and a new text, a whole file, a patch.
Changes by shell commands are unknown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from etude.dashboard.rollouts import ChangedFile, ReadLine
from etude.harnesses import tools

AROUND = 3
"""Unchanged lines shown before and after a change."""
MOST_COMPARED = 4_000
"""Maximum lines of the longer text for a comparison line by line; above, the new text replaces the old one."""
MOST_LINES = 2_000
"""Maximum lines of a diff."""
NUMBERED = re.compile(r"(\d{1,7}) (.*)")
PATHS = ("path", "file_path", "filename", "file")
REPLACEMENTS = (("old_str", "new_str"), ("old_string", "new_string"), ("old_text", "new_text"), ("search", "replace"))
CONTENTS = ("file_text", "content", "contents")
"""Argument names of a whole file in other harnesses."""
PATCH = re.compile(r"^(\*\*\* Begin Patch|diff --git |@@ )", re.MULTILINE)
HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)")
HEADERS = ("diff --git ", "index ", "--- ", "+++ ", "*** ")
"""Prefixes of patch lines that are not file content."""

Change = tuple[str, tuple[ReadLine, ...]]
"""A path and the change to it; both are empty if there is none."""
NOTHING: Change = ("", ())


class FileChanges:
    """Follows the files of one rollout, call by call, in the order of its turns."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._before = dict(files)
        self._lines = {path: dict(enumerate(_split(text), start=1)) for path, text in files.items()}

    def call(self, tool: str, arguments: Mapping[str, str], output: str) -> Change:
        """The change requested by a call; its ``output`` shows whether it was executed."""
        path = next((arguments[name] for name in PATHS if name in arguments), "")
        if tool == tools.READ and path:
            self._show(path, output)
            return NOTHING
        if tool == tools.EDIT and path and arguments.get("line", "").isdecimal() and "text" in arguments:
            return path, self._edit(path, int(arguments["line"]), _split(arguments["text"]), output)
        for old, new in REPLACEMENTS:
            if path and new in arguments and old in arguments:
                return path, tuple(_difference(_split(arguments[old]), _split(arguments[new]), None))
        whole = next((arguments[name] for name in CONTENTS if name in arguments), None)
        if path and whole is not None:
            line_texts = self._lines.get(path, {})
            diff = tuple(_difference([line_texts[number] for number in sorted(line_texts)], _split(whole), 1))
            self._lines[path] = dict(enumerate(_split(whole), start=1))
            return path, diff
        patch = next((text for text in arguments.values() if PATCH.search(text)), "")
        return (path or "patch", tuple(_patch_lines(patch))) if patch else NOTHING

    def files(self) -> tuple[ChangedFile, ...]:
        """The task's files with all executed changes."""
        return tuple(ChangedFile(path=path, before=text, diff=self._whole(path)) for path, text in self._before.items())

    def _show(self, path: str, output: str) -> None:
        """Record numbered lines of a file that the model has seen."""
        line_texts = self._lines.setdefault(path, {})
        for line in output.split("\n"):
            match = NUMBERED.fullmatch(line)
            if match is None:
                break
            line_texts[int(match[1])] = match[2]

    def _edit(self, path: str, line: int, new: Sequence[str], output: str) -> tuple[ReadLine, ...]:
        """Replace one line by ``new`` lines."""
        line_texts = self._lines.setdefault(path, {})
        before = [_line(" ", n, line_texts[n]) for n in range(line - AROUND, line) if n in line_texts]
        removed = [_line("-", line, line_texts[line])] if line in line_texts else []
        added = [_line("+", line + n, text) for n, text in enumerate(new[:MOST_LINES])]
        shift = len(new) - 1
        after = [_line(" ", n + shift, line_texts[n]) for n in range(line + 1, line + 1 + AROUND) if n in line_texts]
        if output.split("\n", 1)[0].strip() == tools.OK:
            later = {n + shift: text for n, text in line_texts.items() if n > line}
            earlier = {n: text for n, text in line_texts.items() if n < line}
            self._lines[path] = earlier | dict(enumerate(new, start=line)) | later
        return (*before, *removed, *added, *after)

    def _whole(self, path: str) -> tuple[ReadLine, ...]:
        line_texts, before = self._lines[path], _split(self._before[path])
        after = [line_texts[number] for number in sorted(line_texts)]
        return () if before == after else tuple(_difference(before, after, 1))


def _difference(old: Sequence[str], new: Sequence[str], first: int | None) -> Iterator[ReadLine]:
    """Lines of a diff, with unchanged lines around each change; ``first`` is the number of the first line."""

    def numbered(index: int) -> int | None:
        return None if first is None else first + index

    if max(len(old), len(new)) > MOST_COMPARED:
        groups = [[("replace", 0, len(old), 0, len(new))]]
    else:
        groups = list(SequenceMatcher(a=old, b=new, autojunk=False).get_grouped_opcodes(AROUND))
    shown = 0
    for tag, i1, i2, j1, j2 in (opcode for group in groups for opcode in group):
        if tag == "equal":
            lines = [_line(" ", numbered(j), new[j]) for j in range(j1, j2)]
        else:
            lines = [_line("-", numbered(i), old[i]) for i in range(i1, min(i2, i1 + MOST_LINES))]
            lines += [_line("+", numbered(j), new[j]) for j in range(j1, min(j2, j1 + MOST_LINES))]
        yield from lines[: MOST_LINES - shown]
        shown = min(shown + len(lines), MOST_LINES)


def _patch_lines(patch: str) -> Iterator[ReadLine]:
    """The lines of a patch, numbered if its hunks have line numbers."""
    number: int | None = None
    for text in patch.split("\n")[:MOST_LINES]:
        if match := HUNK.match(text):
            number = int(match[1])
        elif text.startswith(HEADERS) or text.startswith("@@"):
            continue
        elif text[:1] in ("+", "-", " "):
            yield _line(text[0], None if text[0] == "-" else number, text[1:])
            number = number + 1 if number is not None and text[0] != "-" else number


def _line(mark: str, number: int | None, text: str) -> ReadLine:
    return ReadLine(mark=mark, number=number, text=text)


def _split(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []
