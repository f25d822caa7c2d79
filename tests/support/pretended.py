"""A CUDA device that does not exist: code runs as it does on one, in this process, without a GPU.

    with pretended() as device:
        model.to("cuda")                 # tensors say cuda:0 and hold real values
        …
        device.host_waits                # what made the host wait, by source line
        device.launches                  # kernels, copies and graphs started
        device.memory.peak_bytes

Operands on two devices, host waits inside a capture, copies of pageable memory there, operands that kernels do not take
and accesses that no event orders are errors, as they are (or are silent, and wrong) on a real device. Triton's kernels
run in its interpreter. Work must stay in one thread: torch's modes belong to threads.

    timeline    who may touch memory when: streams, events, waits
    memory      what is held, and its peak
    limits      what single operations do not take
    tensors     what code sees
    device      one operation after another
    graphs      captured and replayed
    cuda        what ``torch.cuda`` says
    kernels     Triton's, interpreted
    attention   what torch has no CPU kernel for
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pretended_cuda.cuda import installed
from pretended_cuda.device import PretendedDevice
from pretended_cuda.kernels import launched_on
from pretended_cuda.limits import RefusedByDevice
from pretended_cuda.timeline import UnorderedAccess

__all__ = ["PretendedDevice", "RefusedByDevice", "UnorderedAccess", "pretended"]


@contextmanager
def pretended() -> Iterator[PretendedDevice]:
    """Inside there is a CUDA device; what it counted is on the object."""
    assert not torch.cuda.is_available(), "there is a real device"
    device = PretendedDevice()
    with launched_on(device), installed(device):
        yield device
