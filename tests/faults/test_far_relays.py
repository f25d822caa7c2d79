"""Relay processes in a distant region: a real link, an S3 bucket, a kill during a transfer, a cut link."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.sync.sites import BUCKET, BUCKET_PORT, SitePlan
from bench.sync.wan import Wan, WanShape
from etude.errors import UserError
from etude.objects import ObjectStore
from etude.weights.log import WeightLog
from etude.weights.pull import pull
from synthetic_updates import alike, synthetic_version
from waiting import wait_until

SHAPE = WanShape(rtt_s=0.05, loss=0.0, bits_per_s=1e9)
ROWS = COLUMNS = 5000
"""75 MB: packs on their way when a relay is killed are few of them."""
CUT_S = 8.0
BACK_S = 40.0
"""Longer than the timeout of a request."""

PUBLISH = """
import json, sys
from bench.sync.sites import SitePlan
from etude.weights.log import WeightLog
from etude.weights.publish import Publisher, PublishOptions
from synthetic_updates import synthetic_version

plan = SitePlan(**json.loads(sys.argv[1]))
options = PublishOptions(codec="gaps", chunk_numbers=50_000, pack_bytes=100_000, encoders=1, uploads=4, anchor_every=0)
with Publisher(WeightLog(plan.origin()), options) as publisher:
    for line in sys.stdin:
        version = int(line)
        state = synthetic_version(version, rows=ROWS, columns=COLUMNS)
        publisher.publish(state, version=version, step=version).result()
        print(version, flush=True)
"""
"""Publishes each version that it reads of, and says so."""


@pytest.fixture
def wan() -> Iterator[Wan]:
    try:
        with Wan(("home", "eu"), SHAPE) as made:
            yield made
    except UserError as error:
        pytest.skip(str(error))


def started(wan: Wan, command: list[str]) -> "subprocess.Popen[bytes]":
    """Start a program in the home region that prints a line when it has done a command."""
    support = {"PYTHONPATH": ":".join((str(Path(__file__).parents[1] / "support"), *sys.path))}
    return wan.popen(
        "home", [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, environment=support
    )


def line_of(program: "subprocess.Popen[bytes]", order: str = "") -> str:
    """Send the program a command, and return its next line."""
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(order.encode())
    program.stdin.flush()
    return program.stdout.readline().decode()


def relay(wan: Wan, region: Path) -> "subprocess.Popen[bytes]":
    environment = {
        "AWS_ENDPOINT": f"http://{wan.address('home')}:{BUCKET_PORT}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
    }
    command = [sys.executable, "-m", "etude", "weights", "relay", f"s3://{BUCKET}/etude", str(region)]
    return wan.popen("eu", command, environment=environment)


@pytest.mark.heavy("root or user namespaces, and a minute")
@pytest.mark.timeout(900)
def test_two_relays_bring_one_copy_though_the_active_one_is_killed_and_the_link_is_cut(
    wan: Wan, tmp_path: Path
) -> None:
    plan = SitePlan(contestant="etude", bucket=wan.address("home"), layers=1, seed=0, connections=4)
    with (
        started(wan, ["-m", "bench.sync.sites", "bucket", plan.to_json()]) as bucket,
        started(
            wan, ["-c", PUBLISH.replace("ROWS", str(ROWS)).replace("COLUMNS", str(COLUMNS)), plan.to_json()]
        ) as publisher,
    ):
        try:
            assert json.loads(line_of(bucket))["event"] == "ready"
            bring_versions(wan, publisher, tmp_path / "region")
        finally:
            wan.close()  # ends both


def bring_versions(wan: Wan, publisher: "subprocess.Popen[bytes]", region: Path) -> None:
    assert line_of(publisher, "0\n") == "0\n"
    before = wan.traffic("home", "eu")
    active = relay(wan, region)
    store = ObjectStore(str(region))
    wait_until(lambda: bool(store.list("relay-lease")), timeout_s=100)
    relay(wan, region)
    wait_until(lambda: len(store.list("packs")) > 200, timeout_s=200)
    active.send_signal(signal.SIGKILL)
    log = WeightLog(store)
    wait_until(lambda: log.latest() == 0, timeout_s=200)
    size_bytes = sum(pack.size_bytes for pack in getattr(log.read(0), "packs", ()))
    copies = wan.traffic("home", "eu").since(before).size_bytes / size_bytes
    assert alike(pull(log).state, synthetic_version(0, rows=ROWS, columns=COLUMNS))
    assert copies <= 1.05, f"{copies:.3f} copies of {size_bytes} bytes: of packs under way the other one has the parts"
    wan.cut("eu")
    assert line_of(publisher, "1\n") == "1\n"
    time.sleep(CUT_S)
    wan.heal("eu")
    healed_s = time.monotonic()
    wait_until(lambda: log.latest() == 1, timeout_s=BACK_S)
    sys.stdout.write(f"{copies:.3f} copies; back {time.monotonic() - healed_s:.1f} s after the cut\n")
