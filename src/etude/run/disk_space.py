"""Disk space of a new run: the estimated need, checked before the run is created.

The estimate is a lower bound: rollouts, payloads and logs are excluded, since their size is unknown.
"""

from dataclasses import dataclass
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.config.training import ModelShape, OptimiserConfig
from etude.dashboard import formatting
from etude.errors import UserError
from etude.models.checkpoint import load_spec, spec_from_shape
from etude.run.numerics import DTYPES, count_parameters
from etude.run.phase_folders import phases_of
from etude.storage import free_bytes
from etude.trainer.checkpoint import KEEP
from etude.weights.publish import PublishOptions

MOMENTS = {"adamw": 2, "muon": 1}
"""Number of moments per parameter (Muon's matrices have one, all others two)."""
MOMENT_BYTES = {"fp32": 4, "offload": 4, "8bit": 1}
"""Bytes per moment by ``optimiser.state``."""
MODEL_BYTES = 4
"""Bytes of a parameter in a phase's model, and in a training checkpoint without its moments."""
ANCHOR_SHARE, DELTA_SHARE = 1 / 1.5, 1 / 135
"""Shares of a state's bytes that a whole version and a small step take in the weight store (docs/weights.md,
*Measured*).
"""
AMPLE = 2
"""Multiple of the need; less free space causes a warning."""


def moment_bytes(config: OptimiserConfig) -> int:
    """Bytes of a parameter's moments, in GPU or host memory."""
    return MOMENTS[config.kind] * MOMENT_BYTES[config.state]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """The least number of bytes that a run will use on disk."""

    parameters: int
    checkpoints: int
    """Training states of reinforcement learning: the retained ones and the one being written."""
    phases: int
    """The last training state of each phase, and all models: each phase's, the run's own and a random start."""
    weights: int
    """The weight store: nothing is deleted from it during a run."""

    @classmethod
    def of(cls, config: RunConfig, parameters: int) -> "DiskNeed":
        """Disk space that a recipe takes with a model of a given size. Pure."""
        state, model = parameters * (MODEL_BYTES + moment_bytes(config.optimiser)), parameters * MODEL_BYTES
        trained = int(config.midtrain.tokens > 0) + int(bool(config.sft.file))
        models = len(phases_of(config)) + 1 + int(not config.model.checkpoint)  # the run's own; a random start
        published, versions = parameters * DTYPES[config.numerics.stored_dtype].itemsize, config.trainer.steps
        wholes = 1 + versions // PublishOptions().anchor_every
        if config.numerics.experts != "plain":
            published = parameters // 2  # 4-bit experts are almost all of it
        return cls(
            parameters=parameters,
            checkpoints=min(versions, KEEP + 1) * state,
            phases=trained * state + models * model,
            weights=int(published * (wholes * ANCHOR_SHARE + versions * DELTA_SHARE)),
        )

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.checkpoints + self.phases + self.weights

    def compare(self, free: int, place: Path) -> list[str]:
        """A warning if there are few ``free`` bytes, else nothing. Raises :class:`~etude.errors.UserError` if the run
        does not fit.
        """
        figures = (
            f"the disk of {place} has {formatting.size(free)} free, and this run with a model of {self.parameters:,} "
            f"parameters takes at least {formatting.size(self.total)}: training checkpoints "
            f"{formatting.size(self.checkpoints)}, "
            f"phases and their models {formatting.size(self.phases)}, weight versions {formatting.size(self.weights)}"
        )
        if free < self.total:
            raise UserError(f"{figures}; make room there, or choose another --out")
        if free < AMPLE * self.total:
            return [f"{figures}; rollouts and logs come on top"]
        return []


def check_disk_space(config: RunConfig, place: Path) -> list[str]:
    """Warnings about the disk of a new run at ``place``. Raises as :meth:`DiskNeed.compare`."""
    checkpoint, shape = config.model.checkpoint, config.model.shape
    spec = (
        spec_from_shape(shape, shape.vocab_size)
        if isinstance(shape, ModelShape)
        else load_spec(Path(checkpoint), config.model.impl)
    )
    return DiskNeed.of(config, count_parameters(spec)).compare(free_bytes(place), place)
