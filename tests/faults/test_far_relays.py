"""Relays as processes in a region far away: a real link, a bucket that speaks S3, a kill in mid-transfer, a cut."""

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

pytestmark = pytest.mark.heavy("root or user namespaces, and a minute")

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

plan, version = SitePlan(**json.loads(sys.argv[1])), int(sys.argv[2])
options = PublishOptions(codec="gaps", chunk_numbers=50_000, pack_bytes=100_000, encoders=1, uploads=4, anchor_every=0)
with Publisher(WeightLog(plan.origin()), options) as publisher:
    for each in range(version + 1):
        publisher.publish(synthetic_version(each, rows=ROWS, columns=COLUMNS), version=each, step=each).result()
"""


@pytest.fixture
def wan() -> Iterator[Wan]:
    try:
        with Wan(("home", "eu"), SHAPE) as made:
            yield made
    except UserError as error:
        pytest.skip(str(error))


def publish(wan: Wan, plan: SitePlan, version: int) -> None:
    code = PUBLISH.replace("ROWS", str(ROWS)).replace("COLUMNS", str(COLUMNS))
    support = {"PYTHONPATH": ":".join((str(Path(__file__).parents[1] / "support"), *sys.path))}
    publishing = wan.popen("home", [sys.executable, "-c", code, plan.to_json(), str(version)], environment=support)
    assert publishing.wait(200) == 0


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


def test_two_relays_bring_one_copy_though_the_active_one_is_killed_and_the_link_is_cut(
    wan: Wan, tmp_path: Path
) -> None:
    plan = SitePlan(contestant="etude", bucket=wan.address("home"), layers=1, seed=0, connections=4)
    bucket = wan.popen(
        "home", [sys.executable, "-m", "bench.sync.sites", "bucket", plan.to_json()], stdout=subprocess.PIPE
    )
    assert bucket.stdout is not None and json.loads(bucket.stdout.readline())["event"] == "ready"
    publish(wan, plan, 0)
    region = tmp_path / "region"
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
    assert copies <= 1.05, f"{copies:.3f} copies of {size_bytes} bytes"
    wan.cut("eu")
    publish(wan, plan, 1)
    time.sleep(CUT_S)
    wan.heal("eu")
    healed_s = time.monotonic()
    wait_until(lambda: log.latest() == 1, timeout_s=BACK_S)
    sys.stdout.write(f"{copies:.3f} copies; back {time.monotonic() - healed_s:.1f} s after the cut\n")
