"""The output of `etude show`: an overview, lists and whole rollouts, as text or as JSON with one object a line.

A rollout is read by :mod:`etude.run.rollout_reader` and drawn by :mod:`etude.dashboard.rollout_text`.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from etude.cli.console import console
from etude.dashboard.rollout_export import exported
from etude.dashboard.rollout_text import (
    group_table,
    overview,
    rollout_list,
    rollout_page,
)
from etude.dashboard.rollouts import ReadRollout, to_json
from etude.dashboard.terminal import DIM, ID_CHARACTERS
from etude.errors import ConfigError
from etude.ledger.archive import Archive, RolloutOutcome, Search
from etude.ledger.changes import TRAIN
from etude.run.folder import RunFolder
from etude.types import Json as JsonValue

if TYPE_CHECKING:
    from etude.run.rollout_reader import RolloutReader

MOST_REASONS = 8
"""Shown in the overview: the most frequent ones."""


def reader_of(folder: RunFolder, archive: Archive, *, tokens: bool, mismatches: bool) -> "RolloutReader":
    """A reader of whole rollouts, with their tokens and what the trainer computed of them."""
    from etude.run.rollout_reader import RolloutReader  # the trainer's functions, which lists do without

    return RolloutReader(folder, archive, tokens=tokens, mismatches=mismatches)


def print_export(
    folder: RunFolder, archive: Archive, rollout_id: str, form: Literal["harbor", "html"], *, mismatches: bool
) -> None:
    """Print one rollout in another program's format."""
    read = reader_of(folder, archive, tokens=True, mismatches=mismatches).rollout(rollout_id)
    print(exported(read, form, folder.config()))


def show_one(reader: "RolloutReader", rollout_id: str, as_json: bool) -> None:
    """Print one rollout turn by turn."""
    _show_read([reader.rollout(rollout_id)], with_table=False, as_json=as_json)


def show_group(reader: "RolloutReader", purpose: str, index: int, slot: int | None, as_json: bool) -> None:
    """Print the rollouts of a group, or that of one slot, turn by turn."""
    _show_read(list(reader.group(purpose, index, slot)), with_table=slot is None, as_json=as_json)


def _show_read(read: Sequence[ReadRollout], *, with_table: bool, as_json: bool) -> None:
    if as_json:
        _print_json(to_json(rollout) for rollout in read)
        return
    pages: list[RenderableType] = [group_table(read), Text()] if with_table else []
    _print([*pages, *(rollout_page(rollout) for rollout in read)])


def show_list(archive: Archive, search: Search, as_json: bool) -> None:
    """Print the rollouts that a search finds. Raises :class:`~etude.errors.ConfigError` where there can be none."""
    purposes = {census.purpose: census for census in archive.census()}
    if search.purpose not in purposes:
        there = f"choose another --purpose: {', '.join(purposes)}" if purposes else "it has none at all yet"
        raise ConfigError(f"the run has no rollouts of --purpose {search.purpose!r}; {there}")
    first, last = purposes[search.purpose].versions or (0, -1)
    if search.version is not None and first <= last and not first <= search.version <= last:
        raise ConfigError(f"--version {search.version}: tokens of its rollouts are of versions {first} to {last}")
    rollouts = archive.find(search)
    if as_json:
        _print_json(to_json(rollout) for rollout in rollouts)
    else:
        _print([rollout_list(rollouts, archive.count(search))])


def show_overview(folder: RunFolder, archive: Archive, as_json: bool) -> None:
    """Print how many rollouts there are of each kind, and commands that show more."""
    config, census, done = folder.config(), archive.census(), archive.steps_done()
    steps, epoch = f"{done} of {config.trainer.steps} steps committed", archive.epoch()
    if as_json:
        purposes: JsonValue = [asdict(each) for each in census]
        _print_json(
            [
                {
                    "run": str(folder.path),
                    "steps_done": done,
                    "steps": config.trainer.steps,
                    "epoch": epoch,
                    "purposes": purposes,
                }
            ]
        )
        return
    steps += f" · epoch {epoch}" * (epoch > 1)
    _print([overview(folder.path.name, steps, census, archive.reasons(TRAIN, MOST_REASONS)), _next(folder, archive)])


def _next(folder: RunFolder, archive: Archive) -> RenderableType:
    """Commands that show more, with ids of this run."""
    purpose = next((census.purpose for census in archive.census()), TRAIN)
    graded = archive.find(Search(purpose=purpose, outcome=RolloutOutcome.GRADED, limit=1))
    newest = graded or archive.find(Search(purpose=purpose, limit=1))
    which = "" if purpose == TRAIN else f" --purpose {purpose}"
    ways = [
        (f"--limit 20{which}", "the newest rollouts"),
        (f"--sort tokens --reward '>0'{which}", "the longest of those that did well"),
    ]
    if newest:
        ways.append((f"--group {newest[0].group}{which}", "a group side by side, then turn by turn"))
        ways.append((f"--rollout {newest[0].rollout_id[:ID_CHARACTERS]} --tokens", "a rollout token by token"))
    width = 2 + max(len(options) for options, _ in ways)
    lines = [Text(f"  {options:<{width}}").append(words, DIM) for options, words in ways]
    return Group(Text(), Text.assemble(f"etude show {folder.path}", (" with", DIM)), *lines)


def _print(pages: Iterable[RenderableType]) -> None:
    out = console()
    for page in pages:
        out.print(page)


def _print_json(objects: Iterable[dict[str, JsonValue]]) -> None:
    """One object a line."""
    for each in objects:
        sys.stdout.write(json.dumps(each, ensure_ascii=False) + "\n")
