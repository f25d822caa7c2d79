"""A live run with a dozen simulated users: two releases, the second one trained on their signals, and a rollback.

The processes are real, and the users are those of ``recipes/live``; the model is tiny and random. It learns nothing
useful: the test shows that each part passes its results on to the next.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import orjson
import pytest

from bench.live.stages import measure_signal_to_live
from etude.releases.states import ReleaseState
from etude.releases.store import ReleaseStore
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.process_name import PRODUCT
from etude.run.stores import open_ledger
from tiny_runs import make_tiny_start, run_etude
from waiting import wait_until

USERS = Path(__file__).parents[2] / "recipes" / "live" / "users"
DEADLINE_S = 900.0
"""A bound on what hangs, not on what a busy machine is slow at."""
SETTINGS = (
    *("midtrain.tokens=0", "eval.enabled=false", "tasks.options.kinds=['arith']", "engine.max_length=512"),
    *("rollouts.groups_per_step=1", "rollouts.group_size=2", "rollouts.concurrency=2", "rollouts.max_staleness=2"),
    *("live.groups_per_step=4", "trainer.steps=200", "harness.options.max_tokens_per_turn=8"),
    *("feedback.window_s=1.0", "feedback.reward.parts=[{name='swift',signal='latency',weight=-1.0,range=[0.0,60.0]}]"),
    *("release.every_steps=1", "release.tasks=2", "release.margin=1.0", "release.canary_shares=[0.5]"),
    *("release.min_users=4", "release.min_sessions=4", "release.max_cheating=1.0", "release.max_cost_ratio=50.0"),
    *("release.max_latency_ratio=50.0", "release.metric={name='latency',direction='down',margin=1000.0}"),
)
"""A release asks for proof that calls are not slower by a quarter of an hour: it is had as soon as there are users."""

pytestmark = pytest.mark.heavy("minutes")


@contextmanager
def running(*command: str, **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A program while the context is open."""
    process = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def released(run: RunFolder) -> list[int]:
    """Versions that were ever released, in order, each of its own weights."""
    with closing(ReleaseStore.open(run.ledger)) as store:
        digests = {one.version: one.digest for one in store.releases()}
        versions = [move.version for move in store.moves() if move.to_state == ReleaseState.RELEASED]
    return list({digests[version]: version for version in reversed(versions)}.values())[::-1]


@pytest.mark.skipif(os.environ.get("ETUDE_LONG") != "1", reason="ten minutes and more: ETUDE_LONG=1")
@pytest.mark.timeout(4 * DEADLINE_S)
def test_signals_of_a_dozen_users_become_releases_and_one_is_taken_back(tmp_path: Path) -> None:
    start, run = make_tiny_start(tmp_path / "start"), RunFolder(tmp_path / "run")
    recipe, truth = tmp_path / "live.toml", tmp_path / "truth.jsonl"
    recipe.write_text(f"name = 'tiny-live'\n[model]\ncheckpoint = '{start}'\n", encoding="utf-8")
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    with running(sys.executable, "-m", "etude", "live", str(recipe), "--out", str(run.path), *words) as live:

        def is_up() -> bool:
            assert live.poll() is None, "etude live ended: its output is above"
            return run.config_file.exists() and Path(run.ledger).exists() and bool(released(run))

        wait_until(is_up, timeout_s=DEADLINE_S)
        url, key = run.endpoints.url(PRODUCT), run.key(KeyRole.PRODUCT)
        command = (sys.executable, str(USERS), "--url", url, "--truth", str(truth), "--people", "12", "--loyal")
        more = ("--rate", "4", "--day-s", str(DEADLINE_S), "--kinds", "arith")
        with running(*command, *more, ETUDE_PRODUCT_KEY=key):
            wait_until(lambda: len(released(run)) >= 2, timeout_s=DEADLINE_S)
            bad = released(run)[-1]
            run_etude("release", "rollback", str(run.path), "--by", "a person")
            wait_until(lambda: _state(run, bad) is ReleaseState.ROLLED_BACK, timeout_s=DEADLINE_S)
    _check_what_is_left(run, truth)


def _state(run: RunFolder, version: int) -> ReleaseState:
    with closing(ReleaseStore.open(run.ledger)) as store:
        states = {one.version: one.state for one in store.releases()}
    # What was on its way when the person asked is what is taken back, else the release itself.
    return ReleaseState.ROLLED_BACK if ReleaseState.ROLLED_BACK in states.values() else states[version]


def _check_what_is_left(run: RunFolder, truth: Path) -> None:
    """Users got only released and canary versions, no session was offered twice, and signals became steps."""
    rows = [orjson.loads(line) for line in truth.read_bytes().splitlines()]
    with closing(ReleaseStore.open(run.ledger)) as store:
        shown = {
            move.version for move in store.moves() if move.to_state in (ReleaseState.RELEASED, ReleaseState.CANARY)
        }
    assert {int(version) for row in rows for version in row["versions"]} <= shown
    with closing(open_ledger(run)) as ledger:
        sessions = [one.session_id for one in ledger.live.observed(10_000)]
    assert len(sessions) == len(set(sessions)) > 0
    measured = measure_signal_to_live(run.path)
    assert isinstance(measured["signals"], int)
    assert measured["signals"] > 0
