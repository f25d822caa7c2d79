"""A count of what operations make, for tests of bounded memory."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor had that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            self.numbers = max(self.numbers, one.numel() if isinstance(one, Tensor) else 0)
        return made
