"""`etude show`: rollouts on a terminal, in a pipe or as JSON.

    no option ──▶ an overview          filters ──▶ a list          a group, a rollout ──▶ turn by turn

Owns the choice of one of these three and the output. A rollout is read by :mod:`etude.run.rollout_reader` and
drawn by :mod:`etude.dashboard.rollout_text`.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from etude.cli.console import console
from etude.cli.options import Json, RunPath, group
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
from etude.ledger.archive import Archive, Order, RolloutOutcome, Search, parse_comparison
from etude.ledger.changes import TRAIN
from etude.run.folder import RunFolder
from etude.run.stores import open_archive
from etude.run.working_folder import open_run_folder
from etude.types import Json as JsonValue

if TYPE_CHECKING:
    from etude.run.rollout_reader import RolloutReader

DEFAULT_LIMIT = 20
"""Rollouts of a list."""
MOST_REASONS = 8
"""Shown in the overview: the most frequent ones."""


app = group()


@app.command()
def show(
    run: RunPath,
    *,
    group_index: Annotated[
        int | None, typer.Option("--group", metavar="N", help="The rollouts of a group, turn by turn.")
    ] = None,
    rollout: Annotated[
        str | None, typer.Option(metavar="ID", help="One rollout, by its id or the beginning of its id.")
    ] = None,
    slot: Annotated[int | None, typer.Option(metavar="S", help="With --group: only this rollout of it.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show every sampled token: logprob, mismatch, version, routes.")
    ] = False,
    purpose: Annotated[str | None, typer.Option(metavar="NAME", help="train (the default), after-greedy, …")] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="COMPARISON", help="List by reward: '>=0.5', '<0', '=1'.")
    ] = None,
    outcome: Annotated[
        Literal["graded", "failed", "dropped", "quarantined"] | None, typer.Option(help="List by outcome.")
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="List by the reason of the end or of the grade, such as 'submit'."),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(metavar="V", help="List rollouts whose range of weight versions includes V."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TEXT", help="List rollouts whose task id or template contains TEXT.")
    ] = None,
    has_summary: Annotated[bool, typer.Option("--has-summary", help="List rollouts with a summary.")] = False,
    has_hint: Annotated[bool, typer.Option("--has-hint", help="List rollouts with a hint.")] = False,
    hacked: Annotated[bool, typer.Option("--hacked", help="List rollouts that count as cheating.")] = False,
    sort: Annotated[
        Literal["newest", "reward", "tokens", "turns", "staleness"] | None, typer.Option(help="Order of the list.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Most rollouts to list (default: 20).")] = None,
    export: Annotated[
        Literal["harbor", "html"] | None, typer.Option(help="With --rollout: print as Harbor's ATIF, or as HTML.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the rollouts of a run: an overview, a list, a group, or a single rollout."""
    filters = {
        "reward": reward,
        "outcome": outcome,
        "reason": reason,
        "version": version,
        "task": task,
        "has-summary": has_summary or None,
        "has-hint": has_hint or None,
        "hacked": hacked or None,
        "sort": sort,
        "limit": limit,
    }
    given = [name for name, value in filters.items() if value is not None]
    is_read = group_index is not None or rollout is not None
    if group_index is not None and rollout is not None:
        raise ConfigError("--group and --rollout: give one of the two")
    if is_read and given:
        raise ConfigError(f"--{given[0]} would have no effect: --group and --rollout already choose the rollouts")
    if not is_read and (tokens or slot is not None):
        raise ConfigError(f"--{'tokens' if tokens else 'slot'} needs --group N or --rollout ID")
    if rollout is not None and (slot is not None or purpose is not None):
        raise ConfigError("--slot and --purpose would have no effect: --rollout already chooses one rollout")
    if export is not None and (rollout is None or as_json):
        raise ConfigError("--export prints one rollout in its own format: give --rollout ID, and leave --json out")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected 1 or more")
    folder = open_run_folder(run, writes=False)
    with open_archive(folder) as archive:
        if rollout is not None and export is not None:
            _print_export(folder, archive, rollout, export, mismatches=tokens)
        elif rollout is not None:
            _show_rollout(_reader(folder, archive, tokens=tokens, mismatches=tokens), rollout, as_json)
        elif group_index is not None:
            reader = _reader(folder, archive, tokens=tokens, mismatches=tokens)
            _show_group(reader, purpose or TRAIN, group_index, slot, as_json)
        elif given or purpose is not None:
            search = Search(
                purpose=purpose or TRAIN,
                reward=None if reward is None else parse_comparison(reward),
                outcome=outcome and RolloutOutcome(outcome),
                reason=reason or "",
                version=version,
                task=task or "",
                has_summary=has_summary,
                has_hint=has_hint,
                hacked=hacked,
                order=Order(sort or "newest"),
                limit=limit or DEFAULT_LIMIT,
            )
            _show_list(archive, search, as_json)
        else:
            _show_overview(folder, archive, as_json)


def _reader(folder: RunFolder, archive: Archive, *, tokens: bool, mismatches: bool) -> "RolloutReader":
    from etude.run.rollout_reader import RolloutReader  # the trainer's functions, which lists do without

    return RolloutReader(folder, archive, tokens=tokens, mismatches=mismatches)


def _print_export(
    folder: RunFolder, archive: Archive, rollout_id: str, form: Literal["harbor", "html"], *, mismatches: bool
) -> None:
    read = _reader(folder, archive, tokens=True, mismatches=mismatches).rollout(rollout_id)
    print(exported(read, form, folder.config()))


def _show_rollout(reader: "RolloutReader", rollout_id: str, as_json: bool) -> None:
    _show_read([reader.rollout(rollout_id)], with_table=False, as_json=as_json)


def _show_group(reader: "RolloutReader", purpose: str, index: int, slot: int | None, as_json: bool) -> None:
    _show_read(list(reader.group(purpose, index, slot)), with_table=slot is None, as_json=as_json)


def _show_read(read: Sequence[ReadRollout], *, with_table: bool, as_json: bool) -> None:
    if as_json:
        _print_json(to_json(rollout) for rollout in read)
        return
    pages: list[RenderableType] = [group_table(read), Text()] if with_table else []
    _print([*pages, *(rollout_page(rollout) for rollout in read)])


def _show_list(archive: Archive, search: Search, as_json: bool) -> None:
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


def _show_overview(folder: RunFolder, archive: Archive, as_json: bool) -> None:
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
