"""Take the pictures of the live page in docs/page: desktop, phone and dark, in Debian's Chromium.

    python -m tools.screenshots [RUN] [--out docs/page]

Without a run, of made-up ones (:mod:`bench.ui.events`): curves and comparisons, but no rollouts. The folder of a run
with live users gives all tabs. Nothing is measured here.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from bench.ui.events import stretch_time, write_events
from bench.ui.serving import CHROMIUM, serving
from etude.config.loading import default_recipe
from etude.run.folder import RunFolder

STEPS, SEEDS, HOURS = 400, 3, 0.8
DESKTOP, PHONE = (1280, 900), (390, 800)
SETTLED_MS = 2500
"""Time for a tab to be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """One picture."""

    name: str
    address: str
    """Tab and options behind the run, such as ``compare?way=greedy``."""
    size: tuple[int, int] = DESKTOP
    scheme: str = "light"
    click: str = ""
    """A link that is followed before the picture is taken; its name depends on the run."""


MADE_UP = (
    Shot(name="run", address="run"),
    Shot(name="run-dark", address="run?with=loop-s1,loop-s2", scheme="dark"),
    Shot(name="run-phone", address="run", size=PHONE),
    Shot(name="compare", address="compare?a=loop-s0:step-132&b=loop-s0:step-165"),
)
A_ROLLOUT = ".rollouts-table tbody tr >> nth=1"
REAL = (
    *(Shot(name=tab, address=tab) for tab in ("timeline", "weights")),
    Shot(name="rollouts", address="rollouts?purpose=live"),
    Shot(name="rollout", address="rollouts?purpose=live&sort=tokens", click=A_ROLLOUT, scheme="dark"),
    Shot(name="rollout-phone", address="rollouts?purpose=live", size=PHONE, click=A_ROLLOUT),
    Shot(name="live", address="live"),
    Shot(name="live-phone", address="live", size=PHONE, scheme="dark"),
)
"""Pictures of a run of `etude live`, such as `recipes/live/day.py` leaves."""


def main(arguments: Sequence[str]) -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "page")
    options = parser.parse_args(arguments)
    options.out.mkdir(exist_ok=True)
    with ExitStack() as stack:
        places = make_runs(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        browser = stack.enter_context(sync_playwright()).chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        shots = [("loop-s0", shot) for shot in MADE_UP]
        if options.run is not None:
            places, shots = [*places, options.run], [*shots, *((options.run.resolve().name, shot) for shot in REAL)]
        _, url = stack.enter_context(serving(*places))
        for run, shot in shots:
            take(browser, url, run, shot, options.out)
            print(options.out / f"{shot.name}.png")
    return 0


def make_runs(place: Path) -> list[Path]:
    """Made-up runs of one recipe with several seeds."""
    paths = [place / f"loop-s{seed}" for seed in range(SEEDS)]
    for seed, path in enumerate(paths):
        folder = RunFolder.create(path, default_recipe(['name="loop"', f"seed={seed}", f"trainer.steps={STEPS}"]))
        write_events(folder, STEPS, 20 * STEPS, seed=seed, evals=12)
        stretch_time(folder, HOURS)
    return paths


def take(browser: Browser, url: str, run: str, shot: Shot, out: Path) -> None:
    """Take one picture."""
    width, height = shot.size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=shot.scheme)  # type: ignore[arg-type]  # light or dark
    page.goto(f"{url}&/{run}/{shot.address}")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(SETTLED_MS)
    if shot.click:
        page.click(shot.click)
        page.wait_for_selector(".rollouts-turns")
        page.wait_for_timeout(SETTLED_MS)
    page.screenshot(path=out / f"{shot.name}.png")
    page.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
