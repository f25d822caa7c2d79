"""Budgets of a decode step, held on the pretended device."""

from importlib.util import find_spec

import pytest
import torch

from etude.protocols import SamplingParams

if find_spec("triton") is None or torch.cuda.is_available():
    pytest.skip("counted on the pretended device, which needs Triton and no real one", allow_module_level=True)
from decode_counts import count_decode, count_mixed, kv_bytes_vs_least

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numpy, in the interpreter

PLAIN, CUT = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, top_p=0.9, top_k=7)


@pytest.mark.parametrize("params", [[PLAIN], [PLAIN, CUT]], ids=["plain", "truncated"])
def test_a_decode_step_is_a_copy_a_graph_and_a_copy_back_which_is_waited_for(params: list[SamplingParams]) -> None:
    counts = count_decode(params)
    assert counts.host_waits_per_step <= 1
    assert counts.launches_per_step <= 3


def test_so_is_a_step_that_reads_a_prompt_beside() -> None:
    counts = count_mixed()
    assert counts.host_waits_per_step <= 1
    assert counts.launches_per_step <= 3


def test_attention_reads_what_the_sequences_have() -> None:
    assert 1 <= kv_bytes_vs_least() <= 1.15
