"""`etude show`: rollouts on a terminal, in a pipe or as JSON.

    no option ──▶ an overview          filters ──▶ a list          a group, a rollout ──▶ turn by turn

Owns the options and the choice of one of these three. Output is :mod:`etude.cli.actions.show_rollouts`'s.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from etude.cli.options import Json, RunPath, group
from etude.errors import ConfigError

DEFAULT_LIMIT = 20
"""Rollouts of a list."""

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
    _refuse_conflicts(given, group_index, rollout, slot=slot, tokens=tokens, purpose=purpose)
    if export is not None and (rollout is None or as_json):
        raise ConfigError("--export prints one rollout in its own format: give --rollout ID, and leave --json out")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected 1 or more")
    from etude.cli.actions.show_rollouts import print_export, reader_of, show_group, show_list, show_one, show_overview
    from etude.ledger.archive import Order, RolloutOutcome, Search, parse_comparison
    from etude.ledger.changes import TRAIN
    from etude.run.stores import open_archive
    from etude.run.working_folder import open_run_folder

    folder = open_run_folder(run, writes=False)
    with open_archive(folder) as archive:
        if rollout is not None and export is not None:
            print_export(folder, archive, rollout, export, mismatches=tokens)
        elif rollout is not None:
            show_one(reader_of(folder, archive, tokens=tokens, mismatches=tokens), rollout, as_json)
        elif group_index is not None:
            reader = reader_of(folder, archive, tokens=tokens, mismatches=tokens)
            show_group(reader, purpose or TRAIN, group_index, slot, as_json)
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
            show_list(archive, search, as_json)
        else:
            show_overview(folder, archive, as_json)


def _refuse_conflicts(
    given: Sequence[str],
    group_index: int | None,
    rollout: str | None,
    *,
    slot: int | None,
    tokens: bool,
    purpose: str | None,
) -> None:
    """Raise :class:`~etude.errors.ConfigError` for options that do not go together; ``given`` are filters."""
    is_read = group_index is not None or rollout is not None
    if group_index is not None and rollout is not None:
        raise ConfigError("--group and --rollout: give one of the two")
    if is_read and given:
        raise ConfigError(f"--{given[0]} would have no effect: --group and --rollout already choose the rollouts")
    if not is_read and (tokens or slot is not None):
        raise ConfigError(f"--{'tokens' if tokens else 'slot'} needs --group N or --rollout ID")
    if rollout is not None and (slot is not None or purpose is not None):
        raise ConfigError("--slot and --purpose would have no effect: --rollout already chooses one rollout")
