"""Features of an observation that reveal the machine behind it, each present or absent. Pure.

Each feature is ``kind:value``, for instance ``path:/usr/lib``, ``host:*@buildbox``, ``latency:2^-5s``: a name that can
be read aloud, and one that says what to repair. Numbers are put into buckets by powers of two. What belongs to a task
rather than to a machine (file names deep in a tree, identifiers) is left out as far as that can be told; words are kept
only where several sessions share them.

Owns what is looked at. Does not own how it is weighed (:mod:`etude.taskgen.fidelity.classifier`).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from etude.taskgen.fidelity.sessions import ToolObservation

MAX_FEATURES = 600
"""The most common ones, by sessions: as many as a few hundred sessions can weigh."""
MIN_SESSIONS = 3
"""Fewest sessions of a feature: in fewer, it identifies the session, not the machine."""
MAX_CHARACTERS = 20_000
"""Characters of an observation that are read."""
DEPTH = 2
"""Folders of a path that belong to the machine."""

PATH = re.compile(r"(?<![\w./])/(?:[\w.+-]+/?)+")
VARIABLE = re.compile(r"^(?:export |declare -x )?([A-Z][A-Z0-9_]{2,40})=", re.MULTILINE)
VERSION = re.compile(r"\b([A-Za-z][\w+-]{1,20})[ /-]v?(\d+\.\d+(?:\.\d+)?)")
PROMPT = re.compile(r"^\(?[\w.-]*\)? ?([\w.-]+)@([\w.-]+)[: ][^\n]{0,60}?[#$%] ?", re.MULTILINE)
USER = re.compile(r"\b([ug]id)=(\d+)\(?([\w-]*)")
PORT = re.compile(r"(?:localhost|\d+\.\d+\.\d+\.\d+|\*|\[::\d?\]):(\d{2,5})\b")
ADDRESS = re.compile(r"\b(\d{1,3}\.\d{1,3})\.\d{1,3}\.\d{1,3}\b")
LOCALE = re.compile(r"\b([a-z]{2}_[A-Z]{2}(?:\.[\w-]+)?|C\.UTF-8|POSIX|ANSI_X3\.4-1968)\b")
ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception)|command not found|No such file or directory|Permission denied|"
                   r"Read-only file system|Operation not permitted|Connection refused|timed out|Killed|"
                   r"Temporary failure in name resolution|Network is unreachable|No space left on device)")  # fmt: skip
ZONE = re.compile(r"\b\d\d:\d\d:\d\d ([A-Z]{3,4})\b|\d\d:\d\d(?::\d\d(?:\.\d+)?)?([+-]\d\d:?\d\d|Z)\b")
KERNEL = re.compile(r"\bLinux (?:version )?(?:[\w.-]+ )?(\d+\.\d+)\.\d+")
ESCAPE = re.compile(r"\x1b\[")
WORD = re.compile(r"(?<![\w/.=-])[A-Za-z][a-z]{3,15}(?![\w/=(-])")


def features_of(observation: ToolObservation) -> frozenset[str]:
    """All features of one observation."""
    text = observation.observation[:MAX_CHARACTERS]
    return frozenset((*_machine(text), *_form(observation), *_words(text)))


def _machine(text: str) -> Iterator[str]:
    for match in PATH.finditer(text):
        parts = match[0].strip("/").split("/")
        yield f"path:/{'/'.join(parts[: min(DEPTH, max(1, len(parts) - 1))])}"
    yield from (f"env:{name}" for name in VARIABLE.findall(text))
    for tool, number in VERSION.findall(text):
        yield f"version:{tool.lower()} {number}"
    for user, host in PROMPT.findall(text):
        yield f"prompt:{user}@*"
        yield f"host:{host}"
    for kind, number, name in USER.findall(text):
        yield f"user:{kind}={number}({name})"
    yield from (f"port:{port}" for port in PORT.findall(text))
    yield from (f"address:{net}.*" for net in ADDRESS.findall(text))
    yield from (f"locale:{name}" for name in LOCALE.findall(text))
    yield from (f"error:{name}" for name in ERROR.findall(text))
    yield from (f"zone:{name or offset}" for name, offset in ZONE.findall(text))
    yield from (f"kernel:{number}" for number in KERNEL.findall(text))


def _form(observation: ToolObservation) -> Iterator[str]:
    text = observation.observation
    yield f"size:{bucket(len(text))} letters"
    yield f"lines:{bucket(text.count(chr(10)))}"
    yield "ending:none" if not text.endswith("\n") else "ending:newline"
    if "\r\n" in text:
        yield "ending:CRLF"
    if ESCAPE.search(text):
        yield "form:escape codes"
    if not text.isascii():
        yield "form:beyond ASCII"
    if not text.strip():
        yield "form:nothing"
    if "\t" in text:
        yield "form:tabs"
    if observation.seconds is not None:
        yield f"latency:{bucket(observation.seconds)} s"
    if observation.exit_code is not None:
        yield f"exit:{observation.exit_code}"


def _words(text: str) -> Iterator[str]:
    return (f"word:{word.lower()}" for word in WORD.findall(text))


def bucket(value: float) -> str:
    """The power of two at or below a value, in words: ``2^3``; ``0`` for nothing."""
    return f"2^{math.floor(math.log2(value))}" if value > 0 else "0"


def common_features(features: Sequence[frozenset[str]], sessions: Sequence[str]) -> list[str]:
    """Names of the features that enough sessions have, the most common first; those that all or none have say nothing.

    Which side a session is on is not asked: to choose by that would find tells where there are none.
    """
    owners: Counter[str] = Counter()
    for session in dict.fromkeys(sessions):
        owners.update(set().union(*(one for one, of in zip(features, sessions, strict=True) if of == session)))
    everywhere = frozenset.intersection(*features) if features else frozenset()
    shared = [name for name, count in owners.items() if count >= MIN_SESSIONS and name not in everywhere]
    return sorted(shared, key=lambda name: (-owners[name], name))[:MAX_FEATURES]


def as_matrix(features: Sequence[frozenset[str]], names: Sequence[str]) -> npt.NDArray[np.float64]:
    """[observations, features] matrix: 1 where an observation has the feature."""
    column = {name: index for index, name in enumerate(names)}
    matrix = np.zeros((len(features), len(names)))
    for row, one in enumerate(features):
        matrix[row, [column[name] for name in one if name in column]] = 1.0
    return matrix
