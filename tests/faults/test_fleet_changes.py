"""The supervisor of a region: it waits for the home region, and follows the desired state and its changes."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import tomli_w

from databases import temporary_server
from etude.fleet.specs import ProcessStatus
from etude.run.folder import RunFolder
from etude.run.keys import RUN_KEY_VARIABLE
from etude.run.placement import fleet_objects
from etude.run.region_stores import ADDRESS_VARIABLE
from etude.run.working_folder import WORK_VARIABLE, working_path
from tiny_runs import SHAPE
from waiting import wait_until

DEADLINE_S = 1_200.0
RECIPE = {
    "name": "supervisor",
    "tasks": {"options": {"kinds": ["arith"]}},
    "midtrain": {"tokens": 20_000, "batch_tokens": 1_000, "warmup_steps": 5},
    "rollouts": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1, "concurrency": 4},
    "harness": {"options": {"max_turns": 3}},
    "effort": {"weight": 0.1, "prices": {"call_tokens": 1.0, "final_tokens": 1.0}},
    "trainer": {"steps": 10_000},
    "eval": {"enabled": False},
}

pytestmark = pytest.mark.timeout(DEADLINE_S * 1.2)


def write_fleet(place: Path, engines: int) -> Path:
    """A fleet whose far region has ``engines`` engines."""
    regions = [
        {"name": "home", "store": str(place / "home"), "engines": 1},
        {"name": "far", "store": str(place / "far"), "engines": engines, "relays": 1},
    ]
    file = place / "fleet.toml"
    file.write_text(tomli_w.dumps({"launcher": "near_launcher:NearLauncher", "home": "home", "regions": regions}))
    return file


@contextmanager
def etude(place: Path, site: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of étude's with a disk of a site's own; stopped in the end."""
    variables = {**os.environ, WORK_VARIABLE: str(place / f"work-{site}"), "PYTHONPATH": ":".join(sys.path)}
    with (place / f"{site}.out").open("ab") as out:
        command = [sys.executable, "-m", "etude", *arguments]
        with subprocess.Popen(command, stdout=out, stderr=out, env=variables) as process:
            try:
                yield process
            finally:
                process.terminate()


@pytest.mark.heavy("minutes and PostgreSQL")
def test_a_region_follows_the_fleet_without_a_restart(
    tmp_path: Path, postgresql: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_KEY_VARIABLE, secrets.token_hex(32))
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
    url, recipe = str(tmp_path / "home"), tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps(RECIPE))
    settings = [word for line in SHAPE for word in ("--set", f"model.shape.{line}")]

    def running() -> dict[str, ProcessStatus]:
        """The processes of the far region, as its supervisor wrote it into the region's store."""
        folder = RunFolder(working_path(url, tmp_path / "work-home"))
        if not (folder.path / "fleet.toml").exists():
            return {}
        observed = fleet_objects(folder, "far").observed()
        return {} if observed is None else {name: each for name, each in observed[0].statuses.items() if each.pid}

    def until_runs(*names: str) -> dict[str, ProcessStatus]:
        def settled() -> bool:
            assert supervisor.poll() is None and home.poll() is None, "\n".join(
                (tmp_path / f"{site}.out").read_text() for site in ("home", "far")
            )
            return set(running()) == set(names)

        wait_until(settled, every_s=0.5, timeout_s=DEADLINE_S)
        return running()

    with ExitStack() as stack:
        server = stack.enter_context(temporary_server())
        supervisor = stack.enter_context(etude(tmp_path, "far", "fleet", "run", "--run", url, "--region", "far"))
        where = ["--at", url, "--ledger", server.url, "--fleet", str(write_fleet(tmp_path, 1))]
        home = stack.enter_context(etude(tmp_path, "home", "run", str(recipe), *where, *settings))
        before = until_runs("serve@far", "gateway@far", "relay@far")
        with etude(tmp_path, "here", "fleet", "apply", str(write_fleet(tmp_path, 2)), "--run", url) as apply:
            assert apply.wait(DEADLINE_S) == 0, (tmp_path / "here.out").read_text()
        after = until_runs("serve@far", "serve-1@far", "gateway@far", "relay@far")
        assert {name: status.pid for name, status in before.items()} == {name: after[name].pid for name in before}
        assert "the fleet has changed; added: serve-1@far" in (tmp_path / "far.out").read_text()
        with etude(tmp_path, "here", "fleet", "status", "--run", url) as status:
            assert status.wait(DEADLINE_S) == 0
        shown = (tmp_path / "here.out").read_text()
        assert "generation 2" in shown and str(after["serve-1@far"].pid) in shown, shown
        with etude(tmp_path, "here", "fleet", "apply", str(write_fleet(tmp_path, 1)), "--run", url) as apply:
            assert apply.wait(DEADLINE_S) == 0
        until_runs("serve@far", "gateway@far", "relay@far")
