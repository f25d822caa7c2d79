"""The page's server: access, headers for browsers, the data of a run's views, and idle waiting."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from aiohttp import ClientSession, StreamReader, web
from aiohttp.test_utils import TestClient, TestServer

from bench.ui.events import write_events
from etude.config.loading import default_recipe
from etude.run.folder import RunFolder
from etude.telemetry.events import StepDone
from etude.telemetry.log import EventLog
from etude.types import Json
from etude.ui.page import listen, page_beside, page_url, serve_page
from etude.ui.runs import RunList, check_places
from etude.ui.server import ui_app
from waiting import WAIT_S

TOKEN = "a-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
STEPS = 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    place = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        folder = RunFolder.create(place / f"loop-s{seed}", default_recipe([f"seed={seed}", f"trainer.steps={STEPS}"]))
        write_events(folder, STEPS, 300, seed=seed, evals=3)
    return place


@asynccontextmanager
async def page(*places: Path) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    async with TestClient(TestServer(ui_app(RunList(places), TOKEN, tick_s=0.05))) as client:
        yield client


def answer(place: Path, path: str) -> Json:
    async def ask() -> Json:
        async with page(place) as client, client.get(f"/api{path}", headers=HEADERS) as response:
            body: Json = await response.json()
            assert response.status == 200, body
            return body

    return asyncio.run(ask())


def status(place: Path, path: str, **headers: str) -> int:
    async def ask() -> int:
        async with page(place) as client, client.get(path, headers=headers) as response:
            return response.status

    return asyncio.run(ask())


def test_the_api_is_open_to_the_token_alone(runs: Path) -> None:
    assert status(runs, "/api/runs") == 401
    assert status(runs, "/api/runs", Authorization="Bearer another") == 401
    assert status(runs, "/api/runs", **HEADERS) == 200
    assert status(runs, "/", Authorization="") == 200, "the page itself holds nothing of a run"


def test_every_answer_forbids_what_the_page_does_not_need(runs: Path) -> None:
    async def policies() -> list[str]:
        async with page(runs) as client:
            paths = ("/", "/app.js", "/api/runs", "/api/nothing")
            return [(await client.get(path, headers=HEADERS)).headers["Content-Security-Policy"] for path in paths]

    for policy in asyncio.run(policies()):
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy


def test_runs_of_a_folder_are_listed_with_how_far_they_are(runs: Path) -> None:
    listed = answer(runs, "/runs")
    assert isinstance(listed, list)
    names = ("id", "seed", "step", "phase", "alive")
    assert sorted([run[name] for name in names] for run in listed if isinstance(run, dict)) == [
        ["loop-s0", 0, STEPS, "done", False],
        ["loop-s1", 1, STEPS, "done", False],
    ]


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.toml").write_text("this is not a recipe", encoding="utf-8")
    RunFolder.create(tmp_path / "sound", default_recipe())
    listed = answer(tmp_path, "/runs")
    assert isinstance(listed, list)
    assert {bool(run.get("error")) for run in listed if isinstance(run, dict)} == {True, False}


def test_what_is_not_there_is_said(runs: Path) -> None:
    assert status(runs, "/api/runs/another/curves", **HEADERS) == 404
    assert status(runs, "/api/runs/loop-s0/curves?revision=0&since=x", **HEADERS) == 400
    with pytest.raises(Exception, match="is not a folder"):
        check_places([runs / "nowhere"])


def test_curves_are_columns_and_new_steps_come_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    write_events(folder, STEPS, 60, evals=3)

    async def ask() -> tuple[dict[str, Json], dict[str, Json], dict[str, Json]]:
        async with page(tmp_path) as client:

            async def curves(since: int, revision: int) -> dict[str, Json]:
                path = f"/api/runs/run/curves?since={since}&revision={revision}"
                body = await (await client.get(path, headers=HEADERS)).json()
                assert isinstance(body, dict)
                return body

            whole = await curves(-1, -1)
            with EventLog(folder.events, "train") as log:
                log.write(StepDone(step=STEPS + 1, metrics={"reward_mean": 0.5}, token_ages=[3, 1]))
            fresh = await curves(STEPS, 0)
            with EventLog(folder.events, "train") as log:
                log.write(StepDone(step=10, metrics={"reward_mean": 0.1}))
            return whole, fresh, await curves(STEPS + 1, 0)

    whole, fresh, redone = asyncio.run(ask())
    assert whole["step"] == list(range(1, STEPS + 1))
    assert fresh["step"] == [STEPS + 1]
    assert fresh["columns"] == {"reward_mean": [0.5], "age:0": [3], "age:1": [1]}
    assert redone["since"] == -1, "a step that was done again makes all of it new"
    assert redone["step"] == list(range(1, 11))
    heldout = whole["heldout"]
    assert isinstance(heldout, list)
    for measured in heldout:
        assert isinstance(measured, dict)
        sampled = measured["sampled"]
        assert isinstance(sampled, dict)
        low, value, high = (sampled[name] for name in ("low", "value", "high"))
        assert isinstance(low, float)
        assert isinstance(value, float)
        assert isinstance(high, float)
        assert low <= value <= high


def test_the_report_is_that_of_the_run(runs: Path) -> None:
    report = answer(runs, "/runs/loop-s0/report")
    assert isinstance(report, dict)
    assert report["steps"] == STEPS
    assert "curve" not in report
    assert report["summary"]


def test_two_runs_are_compared_over_the_tasks_that_both_tried(runs: Path) -> None:
    compared = answer(runs, "/compare?a=loop-s0:before&b=loop-s1:after")
    same = answer(runs, "/compare?a=loop-s0:after&b=loop-s0:after&way=greedy")
    assert isinstance(compared, dict)
    assert isinstance(same, dict)
    difference, sign, rows = compared["difference"], compared["sign"], compared["rows"]
    assert isinstance(difference, dict)
    assert isinstance(sign, dict)
    assert isinstance(rows, list)
    assert difference["low"] > 0, "training helped"  # type: ignore[operator]  # a number
    assert sum(int(str(sign[name])) for name in ("wins", "losses", "ties")) == compared["tasks"] == len(rows)
    assert same["sign"] == {"wins": 0, "losses": 0, "ties": compared["tasks"], "p": 1.0}
    assert status(runs, "/api/compare?a=loop-s0:never&b=loop-s1:after", **HEADERS) == 404


def test_the_stream_tells_of_a_change_and_is_silent_without(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    write_events(folder, 3, 6, evals=1)

    async def watch() -> list[int]:
        async with page(tmp_path) as client, client.get("/api/runs/run/stream", headers=HEADERS) as stream:
            steps = [await tick(stream.content)]
            with EventLog(folder.events, "train") as log:
                log.write(StepDone(step=4, metrics={}))
            steps.append(await tick(stream.content))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await tick(stream.content)
            return steps

    assert asyncio.run(watch()) == [3, 4]


async def data_of(content: StreamReader) -> dict[str, Json]:
    while True:
        line = await content.readline()
        if line.startswith(b"data: "):
            data: dict[str, Json] = json.loads(line[6:])
            return data


async def tick(content: StreamReader) -> int:
    return int(str((await data_of(content))["step"]))


def test_no_work_is_left_when_the_browser_is_gone(runs: Path) -> None:
    async def tasks_after() -> tuple[int, int]:
        with listen("127.0.0.1", 0) as listener:
            url = page_url(listener, "").partition("#")[0]
            serving = asyncio.create_task(serve_page(RunList([runs]), listener, TOKEN))
            async with ClientSession(headers=HEADERS) as session, session.get(f"{url}api/runs") as response:
                assert response.status == 200
            before = len(asyncio.all_tasks())
            async with (
                ClientSession(headers=HEADERS) as session,
                session.get(f"{url}api/runs/loop-s0/stream") as stream,
            ):
                await tick(stream.content)
            async with asyncio.timeout(WAIT_S):
                while len(asyncio.all_tasks()) > before:
                    await asyncio.sleep(0.02)
            after = len(asyncio.all_tasks())
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            return before, after

    before, after = asyncio.run(tasks_after())
    assert after <= before


def test_a_page_that_ends_says_so_and_can_still_be_asked(runs: Path) -> None:
    async def last_words() -> tuple[bool, int]:
        with listen("127.0.0.1", 0) as listener:
            url = page_url(listener, "").partition("#")[0]
            serving = asyncio.create_task(serve_page(RunList([runs]), listener, TOKEN))
            async with ClientSession(headers=HEADERS) as session:
                async with session.get(f"{url}api/runs/loop-s0/stream") as stream:
                    assert not (await data_of(stream.content))["closed"]
                    serving.cancel()
                    is_closed = bool((await data_of(stream.content))["closed"])
                async with session.get(f"{url}api/runs/loop-s0/curves?names=part:") as response:
                    columns = (await response.json())["columns"]
            await asyncio.gather(serving, return_exceptions=True)
            return is_closed, len(columns)

    assert asyncio.run(last_words()) == (True, 2), "two parts of the reward, and no other columns"


def test_a_page_beside_a_run_is_there_at_once_and_ends_with_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe(["log.page=true"]))
    with page_beside(folder, io.StringIO()) as url:
        address, _, token = url.partition("#token=")
        request = Request(f"{address}api/runs", headers={"Authorization": f"Bearer {token}"})
        with urlopen(request, timeout=WAIT_S) as response:
            (overview,) = json.load(response)
    assert overview["path"] == str(folder.path)
    with pytest.raises(URLError):
        urlopen(address, timeout=WAIT_S)


def test_a_run_whose_output_is_no_terminal_has_no_page_unless_it_is_asked_for(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    with page_beside(folder, io.StringIO()) as url:
        assert url == ""
