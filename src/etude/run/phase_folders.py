"""Folders of the training phases before reinforcement learning, each of which is done once.

    phases/start/model/   random weights and a tokenizer learnt for them; not there where a recipe names a checkpoint
    phases/midtrain/      checkpoints/, and when it is done model/ with lineage.json in it
    phases/sft/           likewise; begins with the model of the phase before it

A phase is done when its ``model/`` is there: a Hugging Face folder that is made aside and renamed, so it is whole or
absent. Owns the names and that rename. Knows no model and loads no torch.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import orjson

from etude.config.imitation import ImitationConfig
from etude.config.recipe import RunConfig
from etude.config.training import ParallelConfig
from etude.errors import DamagedError, RunFolderError
from etude.fsync import sync
from etude.run.folder import RunFolder

Phase: TypeAlias = Literal["midtrain", "sft"]
"""A phase before reinforcement learning."""
RECORD_FILE = "lineage.json"
"""In the model folder that a phase leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """Record of a completed phase."""

    phase: str
    steps: int
    tokens: int
    loss: float | None
    """Held-out, nats per token, weighted as it was learnt; ``None`` where it was not measured."""
    digest: str
    """Digest of the float32 weights it ended with (:func:`etude.weights.digest.state_digest`)."""
    parent: str
    """Digest of those it began with."""


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a recipe, in order. Mid-training is always one, perhaps of zero steps."""
    return ("midtrain", "sft") if config.sft.file else ("midtrain",)


def settings_of(config: RunConfig, phase: Phase) -> ImitationConfig:
    """The recipe section of a phase."""
    return config.midtrain if phase == "midtrain" else config.sft


def parallel_of(config: RunConfig, phase: Phase) -> ParallelConfig:
    """The ranks of a phase; one, where it reads nothing."""
    if phase == "midtrain" and not config.midtrain.tokens:
        return ParallelConfig()
    return config.parallel.imitation


def ranks_of(config: RunConfig, command: str) -> int:
    """The ranks of a command of a run: the trainer's, a phase's; of any other one."""
    match command:
        case "train":
            return config.parallel.ranks
        case "midtrain" | "sft":
            return parallel_of(config, command).ranks
        case _:
            return 1


PHASES = "phases"
"""Folder of a run with what its phases leave, and its place at the run's URL."""


def checkpoints_place(phase: Phase) -> str:
    """Folder, below the run's, in which a phase saves its training state."""
    return f"{PHASES}/{phase}/checkpoints"


def model_place(phase: Phase | Literal["start"]) -> str:
    """The Hugging Face folder, below the run's, that a phase leaves."""
    return f"{PHASES}/{phase}/model"


class PhaseFolders:
    """The phase folders of one run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._path = folder.path / PHASES

    def checkpoints(self, phase: Phase) -> Path:
        """Folder in which a phase saves its training state."""
        return self._folder / checkpoints_place(phase)

    def model(self, phase: Phase | Literal["start"]) -> Path:
        """The Hugging Face folder that a phase leaves."""
        return self._folder / model_place(phase)

    def record(self, phase: Phase) -> PhaseRecord | None:
        """Record of a phase, once it is done. Raises :class:`~etude.errors.DamagedError` if that cannot be read."""
        file = self.model(phase) / RECORD_FILE
        if not self.model(phase).exists():
            return None
        try:
            return PhaseRecord(**orjson.loads(file.read_bytes()))
        except (OSError, TypeError, orjson.JSONDecodeError) as error:
            raise DamagedError(f"{file} is missing or damaged: {error}; restore it, or start a new run") from error

    def pending(self, config: RunConfig) -> list[Phase]:
        """The phases that are still to be done, in order.

        Raises :class:`~etude.errors.RunFolderError` where one is missing before one that is done: its model would have
        no place in the descent.
        """
        phases = phases_of(config)
        done = [self.record(phase) is not None for phase in phases]
        if sorted(done, reverse=True) != done:
            raise RunFolderError(f"{self._path}: of {', '.join(phases)} a later one is done before an earlier one")
        return [phase for phase, is_done in zip(phases, done, strict=True) if not is_done]

    def origin(self, phase: Phase, config: RunConfig) -> Path:
        """The model folder that a phase begins with: of the phase before, or the recipe's checkpoint, or the start."""
        phases = phases_of(config)
        index = phases.index(phase)
        if index:
            return self.model(phases[index - 1])
        return Path(config.model.checkpoint) if config.model.checkpoint else self.model("start")


def check_complete(lineage: PhaseFolders, config: RunConfig) -> None:
    """Raise :class:`~etude.errors.RunFolderError` for a phase after version 0 was published.

    A folder that version 0 was copied into has no phases, and needs none.
    """
    pending, phases = lineage.pending(config), phases_of(config)
    if pending and len(pending) < len(phases):
        raise RunFolderError(
            f"weight version 0 is published, [{pending[0]}] would have no effect on this run: start another with "
            f"midtrain.tokens = 0 and model.checkpoint = {str(lineage.model(phases[-len(pending) - 1]))!r}"
        )


def place(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder atomically: ``fill`` writes into a temporary one, which is then renamed.

    One that is there already is left alone: another process made the same.
    """
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    for file in partial.rglob("*"):
        sync(file)
    sync(partial)
    partial.rename(target)
    sync(target.parent)


def write_record(folder: Path, record: PhaseRecord) -> None:
    """Write the record of a phase beside its model."""
    (folder / RECORD_FILE).write_bytes(orjson.dumps(asdict(record), option=orjson.OPT_INDENT_2) + b"\n")
