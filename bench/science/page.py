"""``python -m bench.science.page``: docs/science.md and its plots, out of the committed results of `bench science`.

    results/NAME.json, one for each ablation that was measured ──▶ docs/science.md, docs/science/NAME.svg

Every figure of the page is one of these files'; the words around them are :mod:`bench.science.ablations`'s. A test
holds the page to the files.
"""

import json
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.science.ablations import ABLATIONS, ELSEWHERE, Ablation, Arm
from bench.tables import Row, results_of
from etude.dashboard.plots import Line, Points, line_plot, smooth
from etude.types import Json

RESULTS = Path(__file__).with_name("results")
DOCS = Path(__file__).parents[2] / "docs"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 220, 44, 150, 16, 30
"""Pixels of a plot: the whole, the space that lines have down, and the margins for ticks and labels."""
COLOURS = ("#1f6f8b", "#b4552d", "#6a8f3c", "#8a5a9e", "#77736c")
"""Colours of lines, the first arm's first."""
STYLE = """text { font: 12px system-ui, sans-serif; fill: #77736c; } .grid { stroke: #d8d4cc; }
.bound { stroke: #77736c; stroke-dasharray: 3 4; } text.bound { stroke: none; }
.curve * { fill: none; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
svg { overflow: visible; }
"""
HEAD = """# What learning depends on

<!-- Written by `python -m bench.science.page`; every figure is of bench/science/results. -->

These are ablations that papers on RL of language models report, measured with one bench and several seeds each. Each
section compares the published result with the result here, and reports differences. Every trial uses étude's own code
(engine, batches, losses, optimiser) in one process, `bench/science/laboratory.py`: a mixture of experts with a tenth of
a million parameters, mid-trained on sums, learns in eighty steps of 64 rollouts to work them out. So the directions of
effects may carry over to larger models; their sizes do not.

    python -m bench science --name staleness --json > bench/science/results/staleness.json    # minutes
    python -m bench.science.page                                                              # this page, its plots

Trials of one seed share their start, prompts and random numbers. A **difference** is paired by seed, with the interval
of Student's t over seeds at 95 %; all seeds have the same 256 held-out tasks, tried at temperature 1. A claim
**agrees** if the whole interval is on the published side (for *the same*: within two points), is **contradicted** if it
is on the other side, and otherwise is **not shown**: there are too few seeds, which does not make the claim wrong.

Some starts do not learn to add within their mid-training tokens. From such a start every arm ends at chance level, so
no difference could be seen. Therefore seeds whose start has a held-out loss above 0.4 nats per token are excluded and
named. The rule was made after two such seeds had been seen, and applies to all ablations.

The learning rate is 1e-3. An earlier version of this page used 3e-3. There some trials of every arm got stuck in a
policy that gets some sums wrong, and a single such trial decided a comparison of three to eighteen seeds. 1e-3 was
chosen by the spread of fresh rollouts and of rollouts four versions old on three seeds (201, 202, 210) that no ablation
uses.

The tables of arms show means over the seeds that all arms have: the start's cross-entropy in nats per token and its
pass rate; after RL the sampled and greedy pass rates, tokens per answer, entropy in nats per token, and the mismatch k3
of trainer and engine with the same weights; and the number of seeds on which learning broke (rewards fell below half of
their best, both over five steps).
"""


def render(results: Mapping[str, Mapping[str, Json]]) -> dict[str, str]:
    """The files of the page, by their paths in the folder of documents, out of bench objects by their names."""
    measured = {name: ablation for name, ablation in ABLATIONS.items() if name in results}
    sections = [_section(name, ablation, results[name]) for name, ablation in measured.items()]
    parts = [HEAD, *sections, *_unmeasured(results), _elsewhere()]
    files = {f"science/{name}.svg": plot(ablation, results[name]) for name, ablation in measured.items()}
    return {"science.md": "\n".join(parts), **files}


def committed() -> dict[str, dict[str, Json]]:
    """The bench objects that are kept beside the bench."""
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}


def plot(ablation: Ablation, result: Mapping[str, Json]) -> str:
    """An SVG file: the mean over seeds, of arms that are points of a line across ``axis``, of all others over steps."""
    rows = _shared(results_of(result))
    points: dict[str, list[tuple[float, float]]] = {}
    lines: list[tuple[str, Points]] = []
    for arm in ablation.arms:
        own = _rows_of(arm, rows)
        if own and arm.line:
            points.setdefault(arm.line, []).append((arm.x, statistics.fmean(_number(row, "sampled") for row in own)))
        elif own and ablation.axis == "steps":
            lines.append((arm.name, _curve(own)))
    lines += [(name, sorted(placed)) for name, placed in points.items()]
    apart = [arm.name for arm in ablation.arms if points and not arm.line]
    bound = [
        (statistics.fmean(_number(row, "sampled") for row in rows if row["contestant"] == name), name) for name in apart
    ]
    drawn = [Line(points=placed, label=name, style=f"line{place}") for place, (name, placed) in enumerate(lines)]
    return _svg(line_plot(ablation.title, drawn, height=HEIGHT, bound=bound[0] if bound else None, axis=ablation.axis))


def _curve(rows: Sequence[Row]) -> Points:
    """The mean reward of each step's rollouts over seeds, smoothed."""
    rewards = [row["rewards"] for row in rows]
    listed = [[float(str(reward)) for reward in one] for one in rewards if isinstance(one, list)]
    return smooth([(float(step), statistics.fmean(each)) for step, each in enumerate(zip(*listed, strict=True), 1)])


def _svg(figure: str) -> str:
    """An SVG file from a figure of a page: the contents of its ``<svg>``, with margins and colours."""
    start, end = figure.index("<svg"), figure.rindex("</svg>") + len("</svg>")
    inner = WIDTH - LEFT - RIGHT
    nested = figure[start:end].replace('width="100%"', f'x="{LEFT}" y="{TOP}" width="{inner}"', 1)
    colours = "".join(
        f"polyline.line{place}, path.line{place} {{ stroke: {colour}; }} text.end.line{place} {{ fill: {colour}; }}\n"
        for place, colour in enumerate(COLOURS)
    )
    whole = HEIGHT + TOP + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{whole}" viewBox="0 0 {WIDTH} {whole}">\n'
        f'<style>{STYLE}{colours}</style>\n<rect width="100%" height="100%" fill="#fcfbf8"/>\n{nested}\n</svg>\n'
    )


def _section(name: str, ablation: Ablation, result: Mapping[str, Json]) -> str:
    """Section of an ablation: question, published results, plot, claims, arms, and place and time."""
    lines = [
        f"\n## {ablation.title}\n",
        _wrapped(ablation.question),
        _wrapped(f"**Published.** {ablation.published}"),
        *([_wrapped(f"**Here.** {ablation.reading}")] if ablation.reading else []),
        f"![{ablation.title}: {_up(ablation)} across {ablation.axis}](science/{name}.svg)\n",
        *_table(("claim", "difference", "interval", "seeds", "verdict"), map(_claim, results_of(result, "claims"))),
        "",
        *_table(
            ("arm", "loss of the start", "before", "sampled", "greedy", "tokens", "entropy", "k3", "broke"),
            _arms(ablation.arms, _shared(results_of(result))),
        ),
        "",
        *_goals(result),
        f"{_steps(result)} steps; {_skipped(result)}{_machine(result)}.",
    ]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 letters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _up(ablation: Ablation) -> str:
    return "mean reward of each step's rollouts" if ablation.axis == "steps" else "held-out pass rate after RL"


def _claim(row: Row) -> tuple[str, ...]:
    low, high = row["interval"] if isinstance(row["interval"], list) else (None, None)
    interval = "–" if low is None else f"{_signed(low)} … {_signed(high)}"
    return str(row["claim"]), _signed(row["difference"]), interval, str(row["seeds"]), f"**{row['verdict']}**"


def _arms(arms: Sequence[Arm], rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Means over the seeds that all arms have."""
    for arm in arms:
        if own := _rows_of(arm, rows):
            mean = {name: statistics.fmean(_number(row, name) for row in own) for name in AVERAGED}
            broke = sum(row["broken_at"] is not None for row in own)
            yield (
                arm.name,
                *(f"{mean[name]:.3f}" for name in ("start_loss", "before", "sampled", "greedy")),
                f"{mean['tokens']:.1f}",
                f"{mean['entropy']:.2f}",
                f"{mean['k3']:.1e}" if mean["k3"] else "0",
                f"{broke} of {len(own)}",
            )


AVERAGED = ("start_loss", "before", "sampled", "greedy", "tokens", "entropy", "k3")
"""Figures of an arm that are means over seeds."""


def _goals(result: Mapping[str, Json]) -> Iterator[str]:
    goals = result["goals"]
    assert isinstance(goals, dict)
    for name, goal in goals.items():
        assert isinstance(goal, dict)
        interval = goal["interval"] if isinstance(goal.get("interval"), list) else []
        assert isinstance(interval, list)
        shown = " … ".join(map(_signed, interval)) or "–"
        met = "met" if goal["met"] else "not shown"
        yield f"Goal, {name}: {goal['sense']} {goal['goal']}; {_signed(goal['value'])}, interval {shown}: **{met}**.\n"


def _unmeasured(results: Mapping[str, object]) -> Iterator[str]:
    """Ablations without results."""
    missing = [f"{ablation.title} (`--name {name}`)" for name, ablation in ABLATIONS.items() if name not in results]
    if missing:
        yield "\n## Not measured yet\n\n" + _wrapped(
            f"The bench has these ablations, but no committed results: {'; '.join(missing)}."
        )


def _elsewhere() -> str:
    """Ablations that other benches measure, as whole runs."""
    lines = ["\n## Measured as whole runs\n", "Other benches measure what a single process cannot show.\n"]
    lines += _table(("question", "published", "bench", "measured in"), ELSEWHERE)
    return "\n".join([*lines, ""])


def _table(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def _shared(rows: Sequence[Row]) -> list[Row]:
    """The rows of those seeds on which every arm was trained: means of others could not be compared."""
    arms = {str(row["contestant"]) for row in rows}
    counts = Counter(str(row["seed"]) for row in rows)
    return [row for row in rows if counts[str(row["seed"])] == len(arms)]


def _rows_of(arm: Arm, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["contestant"] == arm.name]


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))


def _signed(value: Json) -> str:
    return "–" if value is None else f"{float(str(value)):+.3f}".replace("-", "−")


def _steps(result: Mapping[str, Json]) -> int:
    first = results_of(result)[0]["rewards"]
    assert isinstance(first, list)
    return len(first)


def _skipped(result: Mapping[str, Json]) -> str:
    """Seeds that were left out."""
    skipped = result["skipped_seeds"]
    assert isinstance(skipped, list)
    return f"left out: seed {', '.join(map(str, skipped))}; " if skipped else ""


def _machine(result: Mapping[str, Json]) -> str:
    """Machine, date and commit of the measurement."""
    machine = result["machine"]
    assert isinstance(machine, dict)
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}"
    return f"{where}; {str(result['date'])[:10]}, commit {result['commit']}"


def main() -> None:
    """Write the page and its plots."""
    for name, text in render(committed()).items():
        file = DOCS / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
