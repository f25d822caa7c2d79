"""Folders of the training phases before reinforcement learning, each of which runs once.

    phases/start/model/   random weights and a trained tokenizer; absent if the recipe names a checkpoint
    phases/midtrain/      checkpoints/, and when done model/ with lineage.json
    phases/sft/           likewise; starts from the model of the previous phase

A phase is done when its ``model/`` exists: a Hugging Face folder that is written elsewhere and renamed, so it is
complete or absent. This module owns the names and that rename. It knows no model and does not import torch.
"""

import errno
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from uuid import uuid4

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
"""File in the model folder of a phase."""
PARTIAL = ".partial"
"""Suffix of a folder that is being written; the trainer removes those among its checkpoints when it saves one, which is
after every node has its own."""
LEFT_S = 86_400.0
"""Age from which such a folder is left of a process that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """Record of a completed phase."""

    phase: str
    steps: int
    tokens: int
    loss: float | None
    """Held-out loss in nats per token, weighted as in training; ``None`` if it was not measured."""
    digest: str
    """Digest of the final float32 weights (:func:`etude.weights.digest.state_digest`)."""
    parent: str
    """Digest of the initial weights."""


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """The phases of a recipe, in order. Mid-training is always included, possibly with zero steps."""
    return ("midtrain", "sft") if config.sft.file else ("midtrain",)


def settings_of(config: RunConfig, phase: Phase) -> ImitationConfig:
    """The recipe section of a phase."""
    return config.midtrain if phase == "midtrain" else config.sft


def parallel_of(config: RunConfig, phase: Phase) -> ParallelConfig:
    """The ranks of a phase; one if it reads no data."""
    if phase == "midtrain" and not config.midtrain.tokens:
        return ParallelConfig()
    return config.parallel.imitation


def ranks_of(config: RunConfig, command: str) -> int:
    """The number of ranks of a command: of the trainer or a phase; 1 for any other command."""
    match command:
        case "train":
            return config.parallel.ranks
        case "midtrain" | "sft":
            return parallel_of(config, command).ranks
        case _:
            return 1


PHASES = "phases"
"""Folder of the phases in the run folder and at the run's URL."""


def checkpoints_place(phase: Phase) -> str:
    """Folder, relative to the run folder, for the training state of a phase."""
    return f"{PHASES}/{phase}/checkpoints"


def model_place(phase: Phase | Literal["start"]) -> str:
    """The Hugging Face folder, relative to the run folder, with the model of a phase."""
    return f"{PHASES}/{phase}/model"


class PhaseFolders:
    """The phase folders of one run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._path = folder.path / PHASES

    def checkpoints(self, phase: Phase) -> Path:
        """Folder for the training state of a phase."""
        return self._folder / checkpoints_place(phase)

    def model(self, phase: Phase | Literal["start"]) -> Path:
        """The Hugging Face folder with the model of a phase."""
        return self._folder / model_place(phase)

    def record(self, phase: Phase) -> PhaseRecord | None:
        """Record of a phase, once it is done. Raises :class:`~etude.errors.DamagedError` if it is unreadable."""
        file = self.model(phase) / RECORD_FILE
        if not self.model(phase).exists():
            return None
        try:
            return PhaseRecord(**orjson.loads(file.read_bytes()))
        except (OSError, TypeError, orjson.JSONDecodeError) as error:
            raise DamagedError(f"{file} is missing or damaged: {error}; restore it, or start a new run") from error

    def pending(self, config: RunConfig) -> list[Phase]:
        """The remaining phases, in order.

        Raises :class:`~etude.errors.RunFolderError` if a missing phase precedes a finished one: its model would not be
        part of the lineage.
        """
        phases = phases_of(config)
        done = [self.record(phase) is not None for phase in phases]
        if sorted(done, reverse=True) != done:
            raise RunFolderError(f"{self._path}: of {', '.join(phases)}, a later one is done but not an earlier one")
        return [phase for phase, is_done in zip(phases, done, strict=True) if not is_done]

    def origin(self, phase: Phase, config: RunConfig) -> Path:
        """The initial model folder of a phase: that of the previous phase, the recipe's checkpoint, or the random
        start.
        """
        phases = phases_of(config)
        index = phases.index(phase)
        if index:
            return self.model(phases[index - 1])
        return Path(config.model.checkpoint) if config.model.checkpoint else self.model("start")


def check_complete(lineage: PhaseFolders, config: RunConfig) -> None:
    """Raise :class:`~etude.errors.RunFolderError` if some phases are done and others are not; call it once version 0 is
    published, when a phase can no longer have an effect.

    A folder without any finished phase is complete: version 0 was copied into it.
    """
    pending, phases = lineage.pending(config), phases_of(config)
    if pending and len(pending) < len(phases):
        raise RunFolderError(
            f"weight version 0 is published, so [{pending[0]}] would have no effect on this run: start another with "
            f"midtrain.tokens = 0 and model.checkpoint = {str(lineage.model(phases[-len(pending) - 1]))!r}"
        )


def place(target: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically: ``fill`` writes into a temporary folder, which is then renamed.

    An existing folder is unchanged, also one that appears meanwhile: another process, maybe on another machine that
    shares the disk, created the same one.
    """
    if target.exists():
        return
    for left in target.parent.glob(f"{target.name}.*{PARTIAL}"):
        with suppress(FileNotFoundError):  # another process has renamed or removed it
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(f"{target.name}.{uuid4().hex}{PARTIAL}")  # each process its own
    partial.mkdir(parents=True)
    try:
        fill(partial)
        for file in partial.rglob("*"):
            sync(file)
        sync(partial)
        _rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync(target.parent)


def _rename(partial: Path, target: Path) -> None:
    """Rename a folder, unless ``target`` exists by now."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def write_record(folder: Path, record: PhaseRecord) -> None:
    """Write the record of a phase into its model folder."""
    (folder / RECORD_FILE).write_bytes(orjson.dumps(asdict(record), option=orjson.OPT_INDENT_2) + b"\n")
