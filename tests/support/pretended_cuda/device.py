"""The pretended device: does each operation on the CPU, refuses what CUDA would, and counts.

    torch's operation ──▶ compute ──▶ refuse? wait? ──▶ the same operation on the tensors below ──▶ pretended results
                                                          └──▶ what a graph captures, while one does

Owns what one operation means: where its operands lie, whether the host has to wait for it, what it reads and writes on
which stream. Not the ``torch.cuda`` that code calls, which is :mod:`pretended_cuda.cuda`'s.

What it does not see: how CUDA kernels round, speed, which kernel a library chooses, memory that libraries take for
themselves, several devices.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from pretended_cuda import attention
from pretended_cuda.graphs import Captured, Launch
from pretended_cuda.limits import RefusedByDevice, check_flash_attention, check_grouped_product
from pretended_cuda.memory import Memory
from pretended_cuda.tensors import PretendedTensor, inner, is_pretended, names_cuda
from pretended_cuda.timeline import HOST, Timeline

aten = torch.ops.aten

PACKAGE = "/src/etude/"
STAGED_BYTES = 1 << 16
"""Copies from pageable memory up to this size go through a staging buffer of the driver; larger ones wait."""

WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.bincount.default, aten.equal.default,
    aten.masked_select.default, aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.is_nonzero.default,
}  # fmt: skip
"""Operations whose results, or whose shapes, the host has to know."""
INDEXING = {
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default,
}  # fmt: skip
PINNING = {aten.pin_memory.default, aten._pin_memory.default}
MAKING_ROOM = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
               aten.new_empty_strided.default}  # fmt: skip
"""Operations that start no kernel."""


@final
class PretendedDevice:
    """One CUDA device that does not exist."""

    def __init__(self) -> None:
        self.memory, self.pinned = Memory(), Memory()
        self.timeline = Timeline()
        self.stream = 0
        """The number of the current stream."""
        self.streams = 1
        self.captured: Captured | None = None
        """The graph that receives operations during a capture."""
        self.launches = Counter[str]()
        """Kernels, copies and graphs started, by name; what lies inside a graph is one with it."""
        self.host_waits = Counter[str]()
        """Times that the host waited for the device, by reason and source line."""
        self._mode = Interception(self)

    @property
    def intercepting(self) -> TorchDispatchMode:
        """A context in which operations that have no pretended operand yet come here, too."""
        return self._mode

    def wait(self, why: str) -> None:
        """Let the host wait for the current stream. Raises :class:`RefusedByDevice` inside a capture."""
        if self.captured is not None:
            raise RefusedByDevice(f"{why}: the host cannot wait while a graph is captured ({_caller()})")
        self.host_waits[f"{why} ({_caller()})"] += 1
        self.timeline.wait(HOST, self.timeline.mark(self.stream))

    def launch(self, what: str, call: Callable[[], Any], *, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Any:
        """Start a kernel or a copy on the current stream, given by what it does to tensors of the CPU."""
        written = [self.memory.of(tensor) for tensor in writes]
        read = [self.memory.of(tensor) for tensor in reads]
        result = call()
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        fresh = [tensor for tensor in made if all(self.memory.of(tensor) is not own for own in written)]
        written += map(self.memory.of, fresh)
        self.timeline.enter(self.stream, what, reads=read, writes=written)
        if self.captured is None:
            self.launches[what] += 1
        else:
            self.captured.launches.append(
                Launch(what=what, call=call, results=made, fresh=fresh, reads=read, writes=written)
            )
        return result

    def replay(self, captured: Captured) -> None:
        """Start a captured graph on the current stream."""
        self.launches["graph"] += 1
        with torch.no_grad():
            for launch in captured.launches:
                launch.again()
                self.timeline.enter(self.stream, launch.what, reads=launch.reads, writes=launch.writes)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do one of torch's operations; some of its operands, or its result, may be on the device."""
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self._mode:  # no autograd has taken it apart
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if func is aten._to_copy.default:
            return self._copied(args[0], kwargs)
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], non_blocking=bool((args[2:] or (kwargs.get("non_blocking"),))[0]))
        if not any(map(is_pretended, tensors)) and not names_cuda(kwargs.get("device")):
            return self._compute_on_host(func, args, kwargs, tensors)
        self._check(func, args, kwargs, tensors)
        if func.namespace == "torch_attn":
            return self._attend(func, args, kwargs)
        return self._compute_below(func, args, kwargs)

    def _compute_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        if func is aten.is_pinned.default:
            return self.pinned.find(args[0]) is not None
        for tensor in tensors:
            self.touch_on_host(tensor, str(func))
        if func in PINNING or kwargs.get("pin_memory"):
            result = args[0].clone() if func in PINNING else func(*args, **{**kwargs, "pin_memory": False})
            self.pinned.of(result)
            return result
        return func(*args, **kwargs)

    def touch_on_host(self, tensor: Tensor, what: str) -> None:
        """Note that the host reads or writes a tensor, where that is pinned memory and a copy may be in progress."""
        touched = None if tensor.is_meta else self.pinned.find(tensor)
        if touched is not None:
            self.timeline.enter(HOST, what, writes=[touched])

    def _compute_below(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        of_cpu = {
            name: torch.device("cpu") if name == "device" and names_cuda(value) else value
            for name, value in kwargs.items()
        }
        lower_args, lower_kwargs = tree_map(inner, args), tree_map(inner, of_cpu)
        if isinstance(lower_kwargs.get("pin_memory"), bool):
            lower_kwargs["pin_memory"] = False

        def call() -> Any:
            return func(*lower_args, **lower_kwargs)

        if func in MAKING_ROOM or getattr(func, "is_view", False):
            result = call()
            for tensor in tree_leaves(result):
                self.memory.of(tensor)
        else:
            written = [inner(t) for t in _written(func, args, kwargs)]
            read = [
                inner(t) for t in tree_leaves((args, kwargs)) if is_pretended(t) and all(t is not w for w in written)
            ]
            result = self.launch(_name(func), call, reads=read, writes=written)
        return self._wrap(result, (args, kwargs))

    def _attend(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's attention over packed sequences, or its gradients."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        heads = [named["query"], named["key"], named["value"]]
        check_flash_attention(heads, [named["cu_seq_q"], named["cu_seq_k"]], where=_caller())
        assert tuple(named.get("window_size") or (-1, 0)) == (-1, 0), "attention without a window is written out alone"
        q, k, v = (head.below for head in heads)
        scale, starts = named.get("scale") or q.shape[-1] ** -0.5, named["cu_seq_q"].below
        if "grad_out" in named:
            slope = named["grad_out"].below
            result = self.launch(
                _name(func),
                lambda: attention.gradients(slope, (q, k, v), starts, scale),
                reads=[slope, q, k, v],
                writes=[],
            )
        else:
            result = self.launch(
                _name(func), lambda: attention.attend(q, k, v, starts, scale), reads=[q, k, v, starts], writes=[]
            )
            # Sums and a random state are of the real operation, for its own gradient only.
            result = (result, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64))
        return self._wrap(result, ())

    def _wrap(self, result: Any, operands: Any) -> Any:
        """Pretended tensors of an operation's results; what it changed in place stays the tensor it was."""
        by_inner = {id(tensor.below): tensor for tensor in tree_leaves(operands) if is_pretended(tensor)}

        def wrapped(thing: Any) -> Any:
            if not isinstance(thing, Tensor):
                return thing
            return by_inner[id(thing)] if id(thing) in by_inner else PretendedTensor(thing, self)

        return tree_map(wrapped, result)

    # --- copies between host and device -------------------------------------------------------------------------------

    def _copied(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        device, non_blocking = kwargs.get("device"), bool(kwargs.get("non_blocking"))
        to_device = is_pretended(source) if device is None else names_cuda(device)
        rest = {name: kwargs[name] for name in kwargs if name not in ("device", "non_blocking", "pin_memory")}
        lower = inner(source)
        if not is_pretended(source) and not to_device:
            self.touch_on_host(source, "copy")
            return aten._to_copy.default(source, **kwargs)  # type: ignore[no-any-return]
        if is_pretended(source) and not to_device:
            self._start_copy(lower, None, non_blocking=False)
            return aten._to_copy.default(lower, **rest)  # type: ignore[no-any-return]
        if is_pretended(source):
            made = self.launch("copy", lambda: aten._to_copy.default(lower, **rest), reads=[lower], writes=[])
        else:
            made = aten._to_copy.default(source, **rest)
            self._start_copy(made, source, non_blocking=non_blocking)
        return PretendedTensor(made, self)

    def _copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        to, of = inner(target), inner(source)
        if is_pretended(target) == is_pretended(source):
            if is_pretended(target):
                self.launch("copy", lambda: to.copy_(of), reads=[of], writes=[to])
            else:
                self.touch_on_host(to, "copy")
                self.touch_on_host(of, "copy")
                to.copy_(of)
            return target
        if source.dim() == 0 and not is_pretended(source) and self.pinned.find(source) is None:
            self.launch("fill", lambda: to.copy_(of), reads=[], writes=[to])  # a number, which goes with the kernel
            return target
        to.copy_(of)
        if is_pretended(target):
            self._start_copy(to, source, non_blocking=non_blocking)
        else:
            self._start_copy(of, target, non_blocking=non_blocking)
        return target

    def _start_copy(self, on_device: Tensor, on_host: Tensor | None, *, non_blocking: bool) -> None:
        """Note a copy between the host and the device, in the direction that the names of ``launches`` say."""
        pinned = None if on_host is None else self.pinned.find(on_host)
        if self.captured is not None:
            raise RefusedByDevice(f"a copy between host and device while a graph is captured ({_caller()})")
        self.launches["copy between host and device"] += 1
        touched = [self.memory.of(on_device)] + ([] if pinned is None else [pinned])
        self.timeline.enter(self.stream, "copy", writes=touched)
        staged = on_host is not None and on_device.nbytes <= STAGED_BYTES
        if not non_blocking or (pinned is None and not staged):
            self.wait("copy between host and device")

    # --- what is refused, and what waits ------------------------------------------------------------------------------

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> None:
        if func in INDEXING:
            self._check_index(func, args)
        else:
            for tensor in tensors:
                if not is_pretended(tensor) and tensor.dim() and not tensor.is_meta:
                    raise RefusedByDevice(
                        f"{func}: operands on cuda:0 and {tensor.device}, {_shape(tensor)} ({_caller()})"
                    )
        if func in WAITING or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.wait(_name(func))
        if "grouped_mm" in _name(func):
            if args[0].dtype is torch.bfloat16:
                check_grouped_product(args[:2], where=_caller())
            else:
                self.wait(f"grouped product in {args[0].dtype}, whose offsets the host reads")

    def _check_index(self, func: Any, args: tuple[Any, ...]) -> None:
        value = args[2] if len(args) > 2 else None
        if not is_pretended(args[0]):
            raise RefusedByDevice(f"{func}: indices are on cuda:0, what they index is on the CPU ({_caller()})")
        if value is not None and not is_pretended(value) and value.dim():
            raise RefusedByDevice(f"{func}: the value is on {value.device} ({_caller()})")
        for index in args[1]:
            if index is None:
                continue
            if not is_pretended(index) and index.dim():
                self.wait("index from the host")
            elif index.dtype is torch.bool and not (value is not None and value.numel() == 1 and len(args[1]) == 1):
                self.wait("index by truth values")


@final
class Interception(TorchDispatchMode):
    """Sends every operation to the device."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._device.compute(func, args, kwargs or {})


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PretendedTensor]:
    """Operands that an operation changes in place, by its schema."""
    written = list[PretendedTensor]()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if is_pretended(leaf)]
    return written


def _flash_operands(func: Any, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor | None]]:
    if "backward" in _name(func):
        return list(args[1:4]), list(args[6:8])
    return list(args[:3]), list(args[3:5])


def _name(func: Any) -> str:
    return str(func.name())


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _caller() -> str:
    """The innermost line of the package, or otherwise of the caller."""
    frame = sys._getframe(1)
    while frame.f_back is not None and PACKAGE not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
