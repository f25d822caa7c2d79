"""One step: gradients of micro-batches add up, groups keep their own rates, and a restored step continues exactly."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from etude.errors import DamagedError
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.models.spec import TINY, TINY_DENSE
from etude.trainer.optimisation import Optimisation, RateSchedule

SCHEDULE = RateSchedule(steps=10, warmup_steps=4)


def make(*, clip_norm: float = 1e9) -> Optimisation:
    model = Decoder(TINY)
    model.initialise(0)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimiser = torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": gains, "lr": 1e-3}])
    return Optimisation(model, optimiser, SCHEDULE, clip_norm=clip_norm)


def losses(model: CausalModel, chunks: int = 2) -> Iterator[Tensor]:
    for chunk in range(chunks):
        hidden_NH = model.forward_packed(torch.arange(1 + chunk, 9 + chunk))
        yield model.logits(hidden_NH).square().mean() / chunks


def test_the_rate_of_each_group_is_a_share_of_its_own_peak() -> None:
    optimisation = make()
    groups = optimisation._optimiser.param_groups
    for step, share in ((1, 0.25), (2, 0.5), (4, 1.0)):
        optimisation.step(step, losses(optimisation.model))
        assert [group["lr"] for group in groups] == pytest.approx([1e-2 * share, 1e-3 * share])


def test_the_weights_change_after_the_call_that_says_so() -> None:
    optimisation = make()
    before = optimisation.model.embedding.detach().clone()
    seen: list[bool] = []

    def look() -> None:
        gradient = optimisation.model.embedding.grad
        seen.append(gradient is not None and torch.equal(optimisation.model.embedding, before))

    norm = optimisation.step(1, losses(optimisation.model), look)
    assert seen == [True]
    assert norm > 0
    assert not torch.equal(optimisation.model.embedding, before)


def test_one_graph_at_a_time_is_alive() -> None:
    """A micro-batch is computed only after the backward pass of the one before."""
    optimisation = make()
    order: list[str] = []

    def message() -> Iterator[Tensor]:
        for number, loss in enumerate(losses(optimisation.model)):
            order.append(f"forward {number}")
            loss.register_hook(lambda _, number=number: order.append(f"backward {number}"))
            yield loss

    optimisation.step(1, message())
    assert order == ["forward 0", "backward 0", "forward 1", "backward 1"]


def test_a_restored_one_goes_on_with_the_same_bits() -> None:
    whole, first, second = make(), make(), make()
    for step in range(1, 5):
        whole.step(step, losses(whole.model))
    for step in range(1, 3):
        first.step(step, losses(first.model))
    second.restore({name: tensor.clone() for name, tensor in first.tensors().items()})
    for step in range(3, 5):
        second.step(step, losses(second.model))
    assert whole.tensors().keys() == second.tensors().keys()
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name


def test_the_state_of_another_model_is_refused() -> None:
    with pytest.raises(DamagedError, match="is missing, or another model's"):
        make().restore({f"model/{name}": tensor for name, tensor in Decoder(TINY_DENSE).state_dict().items()})
