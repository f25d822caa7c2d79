"""A run at a URL continues after its machine's disks are lost, and can be read from anywhere.

The storage is an S3 server, the processes are real, and they are killed. Only the ledger stays where it is.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from databases import temporary_server
from etude.api.run import open_run
from etude.cli.main import main
from etude.config.loading import default_recipe
from etude.errors import DamagedError
from etude.ledger.ledger import TRAIN, Ledger
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import TINY
from etude.objects import ObjectStore
from etude.run.folder import RunFolder
from etude.run.numerics import published_state
from etude.run.publishing import WeightPublishing
from etude.run.weight_log import open_log
from etude.run.working_folder import MODEL, RECIPE_FILES, WORK_VARIABLE, keep, open_run_folder, working_path
from etude.telemetry.log import EventLog
from etude.weights.repair import verify
from records import TASK, make_rollout
from records import make_turn as turn_of
from tiny_runs import SHAPE
from waiting import wait_until

STEPS = 5
URL = "s3://bucket/runs/one"
DEADLINE_S = 600.0
"""A bound on what hangs, not on what a busy machine is slow at."""

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty bucket for the processes of a test, and the folder of their working folders."""
    for name, value in {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        WORK_VARIABLE: str(tmp_path / "work"),
    }.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket")
    store.delete(*store.list(""))
    return tmp_path / "work"


def make_run(path: Path, *, at: str = "", every: int = 1) -> RunFolder:
    """A run with batches of one group that has published version 0; its ledger is outside of its folder."""
    batches = ("rollouts.groups_per_step=1", "rollouts.group_size=2", "rollouts.concurrency=4")
    trainer = (
        "trainer.device=cpu",
        "trainer.mismatch_share=0",
        f"trainer.steps={STEPS}",
        f"trainer.checkpoint_steps={every}",
    )
    config = default_recipe([*batches, *trainer, "engine.device=cpu", "numerics.replay=off"])
    ledger = path.parent / f"{path.name}.db"
    folder = RunFolder.create(working_path(at) if at else path, config, at=at, ledger=str(ledger))
    model = Decoder(TINY)
    model.initialise(0, std=0.2)
    save_checkpoint(folder.model, TINY, state_of(model), end_id=1, pad_id=0)
    keep(folder, *RECIPE_FILES, *MODEL)
    with (
        EventLog(folder.events, "test") as events,
        WeightPublishing(open_log(folder), config.name, events) as publishing,
    ):
        publishing.start(published_state(model, config.numerics), 0)
        publishing.land()
    return folder


def admit(ledger_place: str, *numbers: int) -> None:
    """Groups of two rollouts, one of which got it right."""
    with Ledger.open(ledger_place) as ledger:
        for number in numbers:
            index = ledger.admit_group(replace(TASK, task_id=f"t{number}"), TRAIN, 2, 0)
            assert index is not None
            for slot, reward in enumerate((0.0, 1.0)):
                turns = turn_of([1, 2], [3, 4 + (number + slot) % 3])
                ledger.record(make_rollout(f"{number}.{slot}", turns, group=index, slot=slot, reward=reward), TRAIN)


def steps_done(ledger_place: str) -> int:
    with Ledger.open(ledger_place) as ledger:
        return ledger.progress().steps_done


def digests(folder: RunFolder) -> list[str]:
    log = open_log(folder)
    records = [log.read(version) for version in log.versions()]
    return [record.digest for record in records if record is not None]


def etude(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "etude", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "etude", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def lose(disks: Path) -> None:
    """Delete the disks of the old machine: a new one has nothing of it."""
    shutil.rmtree(disks)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.heavy("a minute")
def test_a_trainer_whose_disk_is_lost_goes_on_to_the_same_bits(bucket: Path, tmp_path: Path, every: int) -> None:
    whole = make_run(tmp_path / "whole")
    admit(whole.ledger, *range(STEPS))
    assert etude("train", "--run", str(whole.path)).returncode == 0

    ledger = make_run(tmp_path / "lost", at=URL, every=every).ledger
    admit(ledger, 0, 1)
    with running("train", "--run", URL) as trainer:
        wait_until(lambda: trainer.poll() is not None or steps_done(ledger) == 2, every_s=0.1, timeout_s=DEADLINE_S)
        assert trainer.poll() is None, trainer.communicate()[0]
    lose(bucket)
    admit(ledger, *range(2, STEPS))
    resumed = etude("train", "--run", URL)
    assert resumed.returncode == 0, resumed.stderr
    assert steps_done(ledger) == STEPS

    folder = open_run_folder(URL)
    assert digests(folder) == digests(whole)
    copies = ObjectStore(f"{URL}/checkpoints")
    saved = [step for step in range(1, STEPS + 1) if step % every == 0 or step == STEPS][-2:]
    assert copies.list("manifests") == [f"manifests/{step:08d}.json" for step in saved]
    assert len(copies.list("parts")) == 2 * 2
    assert not any("key" in key.rpartition("/")[2] for key in ObjectStore(URL).list(""))

    lose(bucket)
    shown = etude("show", URL)
    assert shown.returncode == 0 and f"{STEPS} steps" in shown.stdout, shown.stdout + shown.stderr
    assert [step.step for step in open_run(URL).steps()] == list(range(1, STEPS + 1))
    assert not list(bucket.glob("*/model/*.safetensors")), "a reader has no use for weights"

    lose(bucket)
    copies.delete(*copies.list("parts"))
    broken = etude("train", "--run", URL)
    assert broken.returncode == 2
    assert f"etude: {URL}/checkpoints/parts/" in broken.stderr and "is missing: restore it" in broken.stderr


def test_a_manifest_that_leads_out_of_the_folder_is_an_error_with_its_name(bucket: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", at=URL)
    files = ObjectStore(f"{URL}/files")
    newest = files.list("manifests")[-1]
    data = files.get(newest)
    assert data is not None
    files.put_if_absent("manifests/00000009.json", data.replace(b'"run.toml"', b'"../run.toml"'))
    lose(bucket)
    refused = etude("serve", "--run", URL)
    assert refused.returncode == 2
    assert f"etude: manifest {URL}/files/manifests/00000009.json cannot be read" in refused.stderr
    assert not list(bucket.parent.rglob("run.toml"))


def test_what_cannot_be_at_a_url_is_refused_before_anything_is_made(
    bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("name = 'x'\n")
    for arguments, words in (
        (("--at", URL), "ledger.url is empty"),
        (("--at", "s3://bucket"), "'s3://bucket' is not a URL of a run"),
        (("--at", "ftp://x/y"), "'ftp://x/y' is not a URL of a run"),
        (("--at", URL, "--out", str(tmp_path / "out")), "would have no effect with --at"),
        (("--at", "s3://nowhere/runs/x", "--ledger", "postgresql:///app"), "object store s3://nowhere/runs/x/files"),
    ):
        assert main(["run", str(recipe), *arguments]) in (1, 2)
        assert words in capsys.readouterr().err
    assert main(["run", "--resume", URL]) == 2
    assert f"there is no run at {URL}" in capsys.readouterr().err
    assert ObjectStore("s3://bucket").list("") == []
    assert not bucket.exists()


def test_a_run_whose_machine_is_lost_is_resumed_by_its_url_alone(
    bucket: Path, tmp_path: Path, postgresql: None
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("name = 'lost'\n")
    settings = (
        *("tasks.options.kinds=['arith']", "midtrain.tokens=20000", "midtrain.batch_tokens=1000"),
        *(
            "midtrain.warmup_steps=5",
            "rollouts.groups_per_step=2",
            "rollouts.group_size=2",
            "rollouts.concurrency=8",
            "eval.tasks=4",
        ),
        *("harness.options.max_turns=3", "trainer.steps=8", "trainer.mismatch_share=1.0"),
        *("effort.weight=1.0", "effort.prices={call_tokens=0.01, final_tokens=0.01}"),
        *(f"model.shape.{key}" for key in SHAPE),
    )
    options = [word for setting in settings for word in ("--set", setting)]
    with temporary_server() as server:
        with running("run", str(recipe), "--at", URL, "--ledger", server.url, *options) as run:

            def has_come_far() -> bool:
                if run.poll() is not None:
                    return True
                there = list(bucket.glob("*/ledger.url"))
                log = open_log(open_run_folder(URL)) if there and list(bucket.glob("*/model")) else None
                return log is not None and (log.latest() or 0) >= 3

            wait_until(has_come_far, every_s=0.5, timeout_s=DEADLINE_S)
            assert run.poll() is None, run.communicate()[0]
            run.send_signal(signal.SIGKILL)
        wait_until(lambda: not _processes_in(bucket), every_s=0.2, timeout_s=60)
        lose(bucket)
        resumed = etude("run", "--resume", URL)
        assert resumed.returncode in (0, 3), resumed.stdout + resumed.stderr
        lose(bucket)
        folder = open_run_folder(URL)
        log = open_log(folder)
        assert log.versions() == list(range(9))
        assert {check.fault for check in verify(log)} == {None}
        with Ledger.open(folder.ledger) as ledger:
            assert ledger.progress().steps_done == 8
            assert ledger.progress().consumed == 8 * 2
            with pytest.raises(DamagedError, match="which is not there"):
                ledger.group(TRAIN, 0)
        turns = ObjectStore(f"{URL}/payloads").list("turns")
        assert len(turns) >= 8 * 2 * 2 + 4 * 4, "of training, and of 4 tasks, two ways, before and after"
        assert ObjectStore(f"{URL}/phases/midtrain/model").list("manifests") == ["manifests/00000001.json"]
        steps = [step.step for step in open_run(URL).steps()]
        lost = set(range(1, 9)) - set(steps)
        assert steps == sorted(steps) and lost <= set(range(2, 7)) and len(lost) <= 2, (
            "seconds before the machine was lost"
        )
        assert "</html>" in folder.report_html.read_text(encoding="utf-8")
        shown = etude("show", URL, "--group", "0")
        assert shown.returncode == 0 and "group 0" in shown.stdout, shown.stdout + shown.stderr


def _processes_in(folder: Path) -> list[int]:
    """Processes of this machine whose command line names a folder."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in file.read_bytes():
                processes.append(int(file.parent.name))
        except OSError:
            continue
    return processes
