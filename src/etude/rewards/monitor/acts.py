"""Elementary acts of an agent's action: commands run, files read, created or altered, code executed. Pure.

    Action ──▶ its arguments ──▶ shell text ──▶ simple commands ──▶ Act: surface and text
                            └──▶ path, written text ─────────────▶

A detector that looks for ``git log --all`` must not fire on ``grep "git log --all" README``: shell text is parsed here,
so that a pattern for commands matches only commands, and a pattern for paths only paths. Text that cannot be parsed,
such as an unclosed quote, is split at white space: less precise, but not lost.

Owns the grammar; the patterns are in :mod:`etude.rewards.monitor.detectors`.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from types import MappingProxyType

from etude.harnesses.actions import Action, excerpt

MAX_CHARACTERS = 32_000
"""Maximum number of characters of an argument that are parsed, half at each end: the agent controls the text."""
RUN_LETTERS = 4_000
"""Limit of one simple command."""
MAX_HEREDOCS = 64
"""Maximum number of here-documents in one text; if there are more, none is parsed as one."""
MAX_DEPTH = 3
"""Depth to which nested shells are parsed."""
HOME = "/home/agent"

COMMANDS = frozenset({"command", "cmd", "commands", "bash_command", "script", "input"})
PATHS = frozenset({"path", "file_path", "file", "filename", "target_file", "notebook_path"})
TEXTS = frozenset({"text", "content", "contents", "new_str", "new_string", "file_text", "insert_text", "new_source"})
CODES = frozenset({"code", "python", "source_code"})
"""Names of arguments by their content, in common harnesses."""
VIEWS = frozenset({"read", "view", "cat", "open", "open_file", "read_file", "view_file"})
CREATES = frozenset({"create", "write", "write_file", "create_file"})
"""Tools and sub-commands that create a path; any other one with a text alters it."""
EDITOR = VIEWS | CREATES | {"str_replace", "insert", "undo_edit"}

PREFIXES = frozenset({"sudo", "time", "nohup", "command", "exec", "env", "then", "do", "else", "if", "while", "!", "{"})
TAKING = MappingProxyType({"timeout": "sk", "nice": "n", "xargs": "nIPLsd", "ionice": "cn"})
"""Programs that run the command after their options → their one-letter options that take a value."""
SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
READERS = frozenset(
    {"cat", "head", "tail", "less", "more", "nl", "strings", "xxd", "od", "bat", "tac", "diff", "source", "."}
)
"""Programs that print the files in all their operands."""
SEARCHERS = frozenset({"grep", "egrep", "fgrep", "rg", "ag", "awk", "sed"})
"""Programs whose first operand is a pattern or program and whose others are files."""
REMOVERS = frozenset({"rm", "rmdir", "unlink", "shred", "truncate", "chmod", "patch"})
COPIERS = frozenset({"cp", "mv", "ln", "install", "rsync"})

HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)
DURATION = re.compile(r"\d+(?:\.\d+)?[smhd]?")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
QUOTED = re.compile(r"(\"(?:[^\"\\]|\\.)*\")|'[^']*'")
"""Quoted text; the first group is double-quoted, which a shell expands."""
PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
OPENED = re.compile(r"\bopen\(\s*[rbf]*['\"]([^'\"]+)['\"]\s*(?:,\s*(?:mode\s*=\s*)?['\"]([rwxab+t]*)['\"])?")
PATHLIB = re.compile(r"\bPath\(\s*['\"]([^'\"]+)['\"]\s*\)\s*\.\s*(write_\w+|unlink|rename|read_\w+|touch)")


class Surface(Enum):
    """Kind of text that a detector's pattern is matched against."""

    TEXT = auto()
    """A whole shell text, unchanged."""
    RUN = auto()
    """One simple command: its words without quotes, joined by blanks; patterns match from its start."""
    SET = auto()
    """A variable assignment for a command, ``NAME=value``."""
    READ = auto()
    """A path that was read."""
    CREATE = auto()
    """A path that was written as a whole."""
    ALTER = auto()
    """The path of an existing file that was changed, moved or removed."""
    CODE = auto()
    """Program text that was executed directly or written into a file."""


@dataclass(frozen=True, slots=True)
class Act:
    """One elementary act of an agent."""

    surface: Surface
    text: str
    where: str
    """The name of the argument that contains it."""


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """A shell command without pipes, between two separators."""

    words: tuple[str, ...]
    assignments: tuple[str, ...]
    reads: tuple[str, ...]
    """Files that its input is redirected from."""
    writes: tuple[str, ...]
    """Files that its output is redirected to."""
    body: str
    """Its here-document."""


def acts_of(action: Action, *, workdir: str, existing: frozenset[str]) -> tuple[Act, ...]:
    """The acts of an action, paths relative to ``workdir``; creating an ``existing`` file counts as altering it."""
    acts: list[Act] = []
    path = next((action.arguments[name] for name in sorted(PATHS & action.arguments.keys())), "")
    for name, whole in action.arguments.items():
        value = excerpt(whole, MAX_CHARACTERS)
        if name in COMMANDS and not (path and value.split(" ")[0] in EDITOR):
            acts.append(Act(Surface.TEXT, value, name))
            acts += [Act(surface, text, name) for surface, text in shell_acts(value)]
        elif name in TEXTS or name in CODES:
            acts.append(Act(Surface.CODE, value, name))
            if name in CODES:
                acts += [Act(surface, text, name) for surface, text in code_acts(value)]
    if path:
        acts.append(Act(_done_to_path(action), path, sorted(PATHS & action.arguments.keys())[0]))
    return tuple(_settled(act, workdir, existing) for act in acts)


def shell_acts(text: str, depth: int = 0) -> Iterator[tuple[Surface, str]]:
    """The acts of a shell script, nested commands included."""
    for command in simple_commands(text):
        yield from ((Surface.SET, assignment) for assignment in command.assignments)
        yield from ((Surface.READ, path) for path in command.reads)
        yield from ((Surface.CREATE, path) for path in command.writes)
        if command.words:
            yield Surface.RUN, " ".join(command.words)[:RUN_LETTERS]
            yield from _file_acts(command)
            yield from _inner_acts(command, depth)


def simple_commands(text: str) -> list[SimpleCommand]:
    """The simple commands of a shell text in order; those in ``$(…)`` come after the command that contains them."""
    bodies: list[str] = []

    def put_aside(match: re.Match[str]) -> str:
        bodies.append(match[4])
        return f" <<{len(bodies) - 1} {match[3]}"

    plain = text if text.count("<<") > MAX_HEREDOCS else HEREDOC.sub(put_aside, text)
    plain = plain.replace("\\\n", " ")
    commands = [_command(part, bodies) for part in _parts(_tokens(plain))]
    expanded = QUOTED.sub(lambda match: match[1] or "", plain)
    inner = [group for match in SUBSTITUTION.finditer(expanded) for group in match.groups() if group]
    return commands + [command for part in inner for command in simple_commands(part)]


def code_acts(code: str) -> Iterator[tuple[Surface, str]]:
    """The files that a program's source opens by name, as acts."""
    for path, mode in OPENED.findall(code):
        yield _opened_as(mode), path
    for path, method in PATHLIB.findall(code):
        yield _called_as(method), path


def _opened_as(mode: str) -> Surface:
    """The surface of a file that is opened in a mode of ``open``."""
    if set(mode) & set("wx"):
        return Surface.CREATE
    return Surface.ALTER if set(mode) & set("a+") else Surface.READ


def _called_as(method: str) -> Surface:
    """The surface of a file on whose path a method of ``pathlib`` is called."""
    if method.startswith("read"):
        return Surface.READ
    return Surface.ALTER if method in ("unlink", "rename") else Surface.CREATE


def settle_path(path: str, workdir: str) -> str:
    """Normalise a path; relative to ``workdir`` if it lies below."""
    path = HOME + path[1:] if path == "~" or path.startswith("~/") else path
    whole = posixpath.normpath(posixpath.join(workdir, path))
    return posixpath.relpath(whole, workdir) if f"{whole}/".startswith(f"{workdir}/") else whole


def _done_to_path(action: Action) -> Surface:
    verb = action.arguments.get("command", "").split(" ")[0]
    verb = verb if verb in EDITOR else action.tool.rpartition(".")[2].lower()
    if verb in CREATES:
        return Surface.CREATE
    return Surface.ALTER if verb not in VIEWS and TEXTS & action.arguments.keys() else Surface.READ


def _settled(act: Act, workdir: str, existing: frozenset[str]) -> Act:
    if act.surface not in (Surface.READ, Surface.CREATE, Surface.ALTER):
        return act
    path = settle_path(act.text, workdir)
    is_there = act.surface is Surface.CREATE and path in existing
    return Act(Surface.ALTER if is_there else act.surface, path, act.where)


def _tokens(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return list(lexer)
    except ValueError:
        return re.findall(r"[();<>|&\n]+|[^\s();<>|&]+", text)


def _parts(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Tokens between separators, without comments."""
    part: list[str] = []
    commented = False
    for token in tokens:
        ends_line = "\n" in token and not token.strip("();<>|&\n")
        commented = (commented or token.startswith("#")) and not ends_line
        if token and not token.strip("();|&\n"):
            yield part
            part = []
        elif not commented:
            part.append(token)
    yield part


def _command(tokens: Sequence[str], bodies: Sequence[str]) -> SimpleCommand:
    words: list[str] = []
    reads: list[str] = []
    writes: list[str] = []
    body = ""
    rest = iter(tokens)
    for token in rest:
        if token.strip("<>&|\n") or not token.strip("\n"):
            words.append(token)
            continue
        target = next(rest, "")
        if "<<" in token:
            body = bodies[int(target)] if target.isdigit() and int(target) < len(bodies) else target
        elif target and not target.isdigit() and target != "-":
            (reads if "<" in token else writes).append(target)
    assignments, words = _without_prefixes(words)
    return SimpleCommand(tuple(words), tuple(assignments), tuple(reads), tuple(writes), body)


def _without_prefixes(words: list[str]) -> tuple[list[str], list[str]]:
    """Variable assignments of a command, and its words from the program name on."""
    assignments: list[str] = []
    while words:
        if ASSIGNMENT.fullmatch(words[0]):
            assignments.append(words[0])
        elif words[0] in TAKING and len(words) > 1:
            words = _behind_options(words[1:], TAKING[words[0]])
            continue
        elif words[0] not in PREFIXES or len(words) == 1:
            break
        words = words[1:]
    return assignments, words


def _behind_options(words: list[str], taking: str) -> list[str]:
    """The words of a wrapped command, after its wrapper's options; ``taking`` are options that take a value."""
    while words and (words[0].startswith("-") or DURATION.fullmatch(words[0])):
        words = words[2:] if re.fullmatch(rf"-[{taking}]", words[0]) else words[1:]
    return words


def _file_acts(command: SimpleCommand) -> Iterator[tuple[Surface, str]]:
    """The file arguments of a well-known program, as acts."""
    program = posixpath.basename(command.words[0])
    options = [word for word in command.words[1:] if word.startswith("-")]
    operands = [word for word in command.words[1:] if word and not word.startswith("-")]
    if program in READERS:
        yield from ((Surface.READ, path) for path in operands)
    elif program in SEARCHERS or program == "perl":
        in_place = program in ("sed", "perl") and any(re.match(r"-\w*i|--in-place", option) for option in options)
        yield from ((Surface.ALTER if in_place else Surface.READ, path) for path in operands[1:])
    elif program in REMOVERS:
        yield from ((Surface.ALTER, path) for path in operands)
    elif program in COPIERS and len(operands) > 1:
        yield from ((Surface.ALTER if program == "mv" else Surface.READ, path) for path in operands[:-1])
        yield Surface.CREATE, operands[-1]
    elif program in ("tee", "touch"):
        yield from ((Surface.CREATE, path) for path in operands)


def _inner_acts(command: SimpleCommand, depth: int) -> Iterator[tuple[Surface, str]]:
    """Acts in the argument of a shell or interpreter, and in a here-document."""
    program = posixpath.basename(command.words[0])
    given = _behind_c(command.words[1:])
    code = given or command.body
    if program in SHELLS and code and depth < MAX_DEPTH:
        yield from shell_acts(code, depth + 1)
    elif PYTHON.fullmatch(program) and code:
        yield Surface.CODE, code
        yield from code_acts(code)
    elif command.body or (program in ("echo", "printf") and command.writes):
        yield Surface.CODE, command.body or " ".join(command.words[1:])


def _behind_c(words: Sequence[str]) -> str:
    """Argument of ``-c``, also in the form ``-lc``."""
    for word, after in pairwise(words):
        if re.fullmatch(r"-[a-zA-Z]*c", word):
            return after
    return ""
