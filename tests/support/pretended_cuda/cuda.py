"""What ``torch.cuda`` says while there is a pretended device: streams, events, graphs, memory, and a capability.

And the functions of torch that choose a device before any operation is made of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pretended_cuda.device import PretendedDevice
from pretended_cuda.graphs import Captured
from pretended_cuda.tensors import BELOW, CUDA, is_pretended, names_cuda
from pretended_cuda.timeline import HOST, Seen

CAPABILITY = (9, 0)
"""A Hopper card's."""
MEMORY_BYTES = 80 << 30


@final
class Stream:
    """Implements ``torch.cuda.Stream``."""

    device = CUDA

    def __init__(self, on: PretendedDevice, number: int) -> None:
        self.on, self.number = on, number

    def wait_stream(self, stream: "Stream") -> None:
        """Later work here waits for all work that the other stream has so far."""
        self.on.timeline.wait(self.number, self.on.timeline.mark(stream.number))

    def wait_event(self, event: "Event") -> None:
        """Later work here waits for the event."""
        self.on.timeline.wait(self.number, event.mark)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """An event behind what this stream was given so far."""
        event = event or Event(self.on)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.on.wait("Stream.synchronize")
        self.on.timeline.wait(HOST, self.on.timeline.mark(self.number))

    def query(self) -> bool:
        """Nothing to wait for: all work is computed immediately."""
        return True


@final
class Event:
    """Implements ``torch.cuda.Event``."""

    def __init__(self, on: PretendedDevice, **_: bool) -> None:
        self._on = on
        self.mark: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        """Wait for all work that a stream has so far."""
        self.mark = self._on.timeline.mark(self._on.stream if stream is None else stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream continue after this event."""
        self._on.timeline.wait(self._on.stream if stream is None else stream.number, self.mark)

    def synchronize(self) -> None:
        """Let the host wait for this."""
        self._on.wait("Event.synchronize")
        self._on.timeline.wait(HOST, self.mark)

    def query(self) -> bool:
        """Nothing to wait for: all work is computed immediately."""
        return True


@final
class Graph:
    """Implements ``torch.cuda.CUDAGraph``."""

    def __init__(self, on: PretendedDevice) -> None:
        self._on = on
        self.captured = Captured()

    def pool(self) -> tuple[int, int]:
        """The name of its memory."""
        return (0, 1)

    def replay(self) -> None:
        """Repeat the captured operations."""
        self._on.replay(self.captured)


@final
class Cuda:
    """The functions of ``torch.cuda``, by their names there."""

    def __init__(self, on: PretendedDevice) -> None:
        self._on = on

    def functions(self) -> dict[str, Any]:
        """Replaced attributes and their replacements."""
        on = self._on
        return {
            **{name: lambda *_, **__: None for name in ("_lazy_init", "empty_cache", "set_device", "init")},
            **{name: lambda *_: True for name in ("is_available", "is_initialized", "is_bf16_supported")},
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: CAPABILITY,
            "get_device_name": lambda *_: "pretended",
            "mem_get_info": lambda *_: (MEMORY_BYTES - on.memory.held_bytes, MEMORY_BYTES),
            "memory_allocated": lambda *_: on.memory.held_bytes,
            "max_memory_allocated": lambda *_: on.memory.peak_bytes,
            "reset_peak_memory_stats": self._reset_peak,
            "synchronize": lambda *_: on.wait("synchronize"),
            "current_stream": lambda *_: Stream(on, on.stream),
            "Stream": self._new_stream,
            "stream": self._in_stream,
            "Event": lambda **options: Event(on, **options),
            "CUDAGraph": lambda *_: Graph(on),
            "graph": self._capture,
        }

    def _reset_peak(self, *_: object) -> None:
        self._on.memory.peak_bytes = self._on.memory.held_bytes

    def _new_stream(self, *_: object, **__: object) -> Stream:
        self._on.streams += 1
        return Stream(self._on, self._on.streams - 1)

    @contextmanager
    def _in_stream(self, stream: Stream) -> Iterator[None]:
        before, self._on.stream = self._on.stream, stream.number
        try:
            yield
        finally:
            self._on.stream = before

    @contextmanager
    def _capture(self, graph: Graph, **_: object) -> Iterator[None]:
        """A real capture goes to a stream of its own, behind the current one, which it does not touch otherwise."""
        assert self._on.captured is None, "captures do not nest"
        self._on.wait("capture")
        self._on.captured = graph.captured
        try:
            yield
        finally:
            self._on.captured = None
        graph.captured.spoil()


@final
class Placement(TorchFunctionMode):
    """Replaces ``cuda`` by the device that torch's C++ knows."""

    def __init__(self, on: PretendedDevice) -> None:
        super().__init__()
        self._on = on

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and names_cuda(kwargs.get("device")):
            del kwargs["device"]  # made on the host, as torch does it, and copied
            return func(*args, **kwargs).to(BELOW)
        if names_cuda(kwargs.get("device")):
            kwargs["device"] = BELOW
        if func is Tensor.to:
            args = tuple(BELOW if names_cuda(argument) else argument for argument in args)
        if func is Tensor.cuda:
            return args[0].to(BELOW, **kwargs)
        if func is Tensor.numpy and not is_pretended(args[0]):
            self._on.touch_on_host(args[0], "numpy")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and is_pretended(args[0]):
            args = (args[0], _moved(args[1]), *map(_as_tensor, args[2:]))
        return func(*args, **kwargs)


def _moved(index: Any) -> Any:
    """An index with its lists as tensors, which torch copies from pageable memory, and waits for."""
    parts = index if isinstance(index, tuple) else (index,)
    moved = tuple(torch.tensor(part).to(BELOW) if isinstance(part, list) else part for part in parts)
    return moved if isinstance(index, tuple) else moved[0]


def _as_tensor(value: Any) -> Any:
    """A number as C++ takes it."""
    return torch.tensor(value) if isinstance(value, bool | int | float) else value


@contextmanager
def installed(on: PretendedDevice) -> Iterator[None]:
    """Inside, torch has this CUDA device, in this thread."""
    functions = Cuda(on).functions()
    before = {name: getattr(torch.cuda, name) for name in functions}
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    try:
        # A backward pass in a thread of its own would not be seen.
        with torch.autograd.set_multithreading_enabled(False), on.intercepting, Placement(on):
            yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)
