"""`etude show`: which rollouts somebody wants to see, and on what.

    nothing asked ──▶ what there is          filters ──▶ a list          a group, a rollout ──▶ turn by turn

Owns the choice between these three and the way to the terminal, a pipe or a program. What is told is
:mod:`etude.cli.commands.rollout_view`'s, how it looks :mod:`etude.dashboard.rollout_text`'s.
"""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.text import Text

from etude.dashboard.rollout_text import ID_CHARACTERS, group_table, overview, rollout_list, rollout_page, to_json
from etude.dashboard.terminal import DIM
from etude.errors import ConfigError
from etude.ledger.archive import Archive, Comparison, Outcome, Search
from etude.ledger.changes import TRAIN
from etude.run.folder import RunFolder
from etude.types import Json

PIPE_COLUMNS = 100_000
"""Width where nobody looks: no line of text is broken."""
MOST_REASONS = 8
"""Shown in the overview: the most frequent ones."""
COMPARISON = re.compile(rf"\s*({'|'.join(sorted(get_args(Comparison), key=len, reverse=True))})\s*(\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody wants to see; of the three ways to say which, at most one is given."""

    search: Search | None = None
    """A list of those that it finds."""
    group: int | None = None
    """A group, or one slot of it."""
    slot: int | None = None
    purpose: str
    """Of the group."""
    rollout: str | None = None
    """The id of one, or its beginning."""
    tokens: bool = False
    """Every sampled token of what is read."""
    as_json: bool = False


def show(folder: RunFolder, wish: Wish) -> None:
    """Print it. Raises :class:`~etude.errors.UserError` for what is not there."""
    config = folder.config()
    with Archive.open(folder.ledger, config.ledger) as archive:
        if wish.rollout is not None or wish.group is not None:
            _show_read(folder, archive, wish)
        elif wish.search is not None:
            _show_list(archive, wish.search, wish.as_json)
        else:
            _show_overview(folder, archive, wish.as_json)


def parse_comparison(text: str) -> tuple[Comparison, float]:
    """``>=0.5`` as a comparison and a bound. Raises :class:`~etude.errors.ConfigError`."""
    match = COMPARISON.fullmatch(text)
    try:
        if match:
            found: Comparison = next(known for known in get_args(Comparison) if known == match[1])
            return found, float(match[2])
    except ValueError:
        pass
    raise ConfigError(f"--reward {text!r}: expected a comparison with a number, such as '>=0.5', '<0' or '=1'")


def console() -> Console:
    """Colours and its width on a terminal; plain text and whole lines in a pipe."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _show_read(folder: RunFolder, archive: Archive, wish: Wish) -> None:
    from etude.cli.commands.rollout_view import RolloutReader

    reader = RolloutReader(folder, archive, tokens=wish.tokens)
    if wish.rollout is not None:
        read = [reader.rollout(wish.rollout)]
    else:
        assert wish.group is not None, "what is read is a rollout or a group"
        read = list(reader.group(wish.purpose, wish.group, wish.slot))
    if wish.as_json:
        _print_json(to_json(rollout) for rollout in read)
        return
    whole = wish.rollout is None and wish.slot is None
    pages: list[RenderableType] = [group_table(read), Text()] if whole else []
    _print([*pages, *(rollout_page(rollout) for rollout in read)])


def _show_list(archive: Archive, search: Search, as_json: bool) -> None:
    known = {census.purpose: census for census in archive.census()}
    if search.purpose not in known:
        there = f"choose another --purpose: {', '.join(known)}" if known else "it has none at all yet"
        raise ConfigError(f"the run has no rollouts of --purpose {search.purpose!r}; {there}")
    first, last = known[search.purpose].versions or (0, -1)
    if search.version is not None and first <= last and not first <= search.version <= last:
        raise ConfigError(f"--version {search.version}: tokens of its rollouts are of versions {first} to {last}")
    found = archive.find(search)
    if as_json:
        _print_json(to_json(rollout) for rollout in found)
    else:
        _print([rollout_list(found, archive.count(search))])


def _show_overview(folder: RunFolder, archive: Archive, as_json: bool) -> None:
    config, census, done = folder.config(), archive.census(), archive.steps_done()
    steps = f"{done} of {config.trainer.steps} steps committed"
    if as_json:
        purposes: Json = [asdict(found) for found in census]
        _print_json(
            [{"run": str(folder.path), "steps_done": done, "steps": config.trainer.steps, "purposes": purposes}]
        )
        return
    _print([overview(folder.path.name, steps, census, archive.reasons(TRAIN, MOST_REASONS)), _next(folder, archive)])


def _next(folder: RunFolder, archive: Archive) -> RenderableType:
    """Commands that show more, with names that there are."""
    purpose = next((census.purpose for census in archive.census()), TRAIN)
    graded = archive.find(Search(purpose=purpose, outcome=Outcome.GRADED, limit=1))
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


def _print_json(objects: Iterable[dict[str, Json]]) -> None:
    """One object a line."""
    for found in objects:
        sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
