"""The Live tab's button in Debian's Chromium: used by keyboard, refused with a wrong key, which is not stored."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from bench.ui.serving import CHROMIUM, serving
from etude.config.loading import default_recipe
from etude.releases.store import ReleaseStore
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from released_runs import release

WAIT_MS = 60_000

pytestmark = pytest.mark.heavy("Chromium: apt-get install chromium", missing=not Path(CHROMIUM).is_file())


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", default_recipe(["release.every_steps=1"]))
    with closing(ReleaseStore.open(folder.ledger)) as store:
        release(store, 0, None)
        release(store, 1, 0)
    return folder


@pytest.fixture
def page(run: RunFolder) -> Iterator[Page]:
    with serving(run.path) as (_, url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(url)
        page.click("nav a[href$='/live']")
        yield page
        browser.close()


def test_a_version_is_taken_back_by_keys_alone(run: RunFolder, page: Page) -> None:
    button = page.get_by_role("button", name="Roll back version 1")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    confirm = dialog.get_by_role("button", name="Roll back version 1")
    page.keyboard.type("0")
    page.keyboard.press("Tab")
    page.keyboard.type("jane")
    page.keyboard.press("Tab")
    page.keyboard.type("not the key")
    assert confirm.is_disabled(), "another version was typed"
    dialog.get_by_label("Type the version").fill("1")
    page.get_by_label("Release key").press("Enter")
    dialog.get_by_role("alert").wait_for()
    assert "not the release key" in dialog.get_by_role("alert").inner_text()
    assert page.get_by_label("Release key").input_value() == "", "the key is gone with its request"
    page.keyboard.type(run.key(KeyRole.RELEASE))
    page.keyboard.press("Enter")
    dialog.wait_for(state="detached")
    page.get_by_role("status").filter(has_text="Asked for").wait_for()
    with closing(ReleaseStore.open(run.ledger, read_only=True)) as store:
        (request,) = store.requests()
    assert (request.by, request.version) == ("jane", 1)
    stored = page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert run.key(KeyRole.RELEASE) not in stored
