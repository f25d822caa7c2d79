"""`bench ui`: the live page of a long run: opening it, filtering its rollouts, and what a page that stays open costs.

    a run of 10,000 steps and 100,000 rollouts ──▶ etude ui ──▶ Chromium: curves drawn; filters answered
                                      events go on ──▶ CPU seconds of the server with a page open

- ``open_s``: from the address to the curve and the rewards on their canvases, in a browser without a cache, of a server
  that was started a moment ago, with which its reading of the run begins. Beside it the same until each chart is drawn,
  and of a page that is loaded again.
- ``filter_s``: the slowest of some filters and orders of the table, from the query to the parsed answer of the server,
  asked in a page that has been drawn in whole.
- ``cpu_share``: CPU seconds of the server per second, while a page is open on a run that goes on: of a run that keeps
  one core busy.

Times are medians of some tries.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import MappingProxyType

from playwright.sync_api import Page, sync_playwright

from bench.report import Goal, envelope, heading
from bench.tables import draw, page, results_of
from bench.ui.events import SyntheticRun, write_events
from bench.ui.rollouts import SIZE, write_run
from bench.ui.serving import CHROMIUM, serving
from bench.usage import cpu_s, family
from etude.run.folder import RunFolder
from etude.telemetry.log import EventLog
from etude.types import Json

OPEN_S = Goal(
    "open_s",
    "at most",
    1,
    "Median seconds from the address of a long run to its first two charts, in a browser without a cache.",
)
FILTER_S = Goal(
    "filter_s", "at most", 0.3, "Seconds from a query of the table of rollouts to its answer; the slowest query."
)
CPU_SHARE = Goal(
    "cpu_share",
    "at most",
    0.01,
    "Processor seconds of the server per second, with a page open on a run that makes a step a second.",
)
FILTERS: Mapping[str, str] = MappingProxyType(
    {
        "newest": "",
        "failed a test": "reward=%3C1",
        "a reason": "reason=length",
        "a version, most tokens first": "version=300&sort=tokens",
        "oldest tokens first": "sort=staleness",
        "cheats, by reward": "hacked=1&sort=reward",
        "with a summary": "has_summary=1",
        "behind 50,000": "offset=50000",
    }
)
"""Name of a filter → its query."""
TRIES = 3
STEP_S = 1.0
"""Interval of the run's steps while the server's time is measured: shorter than in most runs."""
START_S = 60.0
LEAST_CHARTS = 12
"""Charts over steps below the first two."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options."""
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30, help="how long the server's CPU time is taken")
    parser.add_argument("--folder", type=Path, help="a run that is made there, and used again")
    parser.add_argument("--chromium", default=CHROMIUM, help="the browser")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure, and return the bench object."""
    started_s = time.perf_counter()
    with ExitStack() as stack:
        place = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        folder = RunFolder(place)
        if not folder.config_file.exists():
            write_run(place, options.rollouts // SIZE)
            write_events(folder, options.steps, options.rollouts)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        stack.callback(browser.close)
        opened, drawn, again = list[float](), list[float](), list[float]()
        for _ in range(TRIES):
            with serving(folder.path) as (_, url):
                tab = browser.new_page()
                opened.append(_open(tab, url))
                drawn.append(opened[-1] + _wait(tab, f".run-grid canvas >> nth={LEAST_CHARTS - 1}"))
                tab.wait_for_selector(".run-stats", timeout=START_S * 1000)  # the server is at rest again
                again.append(_open(tab, url))
                tab.close()
        with serving(folder.path) as (server, url):
            tab = browser.new_page()
            _open(tab, url)
            tab.wait_for_selector(".run-stats", timeout=START_S * 1000)  # as above
            filters = {name: _filter(tab, query) for name, query in FILTERS.items()}
            idle = _share(server, options.seconds / 3)
            busy = _share(server, options.seconds, folder, options.steps)
    times = {"open, first look": median(opened), "every chart, first look": median(drawn), "open again": median(again)}
    times |= {f"filter: {name}": seconds for name, seconds in filters.items()}
    shares = {"CPU, the run stands still": idle, "CPU, a step a second": busy}
    results: list[Json] = [{"case": case, "seconds": round(seconds, 3)} for case, seconds in times.items()]
    results += [{"case": case, "share": round(share, 4)} for case, share in shares.items()]
    goals: dict[str, Json] = {
        OPEN_S.name: OPEN_S.judge(median(opened)),
        FILTER_S.name: FILTER_S.judge_worst(filters),
        CPU_SHARE.name: CPU_SHARE.judge(busy),
    }
    figures = {"steps": options.steps, "rollouts": options.rollouts, "results": results, "goals": goals}
    return envelope("ui", time.perf_counter() - started_s, figures)


def table(result: dict[str, Json]) -> str:
    """Draw a bench object."""
    title = heading(result, f"{result['steps']} steps, {result['rollouts']} rollouts")
    return page(result, draw(title, results_of(result), ("case", "seconds", "share")))


def _open(tab: Page, url: str) -> float:
    """Seconds from the address to curves that are drawn."""
    tab.goto("about:blank")
    started_s = time.perf_counter()
    tab.goto(url)
    _wait(tab, ".run-hero canvas >> nth=1")
    return time.perf_counter() - started_s


def _wait(tab: Page, selector: str) -> float:
    """Seconds until something is on the page."""
    started_s = time.perf_counter()
    tab.wait_for_selector(selector, timeout=START_S * 1000)
    tab.evaluate("() => new Promise(requestAnimationFrame)")
    return time.perf_counter() - started_s


def _filter(tab: Page, query: str) -> float:
    """Seconds from a query to its answer in the page."""
    script = """async (query) => {
      const started = performance.now();
      const run = (await (await fetch('api/runs', HEADERS)).json())[0].id;
      const asked = performance.now();
      const response = await fetch(`api/runs/${run}/rollouts?limit=100&${query}`, HEADERS);
      if (!response.ok) throw new Error(await response.text());
      await response.json();
      return (performance.now() - asked) / 1000;
    }""".replace("HEADERS", "{ headers: { Authorization: `Bearer ${sessionStorage.getItem('etude-token')}` } }")
    return median(float(tab.evaluate(script, query)) for _ in range(TRIES))


def _share(server: int, seconds: float, folder: RunFolder | None = None, step: int = 0) -> float:
    """CPU seconds of the server per second, while a run stands still or continues from a step."""
    with ExitStack() as stack:
        writer = None
        if folder is not None:
            names = ("supervisor", "train", "rollouts", "serve")
            logs = {name: stack.enter_context(EventLog(folder.events, name)) for name in names}
            writer = SyntheticRun(step + 10_000, random.Random(1), logs)
        before_s, started_s = cpu_s(family(server)), time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            if writer is not None:
                step += 1
                writer.step(step, 10)
            time.sleep(STEP_S)
        return (cpu_s(family(server)) - before_s) / (time.perf_counter() - started_s)
