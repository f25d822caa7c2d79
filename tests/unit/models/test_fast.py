"""Backward passes of torch's kernels: nothing rounded is kept, and no gradient is garbage."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic, weight_gradient
from etude.models.spec import TINY_LATENT


def test_no_rounded_copy_of_a_parameter_is_kept_and_the_gradients_are_the_same_bits() -> None:
    """Measured with hooks on saved tensors: a bfloat16 copy of each parameter was 2 bytes a parameter."""
    model = Decoder(replace(TINY_LATENT, hidden_size=64), FastArithmetic(torch.bfloat16))
    model.initialise(0, std=0.1)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    matrices = {tuple(parameter.shape[-2:]) for parameter in model.parameters() if parameter.ndim > 1}
    matrices |= {shape[::-1] for shape in matrices}
    copies: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        if saved.untyped_storage().data_ptr() not in own and tuple(saved.shape[-2:]) in matrices:
            copies.append(saved.nbytes)
        return saved

    tokens = torch.arange(37)  # a number of rows that no matrix has
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        hidden_NH = model.forward_packed(tokens)
        model.logits(hidden_NH).float().square().sum().backward()
    assert copies == []
    torchs = Decoder(model.spec, RoundedOnce(torch.bfloat16))
    torchs.load_state_dict(model.state_dict())
    torchs.logits(torchs.forward_packed(tokens)).float().square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), torchs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad), name


class RoundedOnce(FastArithmetic):  # type: ignore[misc]  # final for the product's code
    """torch's own derivatives, which keep the rounded weights."""

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        bias_O = None if bias_O is None else bias_O.to(x_NI.dtype)
        return functional.linear(x_NI, self._rounded(weight_OI).to(x_NI.dtype), bias_O)

    def grouped(self, x_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None = None) -> Tensor:
        assert bias_EO is None
        weight_EIO = self._rounded(weight_EOI).to(x_RI.dtype).transpose(1, 2)
        return functional.grouped_mm(x_RI, weight_EIO, offs=ends_E)


def test_the_gradient_of_an_expert_without_rows_is_zero_where_torch_leaves_garbage() -> None:
    x_RI, grad_RO, ends_E = torch.randn(7, 8), torch.randn(7, 16), torch.tensor([3, 3, 7], dtype=torch.int32)

    def on_blackwell(*arguments: Tensor, offs: Tensor) -> Tensor:
        product_EOI = functional.grouped_mm(*arguments, offs=offs)
        product_EOI[1] = torch.nan
        return product_EOI

    expected = weight_gradient(grad_RO, x_RI, ends_E, guard=False)
    assert weight_gradient(grad_RO, x_RI, ends_E, guard=False, multiply=on_blackwell)[1].isnan().all()
    assert torch.equal(weight_gradient(grad_RO, x_RI, ends_E, guard=True, multiply=on_blackwell), expected)
