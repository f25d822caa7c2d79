"""An external harness on a fleet: each rollout reaches the gateway of its own session, from a sandbox host in a region.

Two regions, their processes children of one supervisor on this machine. A gateway is killed while agents call it: their
rollouts are infrastructure, and tried again.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from databases import temporary_server
from etude.ledger.archive import Archive, Search
from etude.run.keys import RUN_KEY_VARIABLE
from etude.run.region_stores import ADDRESS_VARIABLE
from etude.run.working_folder import WORK_VARIABLE, open_run_folder
from etude.sandboxes.providers import KEY_VARIABLE
from etude.telemetry.events import GatewayStats, ProcessStarted, RegionServed, RolloutClosed, RolloutsStats, StepDone
from etude.telemetry.log import EventReader
from etude.types import RolloutStatus
from tiny_runs import FINISHED, SHAPE

STEPS = 8
DEADLINE_S = 1_500.0
KILLED = "gateway@far"
AGENT = """
import json, os, time, urllib.request
for turn in range(3):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": f"turn {turn}"}], "max_tokens": 40})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).read()
    time.sleep(0.5)
"""
RECIPE = {
    "name": "fleet-harness",
    "tasks": {"options": {"kinds": ["arith"]}},
    "midtrain": {"tokens": 20_000, "batch_tokens": 1_000, "warmup_steps": 5},
    "harness": {
        "kind": "command",
        "options": {
            "command": ["python3", "/harness/agent.py", "{prompt}"],
            "files": {"agent.py": AGENT},
            "timeout_s": 60.0,
        },
    },
    "sandboxes": {"kind": "remote"},
    "rollouts": {"groups_per_step": 2, "group_size": 4, "max_staleness": 1, "concurrency": 16, "max_attempts": 12},
    "effort": {"weight": 0.1, "prices": {"call_tokens": 1.0, "final_tokens": 1.0}},
    "trainer": {"steps": STEPS},
    "eval": {"enabled": False},
}

pytestmark = pytest.mark.timeout(DEADLINE_S * 1.2)


@pytest.mark.heavy("minutes, root and PostgreSQL", missing=os.geteuid() != 0)
def test_an_external_harness_trains_on_two_regions_though_a_gateway_dies(
    tmp_path: Path, postgresql: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: secrets.token_hex(32) for name in (RUN_KEY_VARIABLE, KEY_VARIABLE)}
    for name, value in {**keys, WORK_VARIABLE: str(tmp_path / "work"), ADDRESS_VARIABLE: "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    url = str(tmp_path / "home")
    regions = [
        {"name": "home", "store": url, "engines": 1},
        {"name": "far", "store": str(tmp_path / "far"), "engines": 1, "relays": 1, "sandbox_hosts": 1},
    ]
    for name, tree in (("recipe", RECIPE), ("fleet", {"home": "home", "regions": regions})):
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(tree))
    settings = [word for line in SHAPE for word in ("--set", f"model.shape.{line}")]
    with temporary_server() as server:
        where = ["--at", url, "--ledger", server.url, "--fleet", str(tmp_path / "fleet.toml")]
        command = [sys.executable, "-m", "etude", "run", str(tmp_path / "recipe.toml"), *where, *settings]
        with (tmp_path / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as run:
            try:
                watch(run, tmp_path)
                assert run.wait(DEADLINE_S) in FINISHED, (tmp_path / "out").read_text()
            finally:
                run.terminate()
        folder = open_run_folder(url, writes=False)
        with Archive.open(folder.ledger, folder.config().ledger) as archive:
            rollouts = archive.find(Search(purpose="train", limit=10_000))
    ends = Counter(rollout.status for rollout in rollouts)
    assert ends[RolloutStatus.GRADED] >= STEPS * 8
    assert ends[RolloutStatus.FAILED_INFRA] > 0, "those whose gateway died"
    assert all((rollout.reward is None) == (rollout.status is not RolloutStatus.GRADED) for rollout in rollouts)
    reasons = Counter(rollout.reason for rollout in rollouts if rollout.status is RolloutStatus.GRADED)
    assert reasons["submit"] > ends[RolloutStatus.GRADED] / 2, reasons
    seen = [logged.event for logged in EventReader(folder.events).new()]
    used = Counter[str]()
    for event in seen:
        if isinstance(event, RegionServed):
            used[event.region] += event.sessions
    assert used["home"] > 0 and used["far"] > 0, used
    assert max(event.sandboxes for event in seen if isinstance(event, RolloutsStats)) > 0
    assert sorted({event.step for event in seen if isinstance(event, StepDone)}) == list(range(1, STEPS + 1))


def watch(run: "subprocess.Popen[bytes]", place: Path) -> None:
    """Kill the far region's gateway while it answers calls, until a rollout has failed.

    If a kill interrupts no call, kill it again. Do not kill a gateway that has not answered a call yet: the supervisor
    gives up a process that dies six times in two minutes.
    """
    deadline_s, killed = time.monotonic() + DEADLINE_S, set[int]()
    while True:
        assert time.monotonic() < deadline_s and run.poll() is None, (place / "out").read_text()
        folders = list((place / "work").glob("*/events"))
        seen = sorted((each for folder in folders for each in EventReader(folder).new()), key=lambda each: each.at_s)
        ends = [each.event.status for each in seen if isinstance(each.event, RolloutClosed)]
        if RolloutStatus.FAILED_INFRA in ends:
            return
        pid, calls = 0, 0
        for each in seen:
            if isinstance(each.event, ProcessStarted) and each.event.process == KILLED:
                pid, calls = each.event.pid, 0
            if isinstance(each.event, GatewayStats) and each.process == KILLED:
                calls += each.event.calls
        if calls and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
