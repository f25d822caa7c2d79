"""Dependencies for opening an engine kind without a run: a context, and versions of a small random model."""

from pathlib import Path

from etude.config.recipe import RunConfig
from etude.engines.kinds import EngineContext
from etude.models.checkpoint import save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import ModelSpec
from etude.run.numerics import engine_context
from etude.telemetry.log import EventLog
from etude.weights.digest import state_digest
from etude.weights.replica import PulledWeights
from etude.weights.tensors import to_stored


class PulledStates:
    """Weight versions of one model: version n has the weights of seed n."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def version(self, number: int) -> PulledWeights:
        """A version, as the log would give it."""
        model = Decoder(self._spec)
        model.initialise(number, std=0.2)
        state = to_stored(state_of(model))
        return PulledWeights(version=number, digest=state_digest(state), state=state)


def context_of(folder: Path, config: RunConfig, spec: ModelSpec) -> EngineContext:
    """A context whose files are in ``folder``; ``config`` has its ``auto`` resolved."""
    model = folder / "context-model"
    save_checkpoint(model, spec, state_of(Decoder(spec)), end_id=0, pad_id=0)
    return engine_context(config, spec, model_folder=model, logs=folder, events=EventLog(folder / "events", "engine"))
