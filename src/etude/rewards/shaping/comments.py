"""Comments, docstrings and lines of code in program text. Pure.

    Python           the tokenizer, which accepts a few lines of a function as well as a module
    other languages  the comment marks, by the file's suffix; quoted text is ignored

A directive (``# noqa``, ``// eslint-disable``) is addressed to a program and is not counted. A string that is a
statement is addressed to people: it is a comment, unless it is a docstring. Owns the parsing, not the judgement of
comments (:mod:`etude.rewards.shaping.behaviour`).
"""

import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType

LINE_LETTERS = 500
"""Maximum length of a line that is parsed: tokenizers take quadratic time over unclosed quotes."""
PYTHON_SUFFIXES = frozenset({".py", ".pyi"})
LAYOUT = frozenset(
    {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
)
"""Tokens of the layout, which do not make a line code."""
OPENS = frozenset({tokenize.ENCODING, tokenize.INDENT})
"""Tokens before a docstring: none, or the indent of its block."""
BEGINS = OPENS | {tokenize.NEWLINE, tokenize.DEDENT}
ENDS = frozenset({tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER})
"""Tokens before and after a string that is a statement."""
DIRECTIVE = re.compile(
    r"!|\s*(?:-\*-|noqa\b|type:|pragma\b|pylint:|mypy:|ruff:|fmt:|isort:|yapf:|nosec\b|eslint\b|eslint-|ts-|@ts-|nolint\b|"
    r"go:|\+build|region\b|endregion\b|clang-format|prettier-ignore|coding[:=])",
    re.IGNORECASE,
)
"""Prefixes of comments that are addressed to a program."""
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
"""Suffix of a file → its marks; comments in files with other suffixes are not recognised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedSource:
    """Comments, docstrings and number of code lines of a program text."""

    code_lines: int = 0
    """Lines with anything other than comments and docstrings."""
    comments: tuple[str, ...] = ()
    """Text of every comment without its marks; one entry per line of a multi-line comment."""
    docstrings: tuple[str, ...] = ()
    """Their lines, without empty ones."""


def parse_source(text: str, suffix: str = ".py") -> ParsedSource:
    """Parse comments and code lines; ``suffix`` is the file's, with dot. Takes milliseconds for 32,000 letters."""
    lines = [line[:LINE_LETTERS] for line in text.split("\n")]
    if suffix.lower() in PYTHON_SUFFIXES:
        return _tokenized(textwrap.dedent("\n".join(lines)))
    return _by_marks(lines, SUFFIXES.get(suffix.lower(), NO_COMMENTS))


def _tokenized(text: str) -> ParsedSource:
    """Parse Python by its tokenizer; the lines from its first error on are parsed by their marks."""
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
    """The tokens of Python source, and whether the tokenizer failed before its end."""
    tokens: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(StringIO(text).readline):
            tokens.append(token)  # noqa: PERF402  # what came before an error counts
    except (tokenize.TokenError, SyntaxError, SystemError):  # the last is a defect of CPython 3.13's tokenizer
        return tokens, True
    return tokens, False


def _string_lines(literal: str) -> Iterator[str]:
    body = re.sub(r"^\w*(\"\"\"|'''|\"|')(.*)\1$", r"\2", literal, flags=re.DOTALL)
    return (line.strip() for line in body.split("\n") if line.strip())


def _by_marks(lines: Sequence[str], marks: CommentSyntax) -> ParsedSource:
    """Parse lines by their comment marks."""
    code, inside = 0, False
    comments: list[str] = []
    for line in lines:
        program, comment, inside = _divide(line, marks, inside)
        code += bool(program.strip())
        comments += comment
    return ParsedSource(code_lines=code, comments=_for_people(comments))


def _divide(line: str, marks: CommentSyntax, inside: bool) -> tuple[str, list[str], bool]:
    """Split a line into its code, its comments, and whether the last comment continues on the next line."""
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
    """Start of the next comment, and its mark; the end of the line if there is none.

    A mark must be at the start of the line or after white space: in a URL or a word it is not a comment.
    """
    marks_found = [
        (start, mark)
        for mark in (*marks.lines, marks.opening)
        if mark and (start := masked.find(mark, place)) >= 0 and (start == 0 or masked[start - 1].isspace())
    ]
    return min(marks_found, default=(len(masked), ""))


def _for_people(comments: Sequence[str]) -> tuple[str, ...]:
    """Non-empty comments other than directives, without surrounding white space and the stars of a block comment."""
    texts = (comment.strip(" \t*") for comment in comments if not DIRECTIVE.match(comment))
    return tuple(text for text in texts if text)
