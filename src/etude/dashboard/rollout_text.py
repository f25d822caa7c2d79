"""Rollouts in the terminal: an overview, a list, a group as a table, one rollout turn by turn.

Owns the layout for people: 100 columns, complete at 80, and as wide as the text in a pipe. The output of a model or of
a program in a sandbox is data: its control characters are made visible, never sent to the terminal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from etude.dashboard.formatting import MISSING, count, decimal, percent, small, visible
from etude.dashboard.rollouts import ReadComparison, ReadPart, ReadRollout, ReadSummary, ReadToken, ReadTurn
from etude.dashboard.terminal import ACCENT, DIM, GOOD, ID_CHARACTERS, WARN, light_table
from etude.ledger.archive import Census, RolloutMatch, RolloutOutcome
from etude.ledger.changes import TRAIN
from etude.ledger.states import GroupState
from etude.types import Disposition, ObservedSession, RolloutStatus

REASON_CHARACTERS = 40
"""Maximum length of a reason in a list; that of a failure may be a whole message."""
Reasons: TypeAlias = Sequence[tuple[RolloutStatus, str, int]]
"""Status and reason of rollouts, and their number."""


def overview(name: str, steps: str, census: Sequence[Census], reasons: Reasons) -> RenderableType:
    """Overview of a run's rollouts, and the values they can be filtered by."""
    table = light_table("purpose", ">groups", ">graded", ">reward", ">versions", "beside")
    for counts in census:
        table.add_row(
            counts.purpose,
            count(sum(counts.groups.values())),
            count(counts.outcomes[RolloutOutcome.GRADED]),
            decimal(counts.mean_reward, 3),
            MISSING if counts.versions is None else _span(*counts.versions),
            _beside(counts),
        )
    title = Text.assemble((name, f"bold {ACCENT}"), (" · ", DIM), steps)
    parts: list[RenderableType] = [title, Text(), table]
    if reasons:
        parts += [Text(), Text("training rollouts by why they ended", DIM), *_reason_lines(reasons)]
    unlisted = sum(counts.unlisted for counts in census)
    if unlisted:
        parts += [Text(), Text(f"{count(unlisted)} rollouts were recorded by an older étude: filters and orders by "
                               f"tokens, turns, versions, summaries and hints do not find them", WARN)]  # fmt: skip
    return Group(*parts)


def rollout_list(matches: Sequence[RolloutMatch], total: int) -> RenderableType:
    """The results of a rollout search, one line each."""
    if not matches:
        return Text("no rollout is like that", WARN)
    table = light_table("rollout", ">group", ">slot", ">step", ">reward", ">turns", ">sampled", ">versions", "ended")
    for rollout in matches:
        traits = rollout.traits
        versions = MISSING
        if traits is not None and traits.first_version is not None and traits.last_version is not None:
            versions = _span(traits.first_version, traits.last_version)
        table.add_row(
            rollout.rollout_id[:ID_CHARACTERS],
            str(rollout.group),
            f"{rollout.slot}" + (f".{rollout.attempt}" if rollout.attempt else ""),
            MISSING if rollout.step is None else str(rollout.step),
            _reward(rollout.reward),
            MISSING if traits is None else count(traits.turns),
            MISSING if traits is None else count(traits.sampled_tokens),
            versions,
            _ended(rollout),
        )
    shown = f"{count(len(matches))} of {count(total)}"
    return Group(table, Text(shown if total > len(matches) else f"{count(total)} rollouts", DIM))


def group_table(rollouts: Sequence[ReadRollout]) -> RenderableType:
    """The rollouts of a group as a table, with their rewards."""
    first = rollouts[0]
    head = Text.assemble(
        (f"{first.purpose} group {first.group}", f"bold {ACCENT}"),
        (" · ", DIM),
        visible(first.template),
        (f" · epoch {first.epoch}" if first.purpose == TRAIN else "", DIM),
        (" · ", DIM),
        (first.group_state, WARN if first.group_state in (GroupState.OPEN, GroupState.DROPPED) else "default"),
    )
    if first.comparison is not None:
        head.append(" · ", DIM).append(_weighing(first.comparison))
    table = light_table("rollout", ">slot", ">reward", ">penalty", ">compared", ">advantage", ">sampled", "ended")
    for rollout in rollouts:
        compared = rollout.comparison
        table.add_row(
            rollout.rollout_id[:ID_CHARACTERS],
            str(rollout.slot) + (f".{rollout.attempt}" if rollout.attempt else ""),
            _reward(rollout.reward),
            MISSING if compared is None else decimal(compared.penalty, 3),
            MISSING if compared is None else decimal(compared.compared, 3),
            _advantages(rollout.turns),
            count(rollout.sampled_tokens),
            Text(visible(rollout.reason)[:REASON_CHARACTERS]),
        )
    return Group(head, Block("", Text(visible(first.prompt), DIM)), table)


def rollout_page(rollout: ReadRollout) -> RenderableType:
    """One rollout as text, turn by turn."""
    return Group(*_head(rollout), *(part for turn in rollout.turns for part in _turn(turn, rollout.step)))


class Block:
    """Text with a mark in front, wrapped to the available width."""

    def __init__(self, mark: str, text: Text, style: str = DIM) -> None:
        self._mark, self._text, self._style = mark, text, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - len(self._mark), 1)
        for index, line in enumerate(self._text.wrap(console, width)):
            yield Text.assemble((self._mark if index == 0 else " " * len(self._mark), self._style), line)


def _beside(census: Census) -> Text:
    """Counts of the outcomes other than graded, and of rollouts with summaries and hints; without zeros."""
    troubles = [
        (census.outcomes[outcome], str(outcome)) for outcome in RolloutOutcome if outcome is not RolloutOutcome.GRADED
    ]
    marks = [(census.summaries, "with summaries"), (census.hints, "with hints")]
    words = [Text(f"{count(number)} {name}", WARN) for number, name in troubles if number]
    return Text(", ").join([*words, *(Text(f"{count(number)} {name}") for number, name in marks if number)])


def _reason_lines(reasons: Reasons) -> Iterator[RenderableType]:
    for status, reason, number in reasons:
        style = "default" if status is RolloutStatus.GRADED else WARN
        text = visible(reason).replace("\n", " ") or MISSING
        yield Block(f"{count(number):>8}  ", Text.assemble((f"{status} ", DIM), (text, style)))


def _ended(rollout: RolloutMatch) -> Text:
    """The finish reason of a rollout, and remarks."""
    text = visible(rollout.reason).replace("\n", " ")
    text = text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 1] + "…"
    words = [Text(text or str(rollout.status), "default" if rollout.status is RolloutStatus.GRADED else WARN)]
    traits = rollout.traits
    if traits is not None and traits.summaries:
        words.append(Text("1 summary" if traits.summaries == 1 else f"{traits.summaries} summaries"))
    if traits is not None and traits.hints:
        words.append(Text("1 hint" if traits.hints == 1 else f"{traits.hints} hints"))
    if rollout.disposition is Disposition.QUARANTINE:
        words.append(Text(f"quarantined: {visible(rollout.cause)}", WARN))
    return Text(", ", DIM).join(words)


def _span(first: int, last: int) -> str:
    return f"v{first}" if first == last else f"v{first}–{last}"


def _reward(reward: float | None) -> Text:
    if reward is None:
        return Text(MISSING, DIM)
    return Text(f"{reward:.3f}".replace("-", "−"), GOOD if reward > 0 else "default")


def _signed(value: float) -> str:
    return "0" if abs(value) < 0.0005 else f"{value:+.3f}".replace("-", "−")


def _advantages(turns: Sequence[ReadTurn]) -> str:
    """One number if all turns have the same advantage, else the range from lowest to highest."""
    values = sorted({turn.advantage for turn in turns if turn.advantage is not None})
    if not values:
        return MISSING
    return _signed(values[0]) if len(values) == 1 else f"{_signed(values[0])} … {_signed(values[-1])}"


def _weighing(compared: ReadComparison) -> str:
    """Number of compared rollouts, and the group's weight."""
    missing = (("quarantined", compared.quarantined), ("lost", compared.lost))
    words = f"{compared.rollouts} compared" + "".join(f", {number} {name}" for name, number in missing if number)
    if compared.weight != 1:
        words += f": advantages × {compared.weight:.4g}"
    return words + ("" if compared.has_signal else ", no signal among them: nothing is trained on")


def _head(rollout: ReadRollout) -> Iterator[RenderableType]:
    where = f"{rollout.purpose} group {rollout.group}, slot {rollout.slot}" + f", attempt {rollout.attempt}" * bool(
        rollout.attempt
    )
    yield Text.assemble(
        ("━━ rollout ", DIM), (rollout.rollout_id, f"bold {ACCENT}"), (" · ", DIM), where, (" · ", DIM),
        "no step" if rollout.step is None else f"step {rollout.step}",
    )  # fmt: skip
    yield Block("task      ", Text.assemble(visible(rollout.template), (f"  {rollout.task_id}", DIM)))
    ended = Text.assemble((rollout.status, "default" if rollout.status == RolloutStatus.GRADED else WARN), (" · ", DIM))
    ended.append(f"{visible(rollout.reason)} · {rollout.seconds:.2f} s")
    for name, calls in rollout.counts.items():
        ended.append(" · ", DIM).append(f"{calls} {visible(name)}")
    yield Block("ended     ", ended)
    if rollout.reward is not None:
        yield Block("reward    ", _summed(rollout))
    recorded = [part for part in rollout.parts if part.worth is None]
    if recorded:
        yield Block("recorded  ", _recorded(recorded))
    if rollout.comparison is not None:
        yield Block("compared  ", _compared(rollout, rollout.comparison))
    if rollout.observed is not None:
        yield Block("user      ", _observed(rollout.observed))
    if rollout.verdict is not None and (rollout.verdict.disposition is not Disposition.KEEP or rollout.verdict.flags):
        facts = rollout.verdict.disposition is Disposition.KEEP
        text = Text(rollout.verdict.disposition, "default" if facts else WARN)
        text.append("" if facts else f", by {visible(rollout.verdict.reason)}; graded {rollout.verdict.graded:g}")
        yield Block("verdict   ", text.append(f"  {', '.join(rollout.verdict.flags)}", DIM))
    for vote in rollout.votes:
        score = "cannot tell" if vote.score is None else f"{vote.score} of {vote.lowest}–{vote.highest}"
        yield Block("judge     ", Text.assemble(f"{vote.aspect} {score}", (f"  {visible(vote.reason)}", DIM)))
    if rollout.branch_of is not None:
        yield Block("branch    ", Text(f"of {rollout.branch_of} from turn {rollout.branch_turns} on"))
    for note in rollout.notes:
        yield Block("note      ", Text(visible(note), WARN))
    yield Text()


def _observed(observed: ObservedSession) -> Text:
    """The user, the arm that answered, and the user's feedback."""
    session = observed.observation
    text = Text(visible(session.user)).append(f"  arm {visible(session.arm)}", DIM)
    answers = [f"{visible(part)} {' '.join('–' if value is None else f'{value:g}' for value in values)}"
               for part, values in observed.answers.items()]  # fmt: skip
    text.append(f"  {', '.join(answers) or 'nothing was answered'}")
    if session.weight != 1:
        text.append(f"  weight {session.weight:g}", DIM)
    if session.propensity < 1:
        text.append(f"  answered {session.propensity:.0%} of the time", DIM)
    return text


def _summed(rollout: ReadRollout) -> Text:
    """The reward as the sum of its parts, or the scored sum if a verdict replaced it."""
    assert rollout.reward is not None
    text = Text(f"{rollout.reward:.3f}".replace("-", "−"), f"bold {GOOD}" if rollout.reward > 0 else "bold")
    summed = [part for part in rollout.parts if part.worth is not None]
    counts = rollout.verdict is None or rollout.verdict.disposition is Disposition.KEEP
    for index, part in enumerate(summed):
        first = " = " if counts else " by its verdict; scored at "
        text.append("  " if index else first, DIM)
        text.append(_signed(part.worth or 0.0)).append(f" {visible(part.name)} ({part.value:.4g})", DIM)
    return text


def _compared(rollout: ReadRollout, compared: ReadComparison) -> Text:
    """The compared reward, and the rollout's share of the step's loss tokens."""
    text = Text(decimal(compared.compared, 3))
    if compared.penalty:
        text.append(f" = {decimal(rollout.reward, 3)} − {decimal(compared.penalty, 3)} for effort", DIM)
    text.append(" · ", DIM).append(_weighing(compared))
    if compared.has_signal:
        tokens = sum(turn.loss_tokens or 0 for turn in rollout.turns)
        of = "" if compared.step_tokens is None else f" of its step's {count(compared.step_tokens)}"
        text.append(" · ", DIM).append(f"{count(tokens)}{of} loss tokens")
    return text


def _recorded(parts: Sequence[ReadPart]) -> Text:
    """Other measurements, without those that are 0."""
    marks = [part for part in parts if part.value]
    words = [Text.assemble((f"{visible(part.name)} ", DIM), f"{part.value:.4g}".replace("-", "−")) for part in marks]
    rest = [Text("all else 0" if marks else "all 0", DIM)] if len(marks) < len(parts) else []
    return Text(" · ", DIM).join([*words, *rest])


def _turn(turn: ReadTurn, step: int | None) -> Iterator[RenderableType]:
    yield _turn_head(turn, step)
    if turn.hint is not None:
        yield Block(
            "  hint ", Text.assemble(visible(turn.hint.text), (f"  says {visible(turn.hint.source)}", DIM)), WARN
        )
    yield Block("  < ", Text(visible(turn.heard), DIM))
    yield Block("  > ", Text(visible(turn.said)), f"bold {ACCENT}")
    if turn.summary is not None:
        yield from _summary(turn.summary)
    if turn.tokens is not None:
        yield Padding(_token_table(turn.tokens), (0, 0, 0, 4), expand=False)
    yield Text()


def _turn_head(turn: ReadTurn, step: int | None) -> RenderableType:
    """``turn 3 · act · after 2 · prompt 120 (12 new) · sampled 8 of v4 (1 behind) · A +0.250 on 8``."""
    words = [turn.kind]
    if turn.continues is None and turn.number:
        words.append("a new context")
    elif turn.continues is not None and turn.continues != turn.number - 1:
        words.append(f"continues turn {turn.continues}")
    words.append(f"prompt {count(turn.prompt_tokens)} ({count(turn.new_tokens)} new)")
    words.append(f"sampled {count(turn.sampled_tokens)}{_by_version(turn.versions, step)}")
    if turn.advantage is not None and turn.loss_tokens is not None:
        words.append(f"A {_signed(turn.advantage)} on {count(turn.loss_tokens)}" if turn.loss_tokens else "no loss")
    if turn.reward is not None:
        words.append(f"earned {_signed(turn.reward)}")
    if turn.finish != "stop":
        words.append(f"cut: {turn.finish}")
    remarks = Text(" · ", DIM).join(Text(word, WARN if word.startswith("cut") else "default") for word in words)
    return Block(f"turn {turn.number} · ", remarks, f"bold {ACCENT}")


def _by_version(versions: Mapping[int, int], step: int | None) -> str:
    """The versions that sampled a turn: `` of v4 (1 behind)``, or the number of tokens of each."""

    def named(version: int) -> str:
        return f"v{version}" if step is None else f"v{version} ({step - 1 - version} behind)"

    match list(versions.items()):
        case []:
            return ""
        case [(version, _)]:
            return f" of {named(version)}"
        case several:
            return ": " + ", ".join(f"{tokens} of {named(version)}" for version, tokens in several)


def _summary(summary: ReadSummary) -> Iterator[RenderableType]:
    after = (
        "no context follows"
        if summary.tokens_after is None
        else f"the next context begins with {count(summary.tokens_after)}"
    )
    line = f"{count(summary.tokens_before)} tokens of context, of which is left:"
    yield Block("  ├ ", Text.assemble((line, DIM), (f" {after}", DIM)))
    yield Block("  │ ", Text(visible(summary.text), GOOD))
    marks = {True: ("✓ ", GOOD), False: ("✗ ", WARN), None: ("· ", DIM)}
    facts = Text("  ").join(Text.assemble(marks[is_kept], visible(fact)) for fact, is_kept in summary.facts.items())
    if summary.facts:
        seen = [is_kept for is_kept in summary.facts.values() if is_kept is not None]
        facts.append(f"  {sum(seen)} of {len(seen)} seen facts kept", DIM)
    yield Block("  └ ", facts)


def _token_table(tokens: Iterable[ReadToken]) -> RenderableType:
    """One line per token, without columns that have no values."""
    tokens = tuple(tokens)
    columns = ["text", ">id", ">logprob", ">p", ">version", ">mismatch"]
    has_kept, has_routes = (any(getattr(token, name) is not None for token in tokens) for name in ("kept", "routes"))
    table = light_table(*columns, *([">kept"] if has_kept else []), *(["routes"] if has_routes else []))
    for token in tokens:
        cells = [
            repr(token.text),
            str(token.token_id),
            f"{token.logprob:.4f}".replace("-", "−"),
            percent(min(1.0, 2.718281828459045**token.logprob)),
            f"v{token.version}",
            small(token.mismatch),
        ]
        cells += [MISSING if token.kept is None else count(token.kept)] if has_kept else []
        cells += [_routes(token.routes)] if has_routes else []
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _routes(routes: tuple[tuple[int, ...], ...] | None) -> str:
    return MISSING if routes is None else " | ".join(",".join(map(str, layer)) for layer in routes)
