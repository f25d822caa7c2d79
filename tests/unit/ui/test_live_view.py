"""The Live tab's data, from a real feedback store, ledger and release store: from a signal to its reward."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from etude.config.loading import default_recipe
from etude.feedback.store import FeedbackStore
from etude.ledger.ledger import Ledger
from etude.releases.controller import ReleaseDecision, ReleaseMove
from etude.releases.states import Release, ReleaseState
from etude.releases.store import ReleaseStore
from etude.routing_table import Arm, RoutingTable
from etude.run.folder import RunFolder
from etude.run.live_rewards import LiveRewards
from etude.run.routing_tables import RoutingTables
from etude.run.stores import open_feedback
from etude.telemetry.log import EventLog
from etude.ui.live_view import live, session
from etude.ui.routes import NotFound, RunQuery
from etude.ui.runs import RunReader
from live_sessions import OWNER, answer, event, live_session
from released_runs import release

SETTINGS = (
    "feedback.window_s=10",
    'feedback.reward.parts=[{name="liked", signal="thumbs", weight=2.0, range=[-1, 1], missing=0.5}]',
    "live.groups_per_step=2",
    "release.every_steps=1",
    "release.canary_shares=[0.5]",
    "release.min_users=4",
    "release.min_sessions=10",
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with a session that has feedback, one without, and an open one; one signal has no session."""
    folder = RunFolder.create(tmp_path / "run", default_recipe([*SETTINGS]))
    with closing(open_feedback(folder)) as store, Ledger.open(folder.ledger) as ledger:
        for number, name in enumerate(("spoken", "silent", "open")):
            store.keep(answer(live_session(name, opened_at=100.0 + number)), "product", 101.0)
        store.report(OWNER, [event("e1", "spoken"), event("e2", "unheard-of")], lambda: 102.0)
        store.end(["spoken", "silent"], 103.0)
        store.close_windows(200.0, 10)
        hand_on(folder, store, ledger)
    return folder


def hand_on(folder: RunFolder, store: FeedbackStore, ledger: Ledger) -> None:
    joined, left_out = store.closed(10)
    with EventLog(folder.events, "feedback") as events:
        words = LiveRewards(folder.config(), ledger, events).take(joined)
    results = {one.session.session_id: word for one, word in zip(joined, words, strict=True)}
    store.taken(results, left_out, 201.0)


def ask(folder: RunFolder, **names: str) -> Mapping[str, Any]:
    query = RunQuery(run=RunReader(folder, "run"), names=names)
    result = session(query) if names else live(query)
    assert isinstance(result, dict)
    return result


def test_a_signal_becomes_a_reward_by_the_formula(run: RunFolder) -> None:
    sessions = ask(run)["sessions"]
    assert sessions["states"] == {"open": 1, "ended": 0, "closed": 0, "taken": 2}
    assert [(count["number"], count["unmatched"]) for count in sessions["signals"]] == [(2, 1)]
    rows = {row["id"]: row for row in sessions["rows"]}
    assert {name: (row["state"], row["reward"]) for name, row in rows.items()} == {
        "spoken": ("taken", 2.0), "silent": ("taken", 1.0), "open": ("open", None),
    }  # fmt: skip
    assert (rows["spoken"]["answered"], rows["silent"]["answered"]) == (1.0, 0.0)
    assert rows["spoken"]["signals"][0]["value"] == 1
    (part,) = ask(run, session="silent")["parts"]
    assert (part["answers"], part["silence"], part["value"], part["worth"]) == ([None], "taken for 0.5", 0.5, 1.0)
    with pytest.raises(NotFound, match="may have been deleted"):
        ask(run, session="never-was")


def test_a_test_under_way_is_told_as_the_controller_sees_it(run: RunFolder) -> None:
    with closing(ReleaseStore.open(run.ledger)) as store:
        release(store, 0, None)
        states = (ReleaseState.CANDIDATE, ReleaseState.CANDIDATE, ReleaseState.GATED)
        for before, to in zip(states, (*states[1:], ReleaseState.CANARY), strict=True):
            one = Release(version=1, digest="1" * 32, state=before, replaces=0)
            move = ReleaseMove(release=one, to=to, reason="a test", is_new=to is ReleaseState.CANDIDATE)
            store.apply(ReleaseDecision(moves=(move,)), 3.0)
        for arm, mean in (("live", 0.2), ("canary", 0.8)):
            for user in range(60):
                reward = mean + 0.1 * (-1) ** user
                store.add_session(f"{arm}{user}", f"{arm}.1", f"{arm}{user}", {"reward": reward})
    arms = (Arm(name="live", version=0, digest="0" * 32, share=0.5),
            Arm(name="canary", version=1, digest="1" * 32, share=0.5))  # fmt: skip
    RoutingTables.open(run).write(RoutingTable(generation=1, salt="s", arms=arms))
    facts = ask(run)
    test, releases = facts["test"], facts["releases"]
    assert (releases["live"], releases["way"]["state"], releases["due"]) == (0, "canary", 1)
    assert (test["evidence"]["users"], test["evidence"]["sessions"]) == ([60, 60], [60, 60])
    assert test["evidence"]["sample_ratio_p"] > 0.05
    assert test["proof"]["low"] > 0, "proven"
    assert test["metrics"][0]["means"] == pytest.approx([0.2, 0.8])
    widths = [point["high"] - point["low"] for point in test["path"] if point["low"] is not None]
    assert widths[-1] < widths[0], "the interval narrows as sessions come in"
    assert [move["to_state"] for move in releases["moves"][:3]] == ["canary", "gated", "candidate"]


def test_a_run_without_users_says_what_it_lacks(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    with Ledger.open(folder.ledger):
        facts = ask(folder)
    assert "feedback.window_s = 0" in facts["sessions"]["problem"]
    assert "release.every_steps = 0" in facts["releases"]["problem"]
    assert facts["test"] is None
