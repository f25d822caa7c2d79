"""The live page in Debian's Chromium: a run is watched from its first step to its end, with every tab.

axe-core looks for problems of people with a screen reader, a keyboard or weak eyes. The page's own content security
policy is in force, and a violation of it fails the test.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from bench.ui.events import write_events
from bench.ui.rollouts import write_run
from bench.ui.serving import CHROMIUM, serving
from etude.errors import ExitCode
from tiny_runs import DEADLINE_S, make_tiny_start

UI, STATIC = (Path(__file__).parents[2] / part for part in ("ui", "src/etude/ui/static"))
TABS = ("run", "compare", "timeline", "rollouts", "weights")
STEPS = 24
PHONE = {"width": 360, "height": 740}
WAIT_MS = 60_000
AXE = """async () => {
  const found = await axe.run(document, { resultTypes: ['violations'] });
  return found.violations.map((each) => `${each.id}: ${each.nodes.map((node) => node.html).join(' | ')}`);
}"""

pytestmark = pytest.mark.heavy("Chromium: apt-get install chromium", missing=not Path(CHROMIUM).is_file())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the page's project with its packages, in which it was checked, tested and built."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: apt-get install npm")
    place = tmp_path_factory.mktemp("page")
    shutil.copytree(UI, place / "ui", ignore=shutil.ignore_patterns("node_modules", ".tests"))
    (place / "src/etude/ui/static").mkdir(parents=True)
    install = ("ci", "--ignore-scripts", "--no-fund", "--no-audit")
    for command in (install, ("run", "check"), ("test",), ("run", "build")):
        result = subprocess.run(["npm", *command], cwd=place / "ui", capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"npm {' '.join(command)}\n{result.stdout}{result.stderr}"
    return place


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a made-up run that has ended."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", groups=16)
    write_events(folder, STEPS, 300, evals=4)
    with serving(folder.path) as (_, url):
        yield url


@contextmanager
def opened(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """A page; the test fails on any script error or policy violation."""
    context, errors = browser.new_context(**options), list[str]()  # type: ignore[arg-type]  # options of a context
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    assert [error for error in errors if "ERR_" not in error] == [], "but for a server that has ended"


def show(page: Page, tab: str) -> None:
    """Open a tab of the current run, and wait until it is drawn."""
    page.click(f"nav a[href$='/{tab}']")
    page.wait_for_selector(f"nav a[href$='/{tab}'][aria-current=page]")
    page.wait_for_timeout(500)


def test_the_bundle_is_what_the_source_builds(built: Path) -> None:
    made = built / "src/etude/ui/static"
    assert {file.name for file in made.iterdir()} == {file.name for file in STATIC.iterdir()}
    for file in made.iterdir():
        assert file.read_bytes() == (STATIC / file.name).read_bytes(), f"{file.name} is not built of ui/: make ui"


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_run_is_watched_from_its_first_step_to_its_end(browser: Browser, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(
        f"""
        name = "watched"
        tasks.options.kinds = ["arith"]
        model.checkpoint = "{make_tiny_start(tmp_path / "start")}"
        midtrain.tokens = 0
        rollouts = {{ groups_per_step = 4, group_size = 4, max_staleness = 1, concurrency = 16 }}
        trainer.steps = {STEPS}
        eval = {{ tasks = 8, every_steps = 8 }}
        harness.options.max_turns = 4
        log.page = true
        """,
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "etude", "run", str(recipe), "--out", str(tmp_path / "run")]
    with ExitStack() as stack:
        run = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(run.terminate)
        assert run.stdout is not None
        url = next(line for line in run.stdout if line.startswith("page: ")).split()[1]
        page = stack.enter_context(opened(browser, url))
        page.wait_for_selector("header.top")
        states = list(_states(page))
        assert run.wait(DEADLINE_S) in (0, ExitCode.NOTHING_LEARNT), "so small a model may learn nothing"
    steps = [step for step, _, _ in states]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 4, "it was seen on its way"
    assert steps[-1] == STEPS
    assert len({words for _, words, _ in states}) >= 3, "what the curve says changed"
    assert len({picture for _, _, picture in states}) >= 4, "and so did what is drawn"
    assert "step 0" in states[-1][1] and f"step {STEPS}" in states[-1][1], "held-out tasks before and after"


def _states(page: Page) -> Iterator[tuple[int, str, str]]:
    """Step, words of the held-out curve and a digest of the reward's picture, until the run has ended."""
    has_ended = False
    while True:
        header = page.inner_text("header.top .progress")
        charts = page.locator(".run-hero .chart-canvas")
        step = re.search(r"step (\d+)", header)
        if step and charts.count() == 2:
            picture = page.evaluate("() => document.querySelectorAll('.run-hero canvas')[1].toDataURL()")
            yield int(step[1]), str(charts.first.get_attribute("aria-label")), str(hash(picture))
        if has_ended:
            return
        has_ended = "finished" in header or "stopped" in header
        page.wait_for_timeout(2000 if has_ended else 300)


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_a_tab(browser: Browser, built: Path, url: str, tab: str, scheme: str) -> None:
    axe = (built / "ui/node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
    with opened(browser, url, color_scheme=scheme) as page:
        page.wait_for_selector(".run-hero canvas")
        show(page, tab)
        page.evaluate(axe)
        assert page.evaluate(AXE) == []


@pytest.mark.parametrize("tab", TABS)
def test_a_phone_shows_a_tab_without_scrolling_sideways(browser: Browser, url: str, tab: str) -> None:
    with opened(browser, url, viewport=PHONE) as page:
        page.wait_for_selector(".run-hero canvas")
        show(page, tab)
        assert page.evaluate("() => document.scrollingElement.scrollWidth") <= PHONE["width"]


def test_a_chart_is_read_and_zoomed_by_keys_and_by_mouse(browser: Browser, url: str) -> None:
    with opened(browser, url) as page:
        chart = page.locator(".run-hero figure").first
        canvas = chart.locator(".chart-canvas")
        canvas.focus()
        page.keyboard.press("End")
        assert f"step {STEPS}" in canvas.locator("[aria-live]").inner_text()
        assert f"step {STEPS}" in chart.locator(".chart-legend").inner_text()
        page.keyboard.press("+")
        chart.get_by_role("button", name="Show all").wait_for()
        page.keyboard.press("Escape")
        chart.get_by_role("button", name="Show all").wait_for(state="detached")
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80, steps=5)
        page.mouse.up()
        assert page.get_by_role("button", name="Show all").count() > 4, "charts over steps are zoomed together"
        chart.get_by_role("button", name="Show all").click()
        chart.get_by_role("button", name="Table").click()
        assert chart.locator("tbody tr").count() == 5, "a row for each evaluation"
