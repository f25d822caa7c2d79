"""The models that `bench engine` and `bench numerics` measure, as folders that every contestant loads.

Shapes of tomorrow's models at a size that a laptop serves: what decides an engine's speed there is the same, many small
products per token. Weights are random: how fast a token comes does not depend on which it is.
"""

from dataclasses import dataclass
from pathlib import Path

from etude.config.inference import NumericsConfig
from etude.models.checkpoint import load_checkpoint, load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.spec import ExpertsSpec, GroupedSpec, ModelSpec
from etude.run.numerics import load_published, published_state, serving_model, training_model

VOCABULARY = 320
"""Bytes, and some room for control tokens."""
INIT_STD = 0.04
END_ID, PAD_ID = VOCABULARY - 1, VOCABULARY - 2
"""End and padding tokens in checkpoints; contestants must ignore them."""
_LAYERS, _HIDDEN, _POSITIONS = 6, 256, 4096
_ATTENTION = GroupedSpec(heads=8, kv_heads=2, head_dim=32, normed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A shape with a name."""

    name: str
    spec: ModelSpec

    @property
    def sparse(self) -> bool:
        """True if it has experts."""
        return self.spec.experts is not None


def _mixture(name: str, experts: int, per_token: int, size: int, *, layers: int = _LAYERS) -> BenchModel:
    spec = ModelSpec(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        layers=layers,
        attention=_ATTENTION,
        experts=ExpertsSpec(count=experts, per_token=per_token, size=size),
        sparse_layers=tuple(range(layers)),
        max_positions=_POSITIONS,
        tied=False,
    )
    return BenchModel(name=name, spec=spec)


MOE_20M = _mixture("moe-20m", experts=16, per_token=4, size=256)
"""Qwen3-MoE, 16 experts, 4 per token."""
MOE_64E8 = _mixture("moe-64e8", experts=64, per_token=8, size=64)
"""Qwen3-MoE, 64 experts, 8 per token: many experts with little work each."""
DENSE_7M = BenchModel(
    name="dense-7m",
    spec=ModelSpec(
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        layers=_LAYERS,
        attention=_ATTENTION,
        dense_size=1024,
        max_positions=_POSITIONS,
        tied=False,
    ),
)
"""Qwen3 without experts."""
MODELS = (MOE_20M, MOE_64E8, DENSE_7M)
QUICK_MODEL = _mixture("moe-quick", experts=16, per_token=4, size=64, layers=2)
"""For tests."""


def write_model(model: BenchModel, folder: Path, *, seed: int) -> None:
    """Write a model with random float32 weights as a Hugging Face checkpoint; equal seeds write equal files."""
    decoder = Decoder(model.spec)
    decoder.initialise(seed, INIT_STD)
    save_checkpoint(folder, model.spec, state_of(decoder), end_id=END_ID, pad_id=PAD_ID)


def load_trained(folder: Path, config: NumericsConfig) -> Decoder:
    """The checkpoint as loaded by a trainer on a CPU: float32 parameters, forward passes as in ``config``."""
    spec, state = load_checkpoint(folder)
    model = training_model(spec, config, "cpu").eval()
    assert isinstance(model, Decoder)
    load_state(model, state)
    return model


def load_served(folder: Path, config: NumericsConfig) -> Decoder:
    """The checkpoint as an engine on a CPU holds it after a trainer has published it."""
    trained = load_trained(folder, config)
    model = serving_model(trained.spec, config, "cpu")
    load_published(model, published_state(trained, config), config)
    return model
