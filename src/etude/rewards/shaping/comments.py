"""Comments, docstrings and lines of code in program text. Pure.

    Python           the tokenizer, which takes a few lines out of a function as well as a module
    other languages  the marks of their comments, by the file's suffix; what stands in quotes is not looked at

A directive (``# noqa``, ``// eslint-disable``) is written for a program, and a string that is a statement for people:
it is a comment, unless it stands where a docstring does. Owns how texts are taken apart, not what is too much or badly
said in them (:mod:`etude.rewards.shaping.behaviour`).
"""

import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType

LINE_LETTERS = 500
"""Limit of a line that is read: tokenizers take quadratic time over quotes that never end."""
PYTHON_SUFFIXES = frozenset({".py", ".pyi"})
LAYOUT = frozenset(
    {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
)
"""Tokens that no line has for their own sake."""
OPENS = frozenset({tokenize.ENCODING, tokenize.INDENT})
"""Tokens before a docstring: none, or the indent of its block."""
BEGINS = OPENS | {tokenize.NEWLINE, tokenize.DEDENT}
ENDS = frozenset({tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER})
"""Tokens before and behind a string that is a statement."""
DIRECTIVE = re.compile(
    r"!|\s*(?:-\*-|noqa\b|type:|pragma\b|pylint:|mypy:|ruff:|fmt:|isort:|yapf:|nosec\b|eslint\b|eslint-|ts-|@ts-|nolint\b|"
    r"go:|\+build|region\b|endregion\b|clang-format|prettier-ignore|coding[:=])",
    re.IGNORECASE,
)
"""Prefixes of comments that are written for a program."""
QUOTED = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommentSyntax:
    """Comment marks of a programming language."""

    lines: tuple[str, ...] = ()
    """Marks of comments that end with their line."""
    opening: str = ""
    """Mark of comments that end with ``closing``; empty: there is none."""
    closing: str = ""


SLASHES = CommentSyntax(lines=("//",), opening="/*", closing="*/")
HASHES = CommentSyntax(lines=("#",))
DASHES = CommentSyntax(lines=("--",), opening="/*", closing="*/")
TAGS = CommentSyntax(opening="<!--", closing="-->")
NO_COMMENTS = CommentSyntax()
SUFFIXES: Mapping[str, CommentSyntax] = MappingProxyType(
    dict.fromkeys((".js", ".jsx", ".ts", ".tsx", ".mjs", ".java", ".kt", ".scala", ".c", ".h", ".cc", ".cpp", ".hpp"),
                  SLASHES)
    | dict.fromkeys((".cs", ".go", ".rs", ".swift", ".php", ".dart", ".proto", ".css", ".scss", ".less"), SLASHES)
    | dict.fromkeys((".sh", ".bash", ".zsh", ".rb", ".pl", ".r", ".jl", ".yaml", ".yml", ".toml", ".ex"), HASHES)
    | dict.fromkeys((".sql", ".lua", ".hs", ".elm"), DASHES)
    | dict.fromkeys((".html", ".xml", ".svg", ".md", ".vue"), TAGS)
)  # fmt: skip
"""Suffix of a file → its marks; a file of any other has no comments that we would know of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedSource:
    """Comments, docstrings and number of code lines of a program text."""

    code_lines: int = 0
    """Lines with anything in them that is neither comment nor docstring."""
    comments: tuple[str, ...] = ()
    """Text of every comment without its marks; one that goes over several lines is one for each."""
    docstrings: tuple[str, ...] = ()
    """Their lines, empty ones left out."""


def parse_source(text: str, suffix: str = ".py") -> ParsedSource:
    """Parse comments and code lines; ``suffix`` is the file's, with dot. Some milliseconds for 32,000 letters."""
    lines = [line[:LINE_LETTERS] for line in text.split("\n")]
    if suffix.lower() in PYTHON_SUFFIXES:
        return _tokenized(textwrap.dedent("\n".join(lines)))
    return _by_marks(lines, SUFFIXES.get(suffix.lower(), NO_COMMENTS))


def _tokenized(text: str) -> ParsedSource:
    """Parse Python by its tokenizer; lines from where it gives up are read by their marks."""
    tokens, failed = _tokens(text)
    code: set[int] = set()
    comments: list[str] = []
    docstrings: list[str] = []
    before = tokenize.ENCODING
    for token, after in zip(tokens, [*tokens, None][1:], strict=True):
        if token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("#"))
        elif before in BEGINS and token.type == tokenize.STRING and after is not None and after.type in ENDS:
            (docstrings if before in OPENS else comments).extend(_string_lines(token.string))
        elif token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
        before = before if token.type in (tokenize.NL, tokenize.COMMENT) else token.type
    read = ParsedSource(code_lines=len(code), comments=_for_people(comments), docstrings=tuple(docstrings))
    if not failed:
        return read
    rest = _by_marks(text.split("\n")[tokens[-1].end[0] if tokens else 0 :], HASHES)
    return ParsedSource(
        code_lines=read.code_lines + rest.code_lines,
        comments=read.comments + rest.comments,
        docstrings=read.docstrings,
    )


def _tokens(text: str) -> tuple[list[tokenize.TokenInfo], bool]:
    """The tokens of Python source, and whether the tokenizer gave up before its end."""
    tokens: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(StringIO(text).readline):
            tokens.append(token)  # noqa: PERF402  # what came before an error counts
    except (tokenize.TokenError, SyntaxError):
        return tokens, True
    return tokens, False


def _string_lines(literal: str) -> Iterator[str]:
    body = re.sub(r"^\w*(\"\"\"|'''|\"|')(.*)\1$", r"\2", literal, flags=re.DOTALL)
    return (line.strip() for line in body.split("\n") if line.strip())


def _by_marks(lines: Sequence[str], marks: CommentSyntax) -> ParsedSource:
    """Take lines apart by the marks of their comments."""
    code, inside = 0, False
    comments: list[str] = []
    for line in lines:
        program, comment, inside = _divide(line, marks, inside)
        code += bool(program.strip())
        comments += comment
    return ParsedSource(code_lines=code, comments=_for_people(comments))


def _divide(line: str, marks: CommentSyntax, inside: bool) -> tuple[str, list[str], bool]:
    """Split a line: its program, its comments, and whether the last comment goes on."""
    masked = QUOTED.sub(lambda quoted: "_" * len(quoted[0]), line)
    program, comment, place = "", list[str](), 0
    while place < len(line):
        if inside:
            end = line.find(marks.closing, place)
            inside, stop = end < 0, len(line) if end < 0 else end
            comment.append(line[place:stop])
            place = stop + len(marks.closing)
            continue
        start, mark = _next_mark(masked, place, marks)
        program += line[place:start]
        place = start + len(mark)
        if mark in marks.lines:
            comment.append(line[place:])
            break
        inside = bool(mark)
    return program, comment, inside


def _next_mark(masked: str, place: int, marks: CommentSyntax) -> tuple[int, str]:
    """Start of the next comment, and its mark; the end of the line where there is none.

    A mark begins the line or stands behind white space: what it is in a URL or in a word is no comment.
    """
    marks_found = [
        (start, mark)
        for mark in (*marks.lines, marks.opening)
        if mark and (start := masked.find(mark, place)) >= 0 and (start == 0 or masked[start - 1].isspace())
    ]
    return min(marks_found, default=(len(masked), ""))


def _for_people(comments: Sequence[str]) -> tuple[str, ...]:
    """Comments that are no directives, without white space and the stars of a block around them; no empty ones."""
    texts = (comment.strip(" \t*") for comment in comments if not DIRECTIVE.match(comment))
    return tuple(text for text in texts if text)
