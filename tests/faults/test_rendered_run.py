"""A run whose processes are started as a Kubernetes cluster would, from its manifests: this test is the kubelet.

Each pod is a process on this machine with a loopback address, a disk and an environment of its own. What a cluster
adds, names and scheduling and restarts, is not tested here.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from databases import temporary_server
from etude.ledger.changes import TRAIN
from etude.ledger.states import GroupState
from etude.run.keys import RUN_KEY_VARIABLE
from etude.run.region_stores import ADDRESS_VARIABLE
from etude.run.stores import open_ledger
from etude.run.working_folder import WORK_VARIABLE, open_run_folder
from tiny_runs import DEADLINE_S, SHAPE, run_etude
from waiting import wait_until

STEPS, GROUPS = 3, 2
RECIPE = {
    "name": "rendered",
    "tasks": {"options": {"kinds": ["arith"]}},
    "midtrain": {"tokens": 20_000, "batch_tokens": 1_000, "warmup_steps": 5},
    "rollouts": {"groups_per_step": GROUPS, "group_size": 2, "max_staleness": 1, "concurrency": 4},
    "harness": {"options": {"max_turns": 3}},
    "effort": {"weight": 0.1, "prices": {"call_tokens": 1.0, "final_tokens": 1.0}},
    "trainer": {"steps": STEPS},
    "eval": {"enabled": False},
}
LOOP = {"serve": 2, "gateway": 2, "rollouts": 2, "train": 1}
"""Command → its pods."""
ADDRESSES = count(2)

pytestmark = pytest.mark.timeout(DEADLINE_S * 1.2)


@dataclass
class Pod:
    """A container of a manifest that runs here."""

    command: str
    process: "subprocess.Popen[bytes]"
    log: Path
    address: str
    port: int
    """Port of its readiness probe; 0 for none."""

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with socket.socket() as probe:
            return probe.connect_ex((self.address, self.port)) == 0


def containers(documents: list[Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The container of each kind of pod, and the number of its pods."""
    for each in documents:
        match each["kind"]:
            case "LeaderWorkerSet":
                yield each["spec"]["leaderWorkerTemplate"]["workerTemplate"], each["spec"]["replicas"]
            case "StatefulSet":
                yield each["spec"]["template"], each["spec"]["replicas"]
            case "Job":
                yield each["spec"]["template"], each["spec"]["completions"]
            case "JobSet":
                for job in each["spec"]["replicatedJobs"]:
                    yield job["template"]["spec"]["template"], job["template"]["spec"]["completions"]


def start(template: Mapping[str, Any], replica: int, place: Path, stack: ExitStack) -> Pod:
    """Start a pod as a kubelet does: its command, in an environment that has what the manifest says."""
    (container,) = template["spec"]["containers"]
    address, name = f"127.0.0.{next(ADDRESSES)}", f"{container['name']}-{replica}"
    environment = {**os.environ, WORK_VARIABLE: str(place / f"disk-{name}"), ADDRESS_VARIABLE: address}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            environment[variable["name"]] = str(replica)
        elif "secretKeyRef" not in source:
            environment[variable["name"]] = variable["value"]
    log = place / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(container["command"], stdout=out, stderr=out, env=environment)
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    probe = container.get("readinessProbe", {}).get("tcpSocket", {})
    return Pod(container["name"], process, log, address, probe.get("port", 0))


def end(pod: Pod) -> None:
    assert pod.process.wait(DEADLINE_S) == 0, pod.log.read_text()[-4000:]


@pytest.mark.heavy("minutes and PostgreSQL")
def test_the_pods_of_manifests_do_a_run_to_its_end(
    tmp_path: Path, postgresql: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "etude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m etude "$@"\n')
    program.chmod(0o755)
    for name, value in {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(sys.path),
        RUN_KEY_VARIABLE: secrets.token_hex(32),
        WORK_VARIABLE: str(tmp_path / "disk-of-the-user"),
    }.items():
        monkeypatch.setenv(name, value)
    region = {"name": "home", "store": str(tmp_path / "store"), "engines": LOOP["serve"], "gateways": LOOP["gateway"]}
    fleet = {"launcher": "kubernetes", "home": "home", "rollouts": LOOP["rollouts"], "regions": [region],
             "kubernetes": {"image": "registry.example/etude:1"}}  # fmt: skip
    for name, tree in (("recipe", RECIPE), ("fleet", fleet)):
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(tree))
    files = [tmp_path / "fleet.toml", tmp_path / "recipe.toml"]
    shape = [word for line in SHAPE for word in ("--set", f"model.shape.{line}")]
    manifests = tmp_path / "manifests"
    with ExitStack() as stack:
        server = stack.enter_context(temporary_server())
        run_etude("fleet", "create", *files, "--ledger", server.url, *shape)
        run_etude("fleet", "render", *files, "--out", manifests, *shape)
        phases, loop = (
            [*containers([*yaml.safe_load_all((manifests / folder / "processes.yaml").read_text())])]
            for folder in ("phases", "home")
        )
        for template, _ in phases:
            end(start(template, 0, tmp_path, stack))
        pods = [start(template, replica, tmp_path, stack) for template, number in loop for replica in range(number)]
        assert {name: sum(pod.command == name for pod in pods) for name in LOOP} == LOOP
        for pod in pods:
            if pod.port:
                wait_until(pod.is_ready, every_s=0.2, timeout_s=DEADLINE_S)
        for pod in pods:
            if pod.command in ("rollouts", "train"):
                end(pod)
        with open_ledger(open_run_folder(str(tmp_path / "store"))) as ledger:
            assert ledger.progress().steps_done == STEPS
            assert len([*ledger.groups(TRAIN, [GroupState.CONSUMED])]) == STEPS * GROUPS
