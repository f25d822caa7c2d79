"""A trainer of several ranks ends as its ranks do, and leaves none behind."""

import os
import time
from pathlib import Path

import pytest

from etude.run.ranks import Nodes, run_ranks
from waiting import wait_until


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 2", 2), ("kill -9 $$", 1)])
def test_the_status_is_that_of_the_rank_that_failed(script: str, status: int, tmp_path: Path) -> None:
    """2 means that a restart would not help (:mod:`etude.run.supervision`)."""
    other = f"echo $$ > {tmp_path}/other; sleep {600 if status else 0}"
    command = ["sh", "-c", f'if [ "$RANK" = 0 ]; then while [ ! -s {tmp_path}/other ]; do sleep 0.01; done; {script}; '
                           f"else {other}; fi"]  # fmt: skip
    began_s = time.monotonic()
    assert run_ranks(command, Nodes().environments(2)) == status
    assert time.monotonic() - began_s < 300.0, "the other one was not waited for"
    left = int((tmp_path / "other").read_text())
    wait_until(lambda: not Path(f"/proc/{left}").exists())


def test_ranks_of_one_node_meet_at_a_port_of_their_own() -> None:
    one, other = Nodes().environments(2), Nodes().environments(2)
    assert [each["RANK"] for each in one] == ["0", "1"]
    assert one[0]["MASTER_PORT"] == one[1]["MASTER_PORT"] != other[0]["MASTER_PORT"]
    assert "RANK" not in os.environ


def test_a_rank_that_cannot_be_started_leaves_no_other_running(tmp_path: Path) -> None:
    command = ["sh", "-c", f"while :; do sleep 0.1; done  # {tmp_path}"]
    with pytest.raises(ValueError, match="null byte"):
        run_ranks(command, [{}, {"RANK": "\0"}])
    assert not any(str(tmp_path).encode() in _command_line(process) for process in Path("/proc").glob("[0-9]*"))


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
