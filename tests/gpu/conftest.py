"""A CUDA device for each test: a real one if there is one, otherwise the pretended one."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device to test. A test marked ``real_gpu`` names what the pretended one cannot show."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    real = request.node.get_closest_marker("real_gpu")
    if real is not None:
        pytest.skip(f"no CUDA device, and the pretended one will not do: {real.args[0]}")
    if find_spec("triton") is None:
        pytest.skip("no CUDA device, and Triton, in whose interpreter the pretended one runs kernels, is for Linux")
    from pretended import pretended

    with pretended():
        yield torch.device("cuda")
