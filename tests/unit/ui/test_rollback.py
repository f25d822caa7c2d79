"""The way back in the page: refused without the right key and the right version, else answered by the process."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from etude.config.loading import default_recipe
from etude.releases.store import ReleaseStore
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.release import ReleaseProcess
from etude.run.routing_tables import RoutingTables
from etude.run.weight_log import open_log
from etude.types import Json
from etude.ui.runs import RunList
from etude.ui.server import ui_app
from released_runs import release

TOKEN = "a-token"
SETTINGS = ("release.every_steps=1", "release.canary_shares=[0.5]", "release.min_sessions=20", "release.min_users=10")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in which version 1 has replaced version 0 for its users."""
    folder = RunFolder.create(tmp_path / "run", default_recipe([*SETTINGS]))
    with closing(ReleaseStore.open(folder.ledger)) as store:
        release(store, 0, None)
        release(store, 1, 0)
    return folder


def ask(run: RunFolder, body: Json, key: str) -> tuple[int, str]:
    async def post() -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({"X-Etude-Key": key} if key else {})
        async with TestClient(TestServer(ui_app(RunList([run.path]), TOKEN))) as client:
            answer = await client.post("/api/runs/run/live/rollback", json=body, headers=headers)
            return answer.status, await answer.text()

    return asyncio.run(post())


def look(run: RunFolder) -> None:
    async def once() -> None:
        with closing(ReleaseStore.open(run.ledger)) as store:
            process = ReleaseProcess(run, store, open_log(run), store, measure=None)  # type: ignore[arg-type]
            await process.look()

    asyncio.run(once())


def states(run: RunFolder) -> dict[int, str]:
    with closing(ReleaseStore.open(run.ledger, read_only=True)) as store:
        return {release.version: str(release.state) for release in store.releases()}


def test_users_get_the_former_version_again(run: RunFolder) -> None:
    status, text = ask(run, {"version": 1, "by": "jane"}, run.key(KeyRole.RELEASE))
    assert (status, text) == (200, '{"request":1,"version":1,"by":"jane"}')
    look(run)
    assert states(run) == {0: "released", 1: "rolled_back"}
    table = RoutingTables.open(run).newest()
    assert table is not None
    assert table.live.version == 0
    with closing(ReleaseStore.open(run.ledger, read_only=True)) as store:
        assert store.moves()[-2].by == "jane"


@pytest.mark.parametrize("role", [None, KeyRole.ADMIN, KeyRole.PRODUCT])
def test_another_key_changes_nothing(run: RunFolder, role: KeyRole | None) -> None:
    status, text = ask(run, {"version": 1, "by": "jane"}, "" if role is None else run.key(role))
    assert status == 403
    assert "etude keys derive" in text
    look(run)
    assert states(run) == {0: "superseded", 1: "released"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"version": 0, "by": "jane"}, "version 0 is not what would be taken back now, 1 is"),
        ({"version": "1", "by": "jane"}, "as a whole number"),
        ({"version": 1, "by": " "}, "say who asks"),
        (None, "name the version"),
    ],
)
def test_what_is_not_meant_is_refused(run: RunFolder, body: Json, message: str) -> None:
    status, text = ask(run, body, run.key(KeyRole.RELEASE))
    assert status == 400
    assert message in text


def test_the_first_release_has_nothing_before_it(run: RunFolder, tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "first" / "run", default_recipe([*SETTINGS]))
    with closing(ReleaseStore.open(first.ledger)) as store:
        release(store, 0, None)
    status, text = ask(first, {"version": 0, "by": "jane"}, first.key(KeyRole.RELEASE))
    assert (status, "there is no earlier one" in text) == (400, True)


def test_a_request_for_a_version_that_users_no_longer_have_takes_back_no_other(run: RunFolder) -> None:
    assert ask(run, {"version": 1, "by": "jane"}, run.key(KeyRole.RELEASE))[0] == 200
    with closing(ReleaseStore.open(run.ledger)) as store:
        release(store, 2, 1)  # before the process has answered
    look(run)
    assert states(run)[2] == "released"
    with closing(ReleaseStore.open(run.ledger, read_only=True)) as store:
        assert store.requests()[0].outcome == "version 1 was taken back or replaced"
