"""The pretended device's memory, and the host's pinned memory: how much is held, and who touched it last."""

import weakref
from typing import final

from torch import Tensor, UntypedStorage

from pretended_cuda.timeline import Touched


@final
class Memory:
    """Allocations in use. An allocation is a tensor's storage: views share one."""

    def __init__(self) -> None:
        self._touched: dict[int, Touched] = {}
        self.held_bytes = 0
        self.peak_bytes = 0

    def of(self, tensor: Tensor) -> Touched:
        """The record of a tensor's allocation, made where it has none."""
        storage = tensor.untyped_storage()
        return self._touched.get(id(storage)) or self._enter(storage)

    def find(self, tensor: Tensor) -> Touched | None:
        """The record of a tensor's allocation, if it lies in this memory."""
        return self._touched.get(id(tensor.untyped_storage()))

    def _enter(self, storage: UntypedStorage) -> Touched:
        touched = self._touched[id(storage)] = Touched()
        self.held_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        weakref.finalize(storage, self._leave, id(storage), storage.nbytes()).atexit = False
        return touched

    def _leave(self, key: int, size_bytes: int) -> None:
        del self._touched[key]
        self.held_bytes -= size_bytes
