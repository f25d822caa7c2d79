"""The whole loop as a user runs it: real processes, killed at any time, and nothing is lost or trained twice.

All tests share one mid-trained start (a fixture of some twenty seconds) and run a few small RL steps from it.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from bench.tiny_recipe import GROUP_SIZE, tiny_recipe
from etude.api.run import open_run
from etude.api.training import train
from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import RunFolderError
from etude.ledger.ledger import TRAIN
from etude.ledger.states import quorum
from etude.run.folder import RunFolder, exclusive, start_from
from etude.run.keys import KeyRole
from etude.run.launchers.fork_server import THREADING
from etude.run.stores import open_ledger
from etude.run.weight_log import open_log
from etude.telemetry.events import EngineStats, ProcessStarted, RolloutClosed, StepDone
from etude.telemetry.log import EventReader
from etude.types import RolloutStatus
from etude.weights.repair import verify
from picture import picture
from waiting import wait_until

STEPS, GROUPS = 40, 4
DEATHS = (
    ("serve", signal.SIGKILL),
    ("gateway", signal.SIGKILL),
    ("train", signal.SIGKILL),
    ("rollouts", signal.SIGKILL),
    ("rollouts", signal.SIGTERM),
)
"""Processes of a run in the order in which they die, and by what."""
STEPS_BETWEEN = 6
"""Steps from one death to the next: more than can be done without any one of the processes."""
DEADLINE_S = 600.0
"""A bound on what hangs, not on what a busy machine is slow at."""

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)


def config(heartbeat_timeout_s: float = 900.0, *, replicas: int = 1) -> RunConfig:
    tree = tiny_recipe(
        "faults",
        engine={"replicas": replicas},
        gateway={"replicas": replicas, "access_log": True},
        rollouts={"groups_per_step": GROUPS},
        harness={"options": {"max_turns": 4}},
        trainer={"steps": STEPS, "mismatch_share": 1.0},
        # It solves nothing, yet has to learn.
        effort={"weight": 1.0, "prices": {"call_tokens": 0.01, "final_tokens": 0.01}},
        eval={"enabled": True, "tasks": 8},
    )
    return parse_config({**tree, "heartbeat_timeout_s": heartbeat_timeout_s}, source="test")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("start") / "run", config())
    assert etude("midtrain", "--run", folder.path).returncode == 0
    return folder


@pytest.fixture
def folder(start: RunFolder, tmp_path: Path) -> RunFolder:
    """A fresh run folder that has mid-training behind it."""
    return fresh(start, tmp_path / "run", config())


def fresh(start: RunFolder, place: Path, recipe: RunConfig) -> RunFolder:
    copy = RunFolder.create(place, recipe)
    start_from(start, copy)
    return copy


def etude(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "etude", *map(str, arguments)]
    environment = {**THREADING, **os.environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment)


@contextmanager
def running(folder: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """``etude run --resume``, from outside."""
    command = [sys.executable, "-m", "etude", "run", "--resume", str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def replicas(folder: RunFolder, *numbers: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Further rollouts processes, started with the first: so small a run may be over in the time that a start takes."""
    wait_in(folder, lambda: "rollouts" in started(folder), "the first rollouts process was not started")
    command = [sys.executable, "-m", "etude", "rollouts", "--run", str(folder.path), "--replica"]
    processes = [subprocess.Popen([*command, str(number)]) for number in numbers]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def graded_by(folder: RunFolder, writer: str) -> int:
    logged = EventReader(folder.events).new()
    return sum(one.process == writer and isinstance(one.event, RolloutClosed) for one in logged)


def steps_done(folder: RunFolder) -> int:
    with open_ledger(folder) as ledger:
        return ledger.progress().steps_done


def wait_in(folder: RunFolder, met: Callable[[], bool], fault: str) -> None:
    wait_until(met, fault=lambda: f"{fault}: {read_logs(folder)}", every_s=0.05, timeout_s=DEADLINE_S)


def wait_for_step(folder: RunFolder, step: int) -> None:
    wait_in(folder, lambda: steps_done(folder) >= step, f"step {step} was not reached")


def wait_for_replacement(folder: RunFolder, process: str, pid: int) -> None:
    wait_in(folder, lambda: started(folder)[process] != pid, f"{process} was not replaced")


def started(folder: RunFolder) -> dict[str, int]:
    """The processes of a run, and the newest number of each."""
    events = [logged.event for logged in EventReader(folder.events).new()]
    return {event.process: event.pid for event in events if isinstance(event, ProcessStarted)}


def read_logs(folder: RunFolder) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folder.logs.glob("*.log")))


def check_nothing_lost_or_doubled(folder: RunFolder) -> None:
    """Every step done once, on groups of its own, from fully graded rollouts, and every version bit-sound."""
    with open_ledger(folder) as ledger:
        progress = ledger.progress()
        assert progress.steps_done == STEPS
        assert progress.consumed == STEPS * GROUPS
        assert progress.open == progress.ready == progress.claimed == 0
        groups = list(ledger.groups(TRAIN))
        assert len({group.task.task_id for group in groups}) == len(groups)
        stored = [group for group in groups if len(group.rollouts) >= quorum(GROUP_SIZE)]
        assert len(stored) == STEPS * GROUPS
        assert all(len(group.rollouts) + group.lost == GROUP_SIZE for group in stored)
        slots = Counter((group.index, rollout.slot) for group in stored for rollout in group.rollouts)
        assert set(slots.values()) == {1}
        assert all(r.status is RolloutStatus.GRADED and r.turns for group in stored for r in group.rollouts)
        assert len(ledger.rewards("after-sampled")) == len(ledger.rewards("before-greedy")) == 8
    log = open_log(folder)
    assert log.versions() == list(range(STEPS + 1))
    assert {check.fault for check in verify(log)} == {None}


def report(folder: RunFolder) -> dict[str, object]:
    result: dict[str, object] = orjson.loads(folder.report_json.read_bytes())
    return result


def test_a_run_survives_the_death_of_each_process(folder: RunFolder) -> None:
    with running(folder) as run:
        for death, (process, number) in enumerate(DEATHS):
            wait_for_step(folder, 2 + STEPS_BETWEEN * death)
            os.kill(started(folder)[process], number)
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, output + read_logs(folder)
    check_nothing_lost_or_doubled(folder)
    assert report(folder)["restarts"] == len(DEATHS)


@pytest.mark.heavy("a minute")
def test_two_engines_and_two_gateways_share_the_work_and_may_die(start: RunFolder, tmp_path: Path) -> None:
    folder = fresh(start, tmp_path / "run", config(replicas=2))
    with running(folder) as run:
        for death, process in enumerate(("serve-1", "gateway", "gateway-1", "serve")):
            wait_for_step(folder, 2 + STEPS_BETWEEN * death)
            os.kill(started(folder)[process], signal.SIGKILL)
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, output + read_logs(folder)
    check_nothing_lost_or_doubled(folder)
    result = orjson.loads(folder.report_json.read_bytes())
    assert result["restarts"] == 4
    assert result["staleness"]["max"] <= result["staleness"]["bound"] == 1
    assert result["mismatch"]["k3"] < 1e-9
    for name in ("serve", "serve-1"):
        assert tokens_of(folder, name) > 1000, name
    for name in ("gateway", "gateway-1"):
        lines = map(orjson.loads, (folder.logs / f"{name}.access.jsonl").read_bytes().splitlines())
        assert sum(line["status"] == 200 and "chat/completions" in line["route"] for line in lines) > 100, name
    check_no_secret_is_told(folder, output)


def tokens_of(folder: RunFolder, engine: str) -> int:
    events = [logged.event for logged in EventReader(folder.events, engine).new()]
    return sum(event.generated_tokens for event in events if isinstance(event, EngineStats))


def check_no_secret_is_told(folder: RunFolder, output: str) -> None:
    """Neither the run key nor a key derived from it is in a log, an event or a file of the run."""
    secrets = [(folder.path / "run.key").read_text().strip(), *map(folder.key, KeyRole)]
    for file in (*folder.logs.rglob("*"), *folder.events.iterdir(), *folder.path.glob("*.*")):
        if file.is_file() and file.name != "run.key":
            content = file.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), file
    assert not any(secret in output for secret in secrets)


@pytest.mark.heavy("a minute or two")
def test_a_frozen_process_is_noticed_and_replaced(start: RunFolder, tmp_path: Path) -> None:
    folder = fresh(start, tmp_path / "run", config(heartbeat_timeout_s=8.0))
    with running(folder) as run:
        for process in ("gateway", "train"):
            wait_for_step(folder, steps_done(folder) + 2)
            frozen = started(folder)[process]
            os.kill(frozen, signal.SIGSTOP)
            wait_for_replacement(folder, process, frozen)
            assert not Path(f"/proc/{frozen}").exists()
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 0, output + read_logs(folder)
    for process in ("gateway", "train"):
        assert f"{process} gave no sign of life for 8 s and was killed" in output
    check_nothing_lost_or_doubled(folder)


@pytest.mark.heavy("a minute or two")
def test_a_second_rollouts_process_helps_and_may_die(folder: RunFolder) -> None:
    with running(folder) as run, replicas(folder, 1, 2) as (doomed, other):
        wait_in(folder, lambda: graded_by(folder, "rollouts-1") > 0, "the first helper has done nothing")
        doomed.kill()
        output, _ = run.communicate(timeout=DEADLINE_S)
        last = other.wait(DEADLINE_S)
    assert (run.returncode, last) == (0, 0), output + read_logs(folder)
    check_nothing_lost_or_doubled(folder)
    assert graded_by(folder, "rollouts") > 0


def test_an_interrupted_run_goes_on_unless_its_checkpoint_is_damaged(folder: RunFolder) -> None:
    with exclusive(folder, "supervisor"):
        second = etude("run", "--resume", folder.path)
    assert second.returncode == 2
    assert "in use" in second.stderr

    stopped = stop(folder, signal.SIGINT)
    assert f"etude run --resume {folder.path}" in stopped
    assert f"report so far: {folder.report_html}" in stopped
    assert orjson.loads(folder.report_json.read_bytes())["finished"] is False
    assert "so far, not finished" in folder.report_html.read_text()
    stop(folder, signal.SIGKILL)

    sound = {file: file.read_bytes() for file in folder.checkpoints.glob("*/*.safetensors")}
    for file, content in sound.items():
        file.write_bytes(content[:-1])
    damaged = etude("run", "--resume", folder.path)
    assert damaged.returncode == 2
    assert any(str(file.relative_to(folder.checkpoints)) in damaged.stderr for file in sound)
    assert "Traceback" not in damaged.stderr
    for file, content in sound.items():
        file.write_bytes(content)

    resumed = etude("run", "--resume", folder.path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr + read_logs(folder)
    check_nothing_lost_or_doubled(folder)
    steps = [logged.event.step for logged in EventReader(folder.events).new() if isinstance(logged.event, StepDone)]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))


def stop(folder: RunFolder, number: signal.Signals) -> str:
    """Start or resume the run, stop its supervisor during a step, and return its output."""
    before = steps_done(folder)
    with running(folder) as run:
        wait_for_step(folder, before + 1)
        with pytest.raises(RunFolderError, match="in use"), exclusive(folder, "supervisor"):
            pass
        run.send_signal(number)
        output, _ = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == (130 if number is signal.SIGINT else -number), output
    pids = started(folder).values()
    wait_in(folder, lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "processes outlived the supervisor")
    assert before < steps_done(folder) < STEPS
    return output


@pytest.mark.filterwarnings("ignore")  # transformers warns about its own future
def test_an_undisturbed_run_reports_what_it_promised(folder: RunFolder, tmp_path: Path) -> None:
    done = etude("run", "--resume", folder.path)
    assert done.returncode == 0, done.stdout + done.stderr + read_logs(folder)
    check_nothing_lost_or_doubled(folder)
    result = orjson.loads(folder.report_json.read_bytes())
    assert result["staleness"]["max"] <= result["staleness"]["bound"] == 1
    assert result["mismatch"]["k3"] < 1e-9
    assert result["mismatch"]["coverage"] > 0.3
    assert result["rollouts"] == {"graded": STEPS * GROUPS * GROUP_SIZE, "failed_infra": 0, "dropped": 0}
    assert result["weights"]["mean_delta_bytes"] > 0  # or no version would differ from another
    assert result["weights"]["versions"] == STEPS  # and version 0, which the run of the fixture published
    assert 0 < result["busy"]["trainer"] <= 1
    assert 0 < result["busy"]["engine"] <= 1
    assert 50e6 < result["memory_bytes_max"] < 6e9
    assert folder.report_html.read_text().lower().startswith("<!doctype html>")
    drawn = picture(folder)
    assert drawn == picture(folder)
    assert "after" in drawn and "elapsed" in drawn
    assert drawn.count("@keyframes") == drawn.count('<g class="f') > 1
    check_export(folder, tmp_path / "hf")


def check_export(folder: RunFolder, out: Path) -> None:
    """``etude weights export`` gives an ordinary checkpoint with our logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from etude.models.checkpoint import load_spec
    from etude.run.numerics import load_published, training_model
    from etude.weights.pull import pull
    from etude.weights.tensors import to_tensors

    exported = etude("weights", "export", folder.path, out)
    assert exported.returncode == 0, exported.stderr
    ours = training_model(load_spec(folder.model), folder.config().numerics, "cpu")
    load_published(ours, to_tensors(pull(open_log(folder)).state), folder.config().numerics)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(out)("def f(a, b):\n    return a + b")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits[0], ours.logits(ours.forward_packed(ids[0])), atol=1e-5)


def test_a_damaged_delta_ends_the_run_with_its_name(folder: RunFolder) -> None:
    (victim,) = (Path(folder.store) / "packs").iterdir()
    payload = bytearray(victim.read_bytes())
    payload[len(payload) // 2] ^= 1
    victim.write_bytes(payload)
    done = etude("run", "--resume", folder.path)
    assert done.returncode == 2
    assert victim.name[:12] in done.stderr
    assert "Traceback" not in done.stderr
    assert etude("weights", "verify", folder.path).returncode == 2


@pytest.mark.heavy("a minute or two")
def test_a_python_program_follows_a_run_stops_it_and_goes_on(folder: RunFolder) -> None:
    run = open_run(folder.path)
    with train(run) as training:
        seen = [next(iter(training)).step]
        processes = [*started(folder).values()]
    assert all(not Path(f"/proc/{pid}").exists() for pid in processes)
    with exclusive(folder, "supervisor"):  # nobody has it any more
        committed = len(run.steps())
    assert 1 <= committed < STEPS
    with train(run) as training:
        seen += range(2, committed + 1)
        seen += [step.step for step in training]
    assert seen == list(range(1, STEPS + 1))
    check_nothing_lost_or_doubled(folder)
    assert run.report()["interruptions"] == 1
