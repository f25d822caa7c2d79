"""The page server's data of rollouts: rows, views, tokens, exports; hostile text is passed unchanged."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from etude.config.loading import default_recipe
from etude.errors import ConfigError, UserError
from etude.ledger.ledger import TRAIN, Ledger
from etude.run.folder import RunFolder
from etude.tokens.chat import ChatTemplate
from etude.types import Disposition, Finish, Hint, Rollout, Turn, Verdict
from etude.ui.rollouts_view import ROUTES
from etude.ui.routes import Download, NotFound, RunQuery
from etude.ui.runs import RunList, RunReader
from etude.ui.server import ui_app
from ledgers import rollout, task

HOSTILE = "<script>document.title='owned'</script>\x1b[31m\u202egnp.exe\x00\ufffd </pre>"
CHEAT = Verdict(disposition=Disposition.ZERO, reason="spy", flags=("spy",), hacked=True, graded=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of three groups of two; the rollout ``00`` has hostile text."""
    made = RunFolder.create(tmp_path_factory.mktemp("page") / "run", default_recipe())
    chat = ChatTemplate.train([HOSTILE], 300)
    chat.save(made.model)
    ids = np.array(chat.encode(HOSTILE), np.int32)
    hostile = Turn(
        prompt_ids=ids, completion_ids=ids, logprobs=np.zeros(len(ids), np.float32),
        versions=np.arange(len(ids), dtype=np.int32) // len(ids), finish=Finish.STOP,
    )  # fmt: skip
    with Ledger.open(made.ledger) as ledger:
        for group in range(3):
            ledger.admit_group(replace(task(f"t{group}"), template=f"kind{group % 2}"), TRAIN, 2, 0)
            for slot in range(2):
                ledger.record(_ended(group, slot, hostile), TRAIN)
    return made


def _ended(group: int, slot: int, hostile: Turn) -> Rollout:
    made = rollout(group, slot, reward=float(slot), name=f"{group}{slot}" * 8)
    match (group, slot):
        case (0, 0):
            hints = (Hint(turn=0, text=HOSTILE, source="rule"),)
            return replace(made, turns=(hostile,), reason=HOSTILE * 40, hints=hints, reward_parts={"tests": 0.0})
        case (2, 0):
            return replace(made, verdict=CHEAT)
    return made


def ask(folder: RunFolder, route: str, names: Mapping[str, str] | None = None, **options: object) -> Any:
    query = RunQuery(
        run=RunReader(folder, "run"), names=names or {}, options={name: str(value) for name, value in options.items()}
    )
    return ROUTES[f"GET {route}"](query)


def test_rows_are_filtered_sorted_and_cut(folder: RunFolder) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["21", "20", "11", "10", "01", "00"]),
        ({"limit": 2, "offset": 1}, ["20", "11"]),
        ({"task": "kind1"}, ["11", "10"]),
        ({"reward": ">=0.5", "sort": "reward"}, ["21", "11", "01"]),
        ({"reward": ">=0.5", "sort": "reward", "reversed": 1, "task": "KIND0"}, ["21", "01"]),
        ({"has_hint": 1}, ["00"]),
        ({"hacked": 1}, ["20"]),
        ({"outcome": "failed"}, []),
        ({"sort": "tokens", "limit": 1}, ["00"]),
        ({"version": 0}, ["00"]),
        ({"group": 1}, ["11", "10"]),
    ]
    for options, expected in cases:
        answer = ask(folder, "/rollouts", **options)
        assert [row["rollout_id"][:2] for row in answer["rows"]] == expected, options
        assert (answer["total"] >= len(expected)) and (answer["total"] == len(expected) or "limit" in options)
    row = ask(folder, "/rollouts", has_hint=1)["rows"][0]
    assert (row["template"], row["task_id"], row["turns"], row["hints"]) == ("kind0", "t0", 1, 1)
    assert len(row["reason"]) == 200
    assert ask(folder, "/rollouts", count=0)["total"] is None


def test_a_filter_that_makes_no_sense_is_named(folder: RunFolder) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sort": "beauty"}, "sort='beauty': expected one of newest, reward"),
        ({"outcome": "good"}, "outcome='good': expected one of graded"),
        ({"limit": 0}, "limit=0"),
        ({"offset": -1}, "offset=-1"),
        ({"version": "x"}, "version='x' is not a whole number"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            ask(folder, "/rollouts", **options)
    with pytest.raises(ConfigError, match="expected a comparison"):
        ask(folder, "/rollouts", reward="much")


def test_what_there_is_to_filter_by(folder: RunFolder) -> None:
    answer = ask(folder, "/rollouts/census")
    assert answer["purposes"][0]["outcomes"]["graded"] == 6
    assert {"status": "graded", "reason": "", "count": 5} in answer["reasons"]
    json.dumps(answer)


def test_a_rollout_and_its_tokens(folder: RunFolder) -> None:
    read = ask(folder, "/rollouts/{rollout}", {"rollout": "00"})
    assert read["turns"][0]["said"] == read["turns"][0]["heard"] == HOSTILE
    columns = ask(folder, "/rollouts/{rollout}/tokens", {"rollout": "00"})["turns"][0]
    assert (
        len({len(columns[name]) for name in ("token_id", "text", "logprob", "version", "advantage", "has_loss")}) == 1
    )
    assert (columns["mismatch"], columns["kept"]) == (None, None)
    assert set(columns["advantage"]) == {-0.5}
    assert "routes" not in columns
    assert len(ask(folder, "/groups/{purpose}/{number}", {"purpose": "train", "number": "2"})) == 2
    for route, names in (
        ("/rollouts/{rollout}", {"rollout": "zz"}),
        ("/groups/{purpose}/{number}", {"purpose": "train", "number": "99"}),
        ("/groups/{purpose}/{number}", {"purpose": "train", "number": "../x"}),
    ):
        with pytest.raises(NotFound):
            ask(folder, route, names)


def test_exports_are_files(folder: RunFolder) -> None:
    texts = {}
    for form in ("jsonl", "harbor", "html"):
        answer = ask(folder, "/rollouts/{rollout}/export", {"rollout": "00"}, **{"as": form})
        assert isinstance(answer, Download)
        texts[form] = b"".join(answer.chunks).decode()
    assert json.loads(texts["jsonl"])["rollout_id"] == "00" * 8
    assert json.loads(texts["harbor"])["steps"][1]["message"] == HOSTILE
    assert "<script>" not in texts["html"]
    every = b"".join(ask(folder, "/rollouts.jsonl", task="kind0").chunks).splitlines()
    assert [json.loads(line)["group"] for line in every] == [2, 2, 0, 0]
    with pytest.raises(UserError, match="expected jsonl, harbor or html"):
        ask(folder, "/rollouts/{rollout}/export", {"rollout": "00"}, **{"as": "pdf"})


def test_hostile_words_come_as_json_under_a_strict_policy(folder: RunFolder) -> None:
    async def fetch() -> tuple[Mapping[str, str], Any]:
        async with TestClient(TestServer(ui_app(RunList([Path(folder.path)]), "token"))) as client:
            headers = {"Authorization": "Bearer token"}
            response = await client.get("/api/runs/run/rollouts/00", headers=headers)
            return response.headers, await response.json()

    headers, read = asyncio.run(fetch())
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert read["turns"][0]["said"] == HOSTILE
