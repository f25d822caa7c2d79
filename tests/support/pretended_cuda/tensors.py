"""Tensors that are ``cuda:0`` to the code, and hold real values in a tensor of the CPU.

To torch's C++ they lie on a device of its third kind (``privateuse1``, here named ``pretended``), which has the guards
that autograd asks for; Python is told ``cuda:0``.
"""

from typing import Any, NoReturn, Protocol, Self, TypeGuard, final

import torch
from torch import Tensor
from torch.utils import backend_registration

CUDA = torch.device("cuda", 0)


class _Backend(backend_registration._DummyBackendModule):
    """Methods that torch requires of every kind of device, even if it only computes on the CPU."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """No type: the product does its own rounding, without autocast."""
        return []


# Once for the process: torch takes no second registration and none back.
backend_registration._setup_privateuseone_for_python_backend("pretended", _Backend())
BELOW = torch.device("pretended", 0)
"""The device as torch's C++ sees it."""


class Computes(Protocol):
    """A device, to its tensors."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one operation."""
        ...

    def wait(self, why: str) -> None:
        """Let the host wait for the device."""
        ...


@final
class PretendedTensor(Tensor):
    """A tensor on the pretended device."""

    below: Tensor
    """Its values, on the CPU."""
    on: Computes

    @staticmethod
    def __new__(cls, below: Tensor, on: Computes) -> Self:
        with torch.inference_mode(False):
            made: Self = torch.Tensor._make_wrapper_subclass(
                cls, below.size(), strides=below.stride(), storage_offset=below.storage_offset(), dtype=below.dtype,
                layout=below.layout, device=BELOW, requires_grad=False,
            )  # fmt: skip
        made.below, made.on = below, on
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation is of something else
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        on = next(tensor.on for tensor in torch.utils._pytree.tree_leaves((args, kwargs)) if is_pretended(tensor))
        return on.compute(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        set_data: Any = torch.Tensor.data  # a descriptor of C++
        set_data.__set__(self, new)
        self.below = inner(new)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PretendedTensor":
        copied = PretendedTensor(self.below.detach().clone(), self.on)
        copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True  # torch's own mark of a parameter
        memo[id(self)] = copied
        return copied

    def tolist(self) -> Any:
        self.on.wait("tolist")
        return self.below.tolist()

    def data_ptr(self) -> int:
        return self.below.data_ptr()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.below!r})"


def is_pretended(thing: object) -> TypeGuard[PretendedTensor]:
    """Report whether something is a tensor on the pretended device."""
    return isinstance(thing, PretendedTensor)


def inner(thing: Any) -> Any:
    """The tensor below a pretended one; anything else as it is."""
    return thing.below if is_pretended(thing) else thing


def names_cuda(device: object) -> bool:
    """Report whether a device, or its name, is the pretended one."""
    if isinstance(device, str):
        return device.partition(":")[0] in (CUDA.type, BELOW.type)
    return isinstance(device, torch.device) and device.type in (CUDA.type, BELOW.type)
