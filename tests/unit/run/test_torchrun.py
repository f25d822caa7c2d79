"""A trainer of several ranks ends as its ranks do."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 2", 2), ("kill -9 $$$$", 1)])
def test_the_status_is_that_of_the_rank_that_failed(script: str, status: int) -> None:
    """2 means that a restart would not help (:mod:`etude.run.supervision`). torchrun reads one dollar out of two."""
    ranks = ["--standalone", "--nproc-per-node=2", "--no-python", "--", "sh", "-c", script]
    ended = subprocess.run([sys.executable, "-m", "etude.run.torchrun", *ranks], capture_output=True, check=False)
    assert ended.returncode == status, ended.stderr.decode()
