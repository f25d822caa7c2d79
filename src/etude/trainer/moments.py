"""Storage of an optimiser's moments: in float32, in 8 bits, or in host memory; and the AdamW that uses it.

    fp32       float32 on the device of the parameter, as torch keeps them
    8bit       8-bit codes on the device, and a float32 scale for each block of 256 numbers
    offload    float32 in the host's memory, pinned where the device is a GPU

The last two are read, used and written back one parameter at a time, so that an update needs extra memory for one
parameter only. ``offload`` computes on the device, with the kernel of ``fp32`` on the same numbers: its results are
bit-identical, and only moments cross the bus.

``8bit`` is block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
2110.02861, section 2 and appendix F). Two things differ. A block lies within a row, so that sharding never splits it
and any number of ranks reads a checkpoint back to the same bits. And the square root of a second moment is encoded:
8-bit codes span seven decades, which correspond to fourteen of the moment itself, so that the divisor of an update does
not become 0 where its gradient is a thousandth of its neighbours'. torchao (0.18) is not used: it compiles a kernel for
each parameter shape, and its states are tensors of a custom class, which safetensors files cannot store.

Shape legend: C columns, b blocks, B numbers of a block, … the preceding axes, which may be sharded.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping
from functools import cache
from types import MappingProxyType
from typing import Protocol, TypeAlias, cast, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw

from etude.config.training import OptimiserState
from etude.trainer.eager import EagerAdamW
from etude.trainer.sharded import is_sharded, local, sharded_as

State: TypeAlias = MutableMapping[str, Tensor]
"""Tensors that an optimiser stores for one parameter."""
FIRST, SECOND, MOMENTUM = "exp_avg", "exp_avg_sq", "momentum"
"""Names of moments, as in torch: AdamW's two and Muon's."""
SCALE = "_scale"
"""Suffix of the name of an encoded moment's scales."""
BLOCK = 256
"""Numbers that share a scale. The paper uses 2,048; with 256, scales add 1.6 % to the bytes of the codes."""
DECADES = 7
"""Powers of ten that the codes span."""


class Moments(Protocol):
    """Storage of moments. Arguments and results are this rank's tensors, float32, on the parameter's device."""

    def read(self, state: State, key: str, parameter: Tensor) -> Tensor:
        """The moment, or zeros if there is none yet. After a change in place, it must be written."""
        ...

    def write(self, state: State, key: str, parameter: Tensor, value: Tensor) -> None:
        """Store ``value``, which :meth:`read` returned and which may have been changed."""
        ...

    def like(self, key: str, parameter: Tensor) -> Tensor | None:
        """A tensor with the type, shape, sharding and device of the state ``key``; ``None`` if there is no
        such state.
        """
        ...

    def settle(self) -> None:
        """Wait until the host can read everything that was written."""
        ...


@final
class InFloat32:
    """Moments beside their parameters."""

    def read(self, state: State, key: str, parameter: Tensor) -> Tensor:
        """See the protocol."""
        if key not in state:
            state[key] = torch.zeros_like(parameter.detach())
        return local(state[key])

    def write(self, state: State, key: str, parameter: Tensor, value: Tensor) -> None:
        """Do nothing: :meth:`read` returns the stored tensor itself."""

    def like(self, key: str, parameter: Tensor) -> Tensor | None:
        """See the protocol."""
        return None if key.endswith(SCALE) else parameter.detach()

    def settle(self) -> None:
        """Return at once: nothing is in progress."""


@final
class OnHost:
    """Moments in the host's memory."""

    def read(self, state: State, key: str, parameter: Tensor) -> Tensor:
        """See the protocol; on a CPU the stored tensor itself."""
        if key not in state:
            state[key] = self._zeros(parameter)
        return local(state[key]).to(parameter.device, non_blocking=True)

    def write(self, state: State, key: str, parameter: Tensor, value: Tensor) -> None:
        """Copy back, after the kernels launched so far."""
        host = local(state[key])
        if host is not value:
            host.copy_(value, non_blocking=True)

    def like(self, key: str, parameter: Tensor) -> Tensor | None:
        """See the protocol."""
        return None if key.endswith(SCALE) else self._zeros(parameter)

    def settle(self) -> None:
        """See the protocol."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _zeros(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter.detach(), device="cpu", pin_memory=parameter.is_cuda)


@final
class InEightBits:
    """Moments as codes and scales; those of gains and biases, which are small, in float32."""

    def read(self, state: State, key: str, parameter: Tensor) -> Tensor:
        """See the protocol."""
        if not _is_encoded(parameter):
            return InFloat32().read(state, key, parameter)
        if key not in state:
            return torch.zeros_like(local(parameter.detach()), dtype=torch.float32)
        value = decode(local(state[key]), local(state[key + SCALE]), code=_code(key, state[key].device))
        return value.square_() if key == SECOND else value

    def write(self, state: State, key: str, parameter: Tensor, value: Tensor) -> None:
        """See the protocol."""
        if not _is_encoded(parameter):
            return
        codes, scales = encode(value.sqrt() if key == SECOND else value, code=_code(key, value.device))
        for name, part in ((key, codes), (key + SCALE, scales)):
            state[name] = _sharded(part, parameter)

    def like(self, key: str, parameter: Tensor) -> Tensor | None:
        """See the protocol."""
        if not _is_encoded(parameter):
            return InFloat32().like(key, parameter)
        own = local(parameter.detach())
        if key.endswith(SCALE):
            return _sharded(own.new_empty(*own.shape[:-1], -(-own.shape[-1] // BLOCK)), parameter)
        return _sharded(torch.empty_like(own, dtype=torch.uint8), parameter)

    def settle(self) -> None:
        """Return at once: nothing is in progress."""


MOMENTS: Mapping[OptimiserState, Callable[[], Moments]] = MappingProxyType(
    {"fp32": InFloat32, "8bit": InEightBits, "offload": OnHost}
)
"""By ``optimiser.state``."""


@final
class KeptAdamW(EagerAdamW):
    """torch's fused AdamW, one parameter at a time, with another storage of moments."""

    moments: Moments

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch's returns the closure's loss
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.moments.settle()

    def _update(self, parameter: Tensor, group: Mapping[str, object]) -> None:
        state = cast("State", self.state[parameter])
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        assert parameter.grad is not None
        first, second = (self.moments.read(state, key, parameter) for key in (FIRST, SECOND))
        beta1, beta2 = cast("tuple[float, float]", group["betas"])
        adamw(
            [local(parameter)],
            [local(parameter.grad)],
            [first],
            [second],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=cast("float", group["lr"]),
            weight_decay=cast("float", group["weight_decay"]),
            eps=cast("float", group["eps"]),
            maximize=False,
        )
        self.moments.write(state, FIRST, parameter, first)
        self.moments.write(state, SECOND, parameter, second)


def encode(x: Tensor, *, code: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 […,C] and float32 […,b]: the nearest entries of ``code`` (ascending, 256 of −1 … 1), and their scales: the
    largest magnitude of each block of :data:`BLOCK` columns. A block with NaN has a scale of NaN.
    """
    columns = x.shape[-1]
    blocks_bB = functional.pad(x, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales_b = blocks_bB.abs().amax(-1)
    tiny = torch.finfo(torch.float32).tiny
    shares_bB = blocks_bB / scales_b.clamp(min=tiny).unsqueeze(-1)
    codes = torch.bucketize(shares_bB, (code[1:] + code[:-1]) / 2, out_int32=True).to(torch.uint8)
    return codes.flatten(-2)[..., :columns].contiguous(), scales_b


def decode(codes: Tensor, scales_b: Tensor, *, code: Tensor) -> Tensor:
    """float32 […,C] from the results of :func:`encode`."""
    scales = scales_b.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return code[codes.int()] * scales


@cache
def dynamic_code(*, signed: bool) -> Tensor:
    """[256] float32, ascending: the paper's dynamic tree. Each decade below 1 has twice the values of the next smaller
    one, evenly spread; beside them there are 0 and 1, and with ``signed`` half of the values are below 0.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * math.pow(10.0, decade - DECADES + 1)).tolist()
        values += [*middles, *(-middle for middle in middles)] if signed else middles
    return torch.tensor(sorted(values), dtype=torch.float32)


def _code(key: str, device: torch.device) -> Tensor:
    return dynamic_code(signed=key != SECOND).to(device)


def _is_encoded(parameter: Tensor) -> bool:
    return parameter.ndim > 1


def _sharded(part: Tensor, parameter: Tensor) -> Tensor:
    """A tensor sharded as ``parameter`` is and as wide as ``part``, which is this rank's shard of it."""
    if not is_sharded(parameter):
        return part
    shape = torch.Size((*parameter.shape[:-1], part.shape[-1]))
    stride = tuple(shape[axis + 1 :].numel() for axis in range(len(shape)))
    return sharded_as(part, parameter, shape, stride)
