"""A run in the terminal: one panel while it is active, one table when it is done.

Owns the layout for people: 100 columns by 30 lines, complete at 80 columns. Every figure is from
:class:`~etude.dashboard.run_metrics.RunMetrics` or from the report; nothing is measured here. Each row has a fixed
position, with a dash until it has a value.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile, zip_longest
from typing import TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.panel import Panel
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from etude.config.recipe import RunConfig
from etude.dashboard import formatting
from etude.dashboard.calls import in_words, reported_turns
from etude.dashboard.formatting import number_at
from etude.dashboard.heldout import Comparison, about_errors, comparison, full_marks, pays_fractions
from etude.dashboard.learning import ends, shares, warnings
from etude.dashboard.run_metrics import PHASES, TRAIN, RunMetrics, Tally, total
from etude.dashboard.text import PREPARES, live, outage_lines, silence_line, summary
from etude.telemetry.events import EvalDone
from etude.types import Json, RolloutStatus

RECENT_STEPS = 6
"""Steps over which pace and the trainer's load are averaged: enough to be stable, few enough to be current."""
RECENT_S = 30.0
"""Window of the engine's load."""
ACCENT, DIM, GOOD, WARN = "cyan", "bright_black", "green", "yellow"
_PHASE_NAMES = {"midtrain": "midtrain", "sft": "SFT", "eval-before": "eval", "rl": "RL", "eval-after": "eval"}
Row: TypeAlias = tuple[RenderableType, RenderableType, RenderableType]
"""Label, graph, text."""
ID_CHARACTERS = 8
"""Characters of a shown rollout id: enough to be unique among millions; ``--rollout`` accepts a prefix."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def render(run: RunMetrics, config: RunConfig, now_s: float, page: str = "") -> RenderableType:
    """The run at Unix time ``now_s``, as one panel. ``page`` is the address of its page, if it has one."""
    rows = Table.grid(padding=(0, 2), expand=True)
    rows.add_column(style=DIM, width=9, no_wrap=True)
    rows.add_column(ratio=1, no_wrap=True)
    rows.add_column(ratio=2)
    for row in _phase_rows(run, config):
        rows.add_row(*row)
    rows.add_row()
    for row in (
        _trainer_row(run),
        _engine_row(run),
        _staleness_row(run, config),
        _mismatch_row(run, config),
        _weights_row(run),
        _rollouts_row(run),
        _last_rollout_row(run, now_s),
        _stages_row(run),
        _processes_row(run),
        _memory_row(run),
        _errors_row(run, now_s),
        *([_alerts_row(run, now_s)] if config.alerts else []),
    ):
        rows.add_row(*row)
    for words in outage_lines(run, now_s):
        rows.add_row(Text("waits", WARN), "", Text(words, WARN))
    notices = [Text(notice, WARN) for notice in warnings(run)]
    if page:
        notices.append(Text.assemble(("page  ", DIM), (page, f"{ACCENT} link {page}"), overflow="fold"))
    return Panel(
        Group(_track(run, config, now_s), Text(), rows, *notices),
        title=Text.assemble(("étude ", f"bold {ACCENT}"), (f"{config.name} · seed {config.seed}", "default")),
        title_align="left",
        subtitle=_clock(run, config, now_s),
        subtitle_align="right",
        box=box.ROUNDED,
        border_style=DIM,
        padding=(1, 2),
    )


class LightTable(Table):
    """A table whose cells are plain text from any source: no markup, and no terminal control sequences."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row; a cell other than a string is shown unchanged."""
        shown = (Text(formatting.visible(cell)) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*shown, style=style, end_section=end_section)


def light_table(*names: str, broken: Sequence[str] = ()) -> LightTable:
    """Create columns with these names; a name with the prefix ``>`` is for numbers. Only the last column and those in
    ``broken`` wrap, without losing text.
    """
    table = LightTable(box=box.SIMPLE_HEAD, border_style=DIM, header_style=DIM, show_edge=False, pad_edge=False)
    table.collapse_padding = True
    for name in names:
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        whole = name != names[-1] and name not in broken
        table.add_column(name.lstrip(">"), justify=justify, no_wrap=whole, overflow="fold")
    return table


def final_table(report: Mapping[str, Json]) -> RenderableType:
    """Results of a finished run: the held-out gain, then its details."""
    gained = ">points gained" if comparison(report, "sampled").is_rate else ">reward gained"
    gains = light_table(
        f"{formatting.count(number_at(report, 'heldout.n'))} held-out tasks", ">before", ">after", gained
    )
    for mode in ("sampled", "greedy"):
        gains.add_row(mode, *_gain_cells(comparison(report, mode)))
        if marks := full_marks(report, mode):
            gains.add_row(Text(f"  {marks}", DIM))
    facts = Table.grid(padding=(0, 3))
    facts.add_column(style=DIM, no_wrap=True)
    facts.add_column()
    for label, text in summary(report):
        facts.add_row(label, text)
    return Panel(
        Group(*_verdict(report), gains, Text(about_errors(report), DIM), Text(), *_turns(report), facts),
        title=Text.assemble(("étude ", f"bold {ACCENT}"), (f"{report['name']} · seed {report['seed']}", "default")),
        title_align="left",
        box=box.ROUNDED,
        border_style=DIM,
        padding=(1, 2),
        expand=False,
    )


class Bar:
    """A horizontal bar as wide as its column, filled to ``share``."""

    def __init__(self, share: float) -> None:
        self._share = max(0.0, min(1.0, share))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled = round(self._share * options.max_width)
        yield Text.assemble(("━" * filled, ACCENT), ("━" * (options.max_width - filled), DIM))


class Sparkline:
    """A curve of values, as wide as its column."""

    def __init__(self, values: Sequence[float], style: str) -> None:
        self._values, self._style = values, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self._values, options.max_width), self._style)


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of ``values`` in at most ``width`` characters, lowest ``▁`` to highest ``█``."""
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)


def _track(run: RunMetrics, config: RunConfig, now_s: float) -> Text:
    """The phases in one line: ``✓ midtrain 3:12  ▸  ● RL 8:48  ▸  ○ eval``."""
    text = Text(no_wrap=True, overflow="ellipsis")
    left_out = [] if config.eval.enabled else ["eval-before", "eval-after"]
    left_out += [phase for phase in ("midtrain", "sft") if phase not in _imitation(config)]
    planned = [phase for phase in PHASES if phase not in left_out]
    for index, phase in enumerate(planned):
        seconds = run.phase_s(phase, until_s=None if run.phase == "done" else now_s)
        if index:
            text.append("  ▸  ", DIM)
        if run.phase == phase:
            text.append(f"● {_PHASE_NAMES[phase]} ", f"bold {ACCENT}").append(formatting.duration(seconds), ACCENT)
        elif seconds is not None:
            text.append("✓ ", GOOD).append(f"{_PHASE_NAMES[phase]} ").append(formatting.duration(seconds), DIM)
        else:
            text.append(f"○ {_PHASE_NAMES[phase]}", DIM)
    return text


def _clock(run: RunMetrics, config: RunConfig, now_s: float) -> Text:
    done = run.phase == "done"
    text = Text(f"elapsed {formatting.duration(run.total_s(None if done else now_s) if run.segments else 0.0)}")
    left_s = _left_s(run, config, now_s)
    if left_s is not None:
        text.append(" · about ", DIM).append(formatting.duration(left_s)).append(" left", DIM)
    if silence := silence_line(run, now_s):
        text.append(f" · {silence}", WARN)
    return text


def _left_s(run: RunMetrics, config: RunConfig, now_s: float) -> float | None:
    """Seconds until the run is done, once RL has a pace; the last evaluation should take as long as the first."""
    eval_s = run.phase_s("eval-before") if config.eval.enabled else 0.0
    if eval_s is None:
        return None
    if run.phase == "eval-after":
        return max(0.0, eval_s - (run.phase_s("eval-after", now_s) or 0.0))
    recent = run.steps[-RECENT_STEPS:]
    if run.phase != "rl" or len(recent) < 2:
        return None
    first_s, last_s = (run.phase_s("rl", recent[end].at_s) or 0.0 for end in (0, -1))
    pace_s = (last_s - first_s) / (len(recent) - 1)
    since_s = (run.phase_s("rl", now_s) or 0.0) - last_s
    return max(0.0, (config.trainer.steps - recent[-1].event.step) * pace_s - since_s) + eval_s


def _phase_rows(run: RunMetrics, config: RunConfig) -> list[Row]:
    """Phases of the run, in order."""
    rl = [_step_row(run, config), _reward_row(run), _signal_row(run)]
    if config.eval.enabled:
        rl = [_heldout_row(run, config, "before"), *rl, _heldout_row(run, config, "after")]
    return [*(_imitation_row(run, phase) for phase in _imitation(config)), *rl]


def _imitation(config: RunConfig) -> list[str]:
    """The imitation phases of a run."""
    return ["midtrain"] * bool(config.midtrain.tokens) + ["sft"] * bool(config.sft.file)


def _imitation_row(run: RunMetrics, phase: str) -> Row:
    timeline, name = run.imitation.get(phase), _PHASE_NAMES[phase]
    if not timeline:
        return name, Bar(0.0), Text(PREPARES, DIM) if run.phase == phase else _missing()
    now = timeline[-1].event
    losses = {"loss": now.loss, "action": now.action_loss}
    words = _words(
        *(f"{name} {value:.3f}" for name, value in losses.items() if value is not None),
        f"{formatting.brief(now.tokens_per_s)} tokens/s",
    )
    if run.phase == phase and now.tokens_per_s > 0:
        left_s = (now.steps - now.step) * now.tokens / max(now.step, 1) / now.tokens_per_s
        words.append(" · ", DIM).append(f"{formatting.duration(left_s)} left", DIM)
    return name, Bar(now.step / now.steps), words


def _heldout_row(run: RunMetrics, config: RunConfig, label: str) -> Row:
    tallies = [run.rollouts.get(f"{label}-{mode}", Tally()) for mode in ("sampled", "greedy")]
    graded = [tally.statuses[RolloutStatus.GRADED] for tally in tallies]
    result = run.evals.get(label)
    if result is not None:
        return f"{label} RL", Bar(1.0), _measured(result)
    if not any(tally.closed for tally in tallies):
        return f"{label} RL", Bar(0.0), _missing()
    words = _words(f"{graded[0]} sampled", f"{graded[1]} greedy, of {config.eval.tasks} each")
    failed = sum(tally.statuses[RolloutStatus.FAILED_INFRA] for tally in tallies)
    if failed:
        words.append(f" · {failed} failed", WARN)
    return f"{label} RL", Bar(sum(graded) / (2 * config.eval.tasks)), words


def _step_row(run: RunMetrics, config: RunConfig) -> Row:
    step = run.steps[-1].event.step if run.steps else 0
    words = Text.assemble(("step ", DIM), (f"{step}", "bold"), (f" of {config.trainer.steps}", DIM))
    if run.steps:
        words.append(" · ", DIM).append(" · ".join(live(run.steps[-1].event)))
    return "RL", Bar(step / config.trainer.steps), words


def _reward_row(run: RunMetrics) -> Row:
    if not run.steps:
        return "reward", "", _missing()
    rewards = [timed.event.metrics["reward_mean"] for timed in run.steps]
    words = Text.assemble(("mean ", DIM), (f"{rewards[-1]:.3f}", "bold"))
    if len(rewards) > 1:
        words.append(f" · {formatting.decimal(rewards[0], 3)} at first", DIM)
    return "reward", Sparkline(rewards, ACCENT), words


def _signal_row(run: RunMetrics) -> Row:
    """Groups of the newest step with a signal, and the finish reasons of its rollouts."""
    last = run.steps[-1].event if run.steps else None
    if last is None:
        return "signal", "", _missing()
    groups, ended = last.metrics["groups"], ends([last])
    learnt_from = groups - last.metrics["groups_without_signal"]
    resampled = last.metrics.get("groups_resampled")
    left_out = f", {resampled:.0f} more left out" if resampled else ""
    text = Text(f"in {learnt_from:.0f} of {groups:.0f} groups{left_out}", "default" if learnt_from else WARN)
    return "signal", text, _words(shares(ended)) if ended else _missing()


def _trainer_row(run: RunMetrics) -> Row:
    recent = [timed.event for timed in run.steps[-RECENT_STEPS:]]
    busy_s, wait_s = total(recent, "busy_s"), total(recent, "wait_s")
    if busy_s + wait_s <= 0:
        return "trainer", Bar(0.0), _missing()
    share, tokens = busy_s / (busy_s + wait_s), total(recent, "trained_tokens")
    rate = tokens / (busy_s + wait_s)
    return (
        "trainer",
        Bar(share),
        _words(f"{formatting.percent(share, 0)} busy", f"{formatting.brief(rate)} tokens/s trained"),
    )


def _engine_row(run: RunMetrics) -> Row:
    newest_s = run.engine[-1].at_s if run.engine else 0.0
    newest_first = takewhile(lambda timed: timed.at_s > newest_s - RECENT_S, reversed(run.engine))
    recent = [timed.event for timed in newest_first]
    window_s = sum(stats.window_s for stats in recent)
    if window_s <= 0:
        return "engine", Bar(0.0), _missing()
    share = sum(stats.busy_s for stats in recent) / window_s
    engines = run.engines.values()
    rate = len(engines) * sum(stats.generated_tokens for stats in recent) / window_s
    running, waiting = sum(stats.running for stats in engines), sum(stats.waiting for stats in engines)
    words = _words(f"{formatting.percent(share, 0)} busy", f"{formatting.brief(rate)} tokens/s", f"{running} running")
    if waiting:
        words.append(f" · {waiting} waiting", WARN)
    return "engine" if len(engines) == 1 else f"{len(engines)} engines", Bar(share), words


def _staleness_row(run: RunMetrics, config: RunConfig) -> Row:
    bound = config.rollouts.max_staleness
    recent = [timed.event for timed in run.steps[-RECENT_STEPS:]]
    tokens = total(recent, "staleness_tokens")
    if not tokens:
        return "staleness", "", _missing()
    mean, highest = (
        total(recent, "staleness_sum") / tokens,
        max(step.metrics.get("staleness_max", 0) for step in recent),
    )
    words = _words(f"mean {mean:.2f}", f"max {highest:.0f} of {bound} allowed")
    return "staleness", Bar(mean / bound if bound else 0.0), words


def _mismatch_row(run: RunMetrics, config: RunConfig) -> Row:
    compared = [timed.event.metrics for timed in run.steps if timed.event.metrics["mismatch_tokens"]]
    if not compared:
        return "mismatch", "", _missing()
    now, bound = compared[-1], config.numerics.warn_k3
    words = _words(f"k3 {formatting.small(now['k3'])}", f"max {formatting.small(now['mismatch_max'])}")
    if now["k3"] > bound:
        words.append(f" · above {formatting.small(bound)}", WARN)
    elif now["mismatch_equal"] == now["mismatch_tokens"]:
        words.append(" · equal to the last bit", GOOD)
    elif now["mismatch_pairs"]:
        words.append(" · ", DIM).append(
            f"{formatting.small_percent(now['mismatch_flips'] / now['mismatch_pairs'])} flips"
        )
    return "mismatch", Sparkline([step["k3"] for step in compared], DIM), words


def _weights_row(run: RunMetrics) -> Row:
    if not run.published:
        return "weights", "", _missing()
    newest = run.published[-1].event
    # The engine's word may come first: what it serves was published.
    served = min(run.swapped_to.values(), default=newest.version)
    version = f"v{max(newest.version, served)}"
    parts = [f"{newest.kind} {formatting.size(newest.size_bytes)} of {formatting.size(newest.state_bytes)}"]
    if run.swapped:
        swap = run.swapped[-1].event
        version += f", engine at v{served}" if served < newest.version else ", served"
        parts.append(f"pause {formatting.milliseconds(swap.pause_ms)}")
    words = _words(*parts)
    if run.changed.get(newest.version) is False:
        words.append(" · no change", WARN)
    return "weights", version, words


def _rollouts_row(run: RunMetrics) -> Row:
    tally = run.rollouts.get(TRAIN, Tally())
    failed, dropped = (tally.statuses[status] for status in (RolloutStatus.FAILED_INFRA, RolloutStatus.DROPPED))
    words = Text.assemble(
        (f"{failed} failed", WARN if failed else DIM), (" · ", DIM), (f"{dropped} dropped", WARN if dropped else DIM)
    )
    return "rollouts", f"{formatting.count(tally.statuses[RolloutStatus.GRADED])} graded", words


def _last_rollout_row(run: RunMetrics, now_s: float) -> Row:
    """The newest graded rollout: its id, reward and finish reason."""
    last = run.last_rollout
    if last is None:
        return "last", "", _missing()
    closed, ago = last.event, formatting.duration(now_s - last.at_s)
    turns = f"{closed.turns} turn{'s' * (closed.turns != 1)} in {formatting.duration(closed.seconds)}"
    words = _words(f"reward {formatting.decimal(closed.reward)}", closed.reason, turns)
    return "last", Text.assemble(closed.rollout_id[:ID_CHARACTERS], (f" {ago} ago", DIM)), words


def _stages_row(run: RunMetrics) -> Row:
    """Mean times of the newest rollouts in sandboxes and in grading."""
    if not any(run.stages):
        return "sandboxes", "", _missing()

    def mean(stage: str) -> str:
        times = [stages[stage] for stages in run.stages if stage in stages]
        if not times:
            return formatting.MISSING
        seconds = sum(times) / len(times)
        return formatting.milliseconds(1e3 * seconds) if seconds < 1 else f"{seconds:.1f} s"

    return (
        "sandboxes",
        f"start in {mean('sandbox')}",
        _words(f"tools {mean('tools')}", f"grading {mean('grading')}"),
    )


def _memory_row(run: RunMetrics) -> Row:
    if run.memory_bytes is None:
        return "memory", "", _missing()
    return "memory", formatting.size(run.memory_bytes), _words(f"{formatting.size(run.memory_bytes_max)} at most")


def _errors_row(run: RunMetrics, now_s: float) -> Row:
    """Failures of infrastructure and of sinks: their number and the newest reason."""
    last = run.last_failure
    if last is None:
        return "errors", "none", Text()
    words = Text(last.event, WARN, no_wrap=True, overflow="ellipsis")
    return "errors", Text(f"{run.errors}, {formatting.duration(now_s - last.at_s)} ago", WARN), words


def _alerts_row(run: RunMetrics, now_s: float) -> Row:
    """Number of firing rules, and the newest change of a rule that is shown on the page."""
    shown = [timed for timed in run.alerts.values() if "page" in timed.event.to]
    if not shown:
        return "alerts", "none", Text()
    firing, newest = sum(timed.event.firing for timed in shown), shown[-1]
    style = WARN if newest.event.firing else DIM
    words = Text(f"{newest.event.alert}: {newest.event.summary}", style, no_wrap=True, overflow="ellipsis")
    since = f"{formatting.duration(now_s - newest.at_s)} ago"
    return "alerts", Text(f"{firing} firing, {since}" if firing else f"over, {since}", style), words


def _processes_row(run: RunMetrics) -> Row:
    if not run.processes:
        return "processes", "", _missing()
    again = [name for name, started in run.processes.items() if started.restarts]
    words = Text(f"{run.restarts} restarted", WARN if run.restarts else DIM)
    words.append(f" ({', '.join(again)})" if again else "", DIM)
    if len(run.segments) > 1:
        words.append(f" · run resumed {len(run.segments) - 1}×", DIM)
    return "processes", f"{len(run.processes)} started", words


def _measured(result: EvalDone) -> Text:
    """An evaluation on one line: pass rates, or mean rewards if these are fractions."""
    text = Text()
    for mode, passed, error, rewards in (
        ("sampled ", result.sampled_pass, result.sampled_stderr, result.sampled_rewards),
        (" · greedy ", result.greedy_pass, result.greedy_stderr, result.greedy_rewards),
    ):
        text.append(mode, DIM)
        if pays_fractions(result):
            tried = [reward for reward in rewards if reward is not None]
            text.append(f"{sum(tried) / len(tried):.3f}", "bold").append(f" ({formatting.percent(passed, 0)} passed)")
        else:
            text.append(formatting.percent(passed), "bold").append(f" ± {100 * error:.1f}")
    return text


def _verdict(report: Mapping[str, Json]) -> list[RenderableType]:
    """The notice before all figures if nothing was learnt."""
    learning = report["learning"]
    notice = learning["nothing_learnt"] or learning["warning"] if isinstance(learning, dict) else None
    return [Text(str(notice), f"bold {WARN}"), Text()] if notice else []


def _turns(report: Mapping[str, Json]) -> list[RenderableType]:
    """The calls of sampled sessions, turn by turn, before and after."""
    before, after = reported_turns(report, "before"), reported_turns(report, "after")
    if not before and not after:
        return []
    table = light_table("calls, sampled", "before", "after")
    nothing: Mapping[str, float] = {}
    for turn, (earlier, later) in enumerate(zip_longest(before, after, fillvalue=nothing), start=1):
        table.add_row(f"turn {turn}", in_words(earlier), in_words(later))
    return [table, Text()]


def _words(*parts: str) -> Text:
    return Text(" · ", DIM).join(Text(part, "default") for part in parts)


def _missing() -> Text:
    return Text(formatting.MISSING, DIM)


def _gain_cells(figures: Comparison) -> tuple[Text, Text, Text]:
    before, after, gained, error = figures.before, figures.after, figures.gain, figures.stderr
    if gained is None or error is None:
        return Text(figures.value(before)), Text(figures.value(after)), _missing()
    low = figures.interval[0] if figures.interval else 0.0
    style = f"bold {GOOD if low > 0 else 'default' if gained >= 0 else WARN}"
    gain = Text.assemble((figures.change(gained), style), (f" ± {figures.error(error)}", DIM))
    return Text(figures.value(before)), Text(figures.value(after), "bold"), gain
