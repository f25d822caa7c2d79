"""Traces of a suite in texts that a model was trained on: its canary, and runs of words that do not agree by chance.

    tasks ──▶ words in a row ──▶ index ◀── texts of a folder, file by file ──▶ share of each task that stands there

The measure is that of GPT-3 (arXiv 2005.14165, appendix C): a task is contaminated where ``WORDS`` words in a row of it
are in the training text; how many of its runs are is told, since licences and imports agree everywhere. Owns the
search, reads the folder.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WORDS = 13
"""Words in a row that are compared."""
WORD = re.compile(r"[a-z0-9_]+")
TEXT_BYTES = 64 << 20
"""A larger file is read up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contamination:
    """One task whose words stand in a text."""

    task_id: str
    share: float
    """Share of its runs of words that are in any text."""
    file: str
    """The text that has most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Traces of a suite in a folder of texts."""

    canary_in: tuple[str, ...]
    """Texts with the suite's canary."""
    tasks: tuple[Contamination, ...]
    """Tasks with any common run of words, those with the largest share first."""
    files: int
    """Texts that were read."""


def find_traces(tasks: Mapping[str, str], canary: str, folder: Path) -> Traces:
    """Look for the texts of some tasks (id → text) in all files below a folder."""
    owners: defaultdict[bytes, set[str]] = defaultdict(set)
    for task_id, text in tasks.items():
        for run in _runs(text):
            owners[run].add(task_id)
    totals = {task_id: len(set(_runs(text))) for task_id, text in tasks.items()}
    seen: defaultdict[str, set[bytes]] = defaultdict(set)
    by_file: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    marked: list[str] = []
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        with file.open("rb") as opened:
            text = opened.read(TEXT_BYTES).decode("utf-8", "replace")
        name = str(file.relative_to(folder))
        if canary and canary in text:
            marked.append(name)
        for run in set(_runs(text)) & owners.keys():
            for task_id in owners[run]:
                seen[task_id].add(run)
                by_file[task_id][name] += 1
    matches = [
        Contamination(
            task_id=task_id,
            share=len(runs) / totals[task_id],
            file=max(by_file[task_id], key=lambda name: by_file[task_id][name]),
        )
        for task_id, runs in seen.items()
    ]
    matches.sort(key=lambda match: (-match.share, match.task_id))
    return Traces(canary_in=tuple(marked), tasks=tuple(matches), files=len(files))


def _runs(text: str) -> Iterator[bytes]:
    """Digests of every ``WORDS`` words in a row; of a shorter text there are none."""
    words = WORD.findall(text.lower())
    for start in range(len(words) - WORDS + 1):
        yield hashlib.blake2b(" ".join(words[start : start + WORDS]).encode(), digest_size=8).digest()
