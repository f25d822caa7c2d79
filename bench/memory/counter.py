"""Bytes of tensors that are alive, counted as torch makes and frees them, beside what the plan says of them.

A storage counts from the operation that returns it until it is freed: what the allocator, the libraries and the program
take is not there. So the figure is that of the formula (:mod:`etude.run.memory_plan`), on any machine.
"""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.trainer.contestants import Example, policy_trainer, trajectory_of
from etude.config.loading import default_recipe
from etude.models.decoder import Decoder
from etude.models.sizes import ModelSizes
from etude.models.spec import ExpertsSpec, GroupedSpec, LatentSpec, ModelSpec, RopeSpec
from etude.run.memory_plan import trainer_memory
from etude.run.numerics import training_model
from etude.run.resolve import resolve
from etude.trainer.losses import Totals
from etude.trainer.policy import PolicyTrainer

LENGTH = 512
TOKENS = 2048
"""Tokens of a pass; two of them are a step."""
_GROUPED = GroupedSpec(heads=8, kv_heads=4, head_dim=32, normed=True)
DENSE = ModelSpec(
    vocab_size=4096, hidden_size=256, layers=6, attention=_GROUPED, dense_size=768, max_positions=4096, tied=False
)
CASES: Mapping[str, tuple[ModelSpec, bool]] = MappingProxyType(
    {
        "dense": (DENSE, False),
        "dense, recomputed": (DENSE, True),
        "experts": (
            replace(
                DENSE,
                dense_size=0,
                experts=ExpertsSpec(count=16, per_token=4, size=128),
                sparse_layers=tuple(range(6)),
            ),
            False,
        ),
        "latent": (
            replace(
                DENSE,
                attention=LatentSpec(heads=4, q_rank=96, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
                rope=RopeSpec(interleaved=True),
            ),
            False,
        ),
    }
)
"""Name → a shape, and whether its activations are recomputed."""


@final
class ByteCounter(TorchDispatchMode):
    """Counts the bytes of storages that operations return, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.alive = 0
        self.peak = 0
        self._counted = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := _storage(leaf))._cdata not in before | self._counted:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._counted.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.alive -= size


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def formula_and_counter(spec: ModelSpec, *, recomputes: bool) -> tuple[int, int]:
    """(bytes by formula, bytes by counter) of the second of two training steps, on the CPU in bfloat16."""
    settings = ["engine.device=cpu", "trainer.device=cpu", "numerics.arithmetic=fast", "numerics.dtype=bfloat16",
                "numerics.replay=off", f"engine.max_length={LENGTH}", f"trainer.microbatch_tokens={TOKENS}",
                f"trainer.checkpoint_activations={str(recomputes).lower()}"]  # fmt: skip
    config = resolve(default_recipe(settings))
    model = training_model(spec, config.numerics, "cpu").train()
    assert isinstance(model, Decoder)
    model.initialise(0)
    model.recompute = recomputes
    trainer: PolicyTrainer = policy_trainer(model, config.numerics, steps=2)
    ids = torch.randint(0, spec.vocab_size, (2 * TOKENS,)).tolist()
    rows = [Example(token_ids=ids[at : at + LENGTH], sampled=[True] * LENGTH) for at in range(0, len(ids), LENGTH)]
    trajectories = [trajectory_of(index, row) for index, row in enumerate(rows)]
    microbatches = [trajectories[: len(rows) // 2], trajectories[len(rows) // 2 :]]
    totals = Totals(tokens=len(ids), trajectories=len(rows))
    trainer.step(1, microbatches, totals)
    resident = sum(tensor.nbytes for tensor in trainer.optimisation.tensors().values())
    with ByteCounter() as counter:
        trainer.step(2, microbatches, totals)
    return trainer_memory(config, spec, ModelSizes.of(spec)).total, resident + counter.peak
