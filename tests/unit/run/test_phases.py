"""The phases before RL: one after the other, each once, one descent, and version 0 at its end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError, RunFolderError
from etude.models.checkpoint import load_checkpoint
from etude.objects import ObjectStore
from etude.run.data_copies import bring_data
from etude.run.folder import LEDGER_URL, RunFolder
from etude.run.phase_data import cursor_tensors, read_cursors
from etude.run.phase_folders import Phase, PhaseFolders
from etude.run.phases import run_phase
from etude.run.processes import DATA_OF
from etude.run.weight_log import open_log
from etude.run.working_folder import RECIPE_FILES, WORK_VARIABLE, create_run, keep, open_run_folder
from etude.tasks.corpora.conversations import Conversations
from etude.tasks.corpora.mixture import Cursor, Side, Taken
from etude.telemetry.events import HeldoutLoss, ImitationProgress, Outage, PhaseEnded
from etude.telemetry.log import EventReader
from etude.tokens.chat import ChatTemplate
from etude.trainer.checkpoint import Checkpoints
from etude.types import Json
from etude.weights.pull import pull
from phases import run_phases

SHAPE: dict[str, Json] = {"vocab_size": 400, "hidden_size": 32, "layers": 1, "experts": 2, "expert_size": 16}
STEPS = 8


def config_of(sft: Path | None = None, **midtrain: Json) -> RunConfig:
    tree: dict[str, Json] = {
        "name": "phases",
        "tasks": {"options": {"kinds": ["arith"]}},
        "model": {"shape": SHAPE},
        "midtrain": {"tokens": 256 * STEPS, "batch_tokens": 256, "checkpoint_steps": 3, "threads": 1, **midtrain},
        "eval": {"loss_every_steps": 4, "heldout_every": 5},
        "trainer": {"device": "cpu"},
    }
    if sft is not None:
        tree["sft"] = {"file": str(sft), "batch_tokens": 256, "threads": 1, "warmup_steps": 1}
    return parse_config(tree, source="test")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"fix f{n}"}, {"role": "assistant", "content": f"read a{n}.py"}]}
        for n in range(40)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, chats: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path_factory.mktemp("done") / "run", config_of(chats))
    run_phases(folder)
    return folder


def events_of(folder: RunFolder) -> list[object]:
    return [logged.event for logged in EventReader(folder.events).new() if not isinstance(logged.event, Outage)]


def test_the_phases_follow_each_other_to_version_0(done: RunFolder) -> None:
    lineage = PhaseFolders(done)
    midtrain, sft = lineage.record("midtrain"), lineage.record("sft")
    assert midtrain is not None
    assert sft is not None
    assert (midtrain.steps, sft.parent) == (STEPS, midtrain.digest)
    assert sft.digest != sft.parent
    assert lineage.pending(done.config()) == []
    record = open_log(done).read(0)
    assert record is not None
    assert record.digest == sft.digest == pull(open_log(done), 0).digest, "float32 is published as it is"
    assert (done.model / "model.safetensors").read_bytes() == (lineage.model("sft") / "model.safetensors").read_bytes()


def test_phases_go_on_where_another_machine_was(
    done: RunFolder, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "first"))
    url = str(tmp_path / "url")
    config = config_of(chats)
    config = config.model_copy(update={"ledger": config.ledger.model_copy(update={"url": "postgresql:///app"})})
    folder = create_run(url, config)
    (folder.path / LEDGER_URL).write_text(str(tmp_path / "ledger.db"))
    keep(folder, *RECIPE_FILES)
    assert not folder.has_begun
    work_on(folder, "midtrain")
    assert folder.has_begun

    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "second"))
    second = open_run_folder(url)
    work_on(second, "sft")
    assert not PhaseFolders(second).checkpoints("midtrain").exists(), "it was done"
    assert pull(open_log(second), 0).digest == pull(open_log(done), 0).digest

    for place, prefix in (("phases/sft/model", "manifests"), ("weights", "")):
        lost = ObjectStore(f"{url}/{place}")
        lost.delete(*lost.list(prefix))
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "third"))
    third = open_run_folder(url)
    work_on(third, "sft")
    fresh = events_of(third)[len(events_of(second)) :]
    assert not any(isinstance(event, ImitationProgress) for event in fresh), "its newest checkpoint is its end"
    assert pull(open_log(third), 0).digest == pull(open_log(done), 0).digest


def work_on(folder: RunFolder, phase: Phase) -> None:
    """Do as a process of a phase does."""
    bring_data(folder, *DATA_OF[phase])
    run_phase(folder, phase)


def test_sft_reads_every_conversation_as_often_as_told(done: RunFolder) -> None:
    sft = PhaseFolders(done).record("sft")
    assert sft is not None
    checkpoint = max(PhaseFolders(done).checkpoints("sft").glob("step-*"))
    tensors = load_file(next(checkpoint.glob("*.safetensors")))
    [[(documents, tokens)]] = [tensor.tolist() for name, tensor in tensors.items() if name.startswith("cursor/")]
    chat = ChatTemplate.load(done.model)
    side = Side(seed=0, one_in=done.config().eval.heldout_every)
    learnt = Conversations(Path(done.config().sft.file), chat, side, context_weight=0.0)
    assert 20 < learnt.size < 40
    assert documents == done.config().sft.epochs * learnt.size
    assert tokens == sft.tokens == done.config().sft.epochs * learnt.tokens


def test_the_held_out_loss_is_measured_along_the_way_and_falls(done: RunFolder) -> None:
    losses = {(event.phase, event.step): event for event in events_of(done) if isinstance(event, HeldoutLoss)}
    assert {step for phase, step in losses if phase == "midtrain"} == {0, 4, STEPS}
    assert losses["midtrain", STEPS].loss < losses["midtrain", 0].loss
    assert set(losses["midtrain", 0].sources) == {"stdlib", "code", "sessions"}
    last = max(step for phase, step in losses if phase == "sft")
    assert losses["sft", last].loss < losses["sft", 0].loss
    assert losses["sft", last].action_loss == pytest.approx(losses["sft", last].loss)


def test_sft_of_an_adapter_changes_its_targets_alone_and_is_merged(tmp_path: Path, chats: Path) -> None:
    config = config_of(chats).model_dump(exclude_unset=True)
    lora = {"rank": 8, "alpha": 16.0, "targets": ["attention"], "phases": ["sft"]}
    folder = RunFolder.create(tmp_path / "run", parse_config({**config, "lora": lora}, source="test"))
    run_phases(folder)
    lineage = PhaseFolders(folder)
    record = lineage.record("sft")
    assert record is not None
    assert record.digest == pull(open_log(folder), 0).digest != record.parent
    _, before = load_checkpoint(lineage.model("midtrain"))
    _, after = load_checkpoint(folder.model)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and all("self_attn" in name and "_proj" in name for name in changed)
    for name in changed:
        assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-3) <= 8
    checkpoint = Checkpoints(lineage.checkpoints("sft"))
    names = checkpoint.load(max(checkpoint.steps()))
    assert not [name for name in names if name.startswith("model/") and "lora" not in name and "adapters" not in name]


def test_what_is_done_is_not_done_again(done: RunFolder) -> None:
    before = events_of(done)
    run_phases(done)
    assert events_of(done) == before


def test_adding_sft_does_not_disturb_a_finished_mid_training(done: RunFolder, tmp_path: Path, chats: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config_of(chats))
    shutil.copytree(done.path / "phases" / "midtrain", folder.path / "phases" / "midtrain")
    run_phases(folder)
    steps = [event.phase for event in events_of(folder) if isinstance(event, ImitationProgress)]
    assert set(steps) == {"sft"}
    assert PhaseFolders(folder).record("sft") == PhaseFolders(done).record("sft")


def test_a_phase_after_version_0_is_refused(done: RunFolder, tmp_path: Path, chats: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config_of(chats))
    shutil.copytree(done.path / "phases" / "midtrain", folder.path / "phases" / "midtrain")
    shutil.copytree(done.store, folder.store, dirs_exist_ok=True)
    with pytest.raises(RunFolderError, match=r"\[sft\] would have no effect on this run: start another"):
        run_phases(folder)


def test_a_copied_start_needs_no_phases(done: RunFolder, tmp_path: Path, chats: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config_of(chats))
    shutil.copytree(done.store, folder.store, dirs_exist_ok=True)
    run_phases(folder)
    assert not events_of(folder)


def test_a_run_may_start_from_a_phase_of_another(done: RunFolder, tmp_path: Path, chats: Path) -> None:
    config = config_of(chats, tokens=0)
    start = str(PhaseFolders(done).model("midtrain"))
    config = parse_config({**config.model_dump(), "model": {"checkpoint": start}}, source="test")
    folder = RunFolder.create(tmp_path / "run", config)
    run_phases(folder)
    midtrain, sft = PhaseFolders(folder).record("midtrain"), PhaseFolders(folder).record("sft")
    assert midtrain is not None
    assert (midtrain.steps, midtrain.digest) == (0, midtrain.parent)
    assert sft == PhaseFolders(done).record("sft")


def test_sft_waits_for_mid_training(tmp_path: Path, chats: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config_of(chats))
    with pytest.raises(RunFolderError, match="sft comes after midtrain"):
        run_phase(folder, "sft")
    with pytest.raises(RunFolderError, match="has no phase 'sft'"):
        run_phase(RunFolder.create(tmp_path / "other", config_of()), "sft")


def test_bad_conversations_are_refused_before_mid_training(done: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    folder = RunFolder.create(tmp_path / "run", config_of(tmp_path / "bad.jsonl"))
    shutil.copytree(done.path / "phases" / "start", folder.path / "phases" / "start")
    with pytest.raises(ConfigError, match="line 1: no message of the assistant has a weight above 0"):
        run_phases(folder)
    assert not [event for event in events_of(folder) if isinstance(event, ImitationProgress | PhaseEnded)]


def test_a_cursor_is_read_back_for_its_own_data_only() -> None:
    cursor = Cursor(taken={"text:a/b": Taken(documents=3, tokens=2**40), "code": Taken(documents=1, tokens=7)})
    other = Cursor(taken={"text:a/b": Taken(documents=2, tokens=9), "code": Taken()})
    tensors = cursor_tensors([cursor, other], "this")
    assert read_cursors({**tensors, "model/embedding": torch.zeros(1)}, "this", 2) == [cursor, other]
    alone = {name: tensor.reshape(-1) for name, tensor in cursor_tensors([cursor], "this").items()}
    assert read_cursors(alone, "this", 1) == [cursor], "as it was written when there was one reader"
    with pytest.raises(RunFolderError, match="made with other data"):
        read_cursors(tensors, "that", 2)
