"""Pages of the site with the figures of the benches: one page per bench, and a table of every claim.

    bench/results/NAME.json ─┬─▶ measured/NAME.md     how it is measured, its goals, its figures
    (`bench NAME --json`)    └─▶ measured/index.md    every goal, met or not

A result is the object that a bench printed, unchanged. Its table is drawn by the bench itself.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import cast

from bench.__main__ import BENCHES
from etude.types import Json
from reference_pages import cell, plain

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
DOCS = RESULTS.parents[1] / "docs"
HEADER = """# Benchmarks

A page per bench, and a line per claim. Each figure was printed by `python -m bench NAME --json` and is committed in
`bench/results`, with its machine, date and commit. A goal that was missed is listed like one that was met. What RL
learns is measured by [the ablations](../science.md) and by the recipes.
"""

Result = Mapping[str, Json]


def measured_pages() -> Mapping[str, str]:
    """Path of the site → Markdown."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    single = {f"measured/{name}.md": "\n".join(_page(name, result)) for name, result in results.items()}
    return {"measured/index.md": "\n".join(_index(results)), **single}


def module_of(name: str) -> ModuleType:
    """The module of a bench."""
    return import_module(f"bench.{BENCHES[name][0]}")


def _index(results: Mapping[str, Result]) -> Iterator[str]:
    yield HEADER
    yield "| claim | figure | goal | met | bench |\n|---|---|---|---|---|"
    for name, result in results.items():
        for words, figure, goal, met in _goals(result):
            yield f"| {words} | {figure} | {goal} | {met} | [{name}]({name}.md) |"
    yield "\n## Benches without a committed result\n\nTheir figures, where there are any, are on the pages named.\n"
    yield "| bench | measures | figures |\n|---|---|---|"
    for name, (_, words) in BENCHES.items():
        if name not in results:
            yield f"| `{name}` | {cell(words)} | {_mentions(name)} |"


def _mentions(name: str) -> str:
    """Links to the pages that quote a bench."""
    quoted = re.compile(rf"python -m bench {name}\b")
    pages = [path.name for path in sorted(DOCS.glob("*.md")) if quoted.search(path.read_text(encoding="utf-8"))]
    return ", ".join(f"[{page.removesuffix('.md')}](../{page})" for page in pages)


def _page(name: str, result: Result) -> Iterator[str]:
    module, machine = module_of(name), cast(Result, result["machine"])
    about = plain(inspect.getdoc(module) or "").removeprefix(f"`bench {name}`: ")
    yield f"# {_sentence(BENCHES[name][1])}\n\n{_sentence(about)}\n"
    yield f"    {result['command']}\n"
    described = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in machine.items())
    yield f"{str(result['date'])[:10]}, commit `{result['commit']}`, {result['seconds']} seconds. {described}.\n"
    yield "## Goals\n\n| claim | figure | goal | met |\n|---|---|---|---|"
    for words, figure, goal, met in _goals(result):
        yield f"| {words} | {figure} | {goal} | {met} |"
    yield f"\n## Figures\n\n```text\n{module.table(result).rstrip()}\n```\n"


def _goals(result: Result) -> Iterator[tuple[str, str, str, str]]:
    """Meaning, figure, goal, and met or not, of each goal."""
    for goal in cast(Mapping[str, Result], result["goals"]).values():
        figure = "not measured" if goal["value"] is None else _number(goal["value"])
        interval = goal.get("interval")
        if isinstance(interval, list):
            figure += f" ({_number(interval[0])} to {_number(interval[1])})"
        words = cell(str(goal["meaning"]))
        if "reason" in goal:
            words += f" {_sentence(cell(str(goal['reason'])))}."
        yield words, figure, f"{goal['sense']} {_number(goal['goal'])}", "yes" if goal["met"] else "**no**"


def _sentence(text: str) -> str:
    """``text`` with a capital at its start, and all others as they are."""
    return text[:1].upper() + text[1:]


def _number(value: Json) -> str:
    return f"{float(str(value)):,.7g}"
