"""The same code on CUDA: the engine's numbers are the trainer's, a step is taken, a checkpoint comes back."""

import asyncio
import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.config.inference import EngineConfig, NumericsConfig
from etude.config.recipe import RunConfig
from etude.config.training import LossConfig
from etude.engines.native.cache import PagedCache
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.graphs import StepGraphs
from etude.engines.native.sampling import Sampler, tabulated
from etude.engines.native.scheduler import EngineRequest, Scheduler
from etude.models.arithmetic import AttentionRule, PagedRows, packed_rows
from etude.models.checkpoint import load_state, state_of
from etude.models.decoder import Decoder
from etude.models.fast import FastArithmetic
from etude.models.spec import TINY
from etude.protocols import Completion, SamplingParams
from etude.run.trainer_group import optimisation_of
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.losses import Totals
from etude.trainer.policy import PolicyTrainer
from etude.types import UNSAMPLED, Trajectory

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numpy, in Triton's interpreter

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def model(device: torch.device) -> Decoder:
    fresh = Decoder(TINY)
    fresh.initialise(0, std=0.15)
    return fresh.to(device)


def make_trainer(model: Decoder) -> PolicyTrainer:
    return PolicyTrainer(optimisation_of(model, RunConfig()), LossConfig(), NumericsConfig(replay="off"))


def sample(model: Decoder, temperature: float = 1.0) -> Completion:
    async def play() -> Completion:
        engine = NativeEngine(Weights(model, 0, ""), EngineConfig(max_running=4, max_length=64), seed=0)
        stepping = asyncio.create_task(engine.run())
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=20, temperature=temperature), session="s")
        stepping.cancel()
        return completion

    return asyncio.run(play())


def make_trajectory(completion: Completion) -> Trajectory:
    ids = np.array([*PROMPT, *completion.token_ids], np.int32)
    mask = np.arange(len(ids)) >= len(PROMPT)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = completion.logprobs
    return Trajectory(
        rollout_id="r",
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        temperatures=np.ones(len(ids), np.float32),
        versions=np.where(mask, 0, UNSAMPLED).astype(np.int32),
        turn_starts=(len(PROMPT),),
        advantages=mask.astype(np.float32),
    )


def test_the_engine_says_what_the_model_gives(model: Decoder) -> None:
    completion = sample(model)
    ids = torch.tensor([*PROMPT, *completion.token_ids.tolist()], device="cuda")
    with torch.no_grad():
        logprobs = model.logits(model.forward_packed(ids)[len(PROMPT) - 1 : -1]).log_softmax(-1)
    expected = logprobs.gather(1, ids[len(PROMPT) :].unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(completion.logprobs, expected.cpu().numpy(), atol=1e-4)


def test_a_restored_trainer_goes_on_on_the_device(model: Decoder, tmp_path: Path) -> None:
    chunks = [(make_trajectory(sample(model)),)]
    trainer, totals = make_trainer(model), Totals(tokens=20, trajectories=1)
    trainer.step(1, chunks, totals)
    Checkpoints(tmp_path).save(1, trainer.optimisation.tensors())
    copied = Decoder(TINY).cuda()
    load_state(copied, state_of(model))
    other = make_trainer(copied)
    other.optimisation.restore(Checkpoints(tmp_path).load(1))
    trainer.step(2, chunks, totals)
    other.step(2, chunks, totals)
    for one, two in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_stays_inside_its_sequence(device: torch.device, dtype: torch.dtype) -> None:
    """Flash attention in bfloat16, and attention call by call in float32: values and gradients equal the CPU's.

    Both sides get the same numbers, which bfloat16 has: rounding inputs alone moves gradients by more than the bound.
    """
    lengths = [1, 17, 130, 130, 64]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, 32, generator=generator).to(dtype) for heads in (8, 2, 2)]
    outcomes = []
    for place, kind in ((torch.device("cpu"), torch.float32), (device, dtype)):
        q, k, v = (x.to(place, kind).requires_grad_() for x in inputs)
        out = FastArithmetic().attend_packed(q, k, v, packed_rows(lengths, place), AttentionRule(scale=0.2))
        outcomes.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    close = 1e-4 if dtype is torch.float32 else 5e-2
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other.float().cpu(), atol=close, rtol=close)


@pytest.mark.real_gpu(
    "attention over 2,000 positions takes minutes in the interpreter; test_gpu_kernels compares fewer"
)
@pytest.mark.parametrize("heads", [(32, 8, 128, 128), (16, 1, 576, 512)], ids=["grouped", "latent"])
def test_the_paged_kernel_is_as_exact_as_torch(device: torch.device, heads: tuple[int, int, int, int]) -> None:
    """In bfloat16, compared with float64: single tokens, and prompts with a part in the cache."""
    query_heads, key_heads, width, value_width = heads
    ends, counts = [700, 33, 1, 2000, 400], [1, 1, 1, 1, 300]
    generator, pages = torch.Generator(device).manual_seed(0), 125
    draw = partial(torch.randn, generator=generator, device=device)
    cache = (draw(5 * pages, key_heads, width, 16), draw(5 * pages, key_heads, 16, value_width))
    q_NQD = draw(sum(counts), query_heads, width)
    rows = PagedRows(
        tables_BP=torch.randperm(5 * pages, generator=generator, device=device).view(5, pages).int(),
        sequences_N=torch.arange(5, dtype=torch.int32).repeat_interleave(torch.tensor(counts)).to(device),
        positions_N=torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]).to(
            device
        ),
        counts=tuple(counts),
    )
    keys, values, queries = (x.to(torch.bfloat16) for x in (*cache, q_NQD))
    result = FastArithmetic().attend_pages(queries, (keys, values), rows, AttentionRule(scale=width**-0.5))
    host = PagedRows(
        tables_BP=rows.tables_BP.cpu(),
        sequences_N=rows.sequences_N.cpu(),
        positions_N=rows.positions_N.cpu(),
        counts=rows.counts,
    )
    exact = [x.double().cpu() for x in (keys, values, queries)]
    expected = FastArithmetic().attend_pages(exact[2], (exact[0], exact[1]), host, AttentionRule(scale=width**-0.5))
    assert (result.double().cpu() - expected).norm() < 3e-3 * expected.norm()


def test_decode_graphs_compute_what_plain_steps_do(model: Decoder) -> None:
    """Float32 takes plain steps, bfloat16 graphs; both sample greedily from rounded weights, far from ties."""
    rounded = model.to(torch.bfloat16)
    graphs = sample(rounded, temperature=0.0)
    plain = sample(copy.deepcopy(rounded).float(), temperature=0.0)
    assert (graphs.token_ids == plain.token_ids).mean() > 0.8


@pytest.mark.timeout(900)  # minutes where Triton interprets
@torch.inference_mode()
def test_a_graph_draws_what_a_plain_step_draws(model: Decoder) -> None:
    """The same tokens, sampling masks, routes and log-probabilities, bit for bit where all decode; also beside prompts
    that are read, of which the long one takes two steps: of one graph, captured at the first.
    """
    rounded = model.to(torch.bfloat16)
    params = [
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=8, temperature=0.7, top_k=7, top_p=0.9),
        SamplingParams(max_tokens=8, temperature=0.0),
        SamplingParams(max_tokens=8, top_p=0.5),
    ]
    prompts = [[*PROMPT, 0], [*PROMPT, 1], [*PROMPT, 2], [*PROMPT, *range(25)]]
    requests = [
        EngineRequest(session=str(n), params=one, token_ids=prompt, prompt_length=len(prompt))
        for n, (one, prompt) in enumerate(zip(params, prompts, strict=True))
    ]
    scheduler = Scheduler(pages=16, max_running=4, max_waiting=4, max_length=80, step_tokens=20)
    for request in requests[:3]:
        scheduler.add(request)
    cache, sampler = PagedCache(rounded, 16, record_routes=True), Sampler(rounded.arithmetic)
    graphs = StepGraphs(rounded, cache, sampler)
    met = set()
    for step in range(6):
        if step == 1:
            scheduler.add(requests[3])
        plan = scheduler.plan(0)
        works = [work for work in plan if work.samples]
        numbers = [int(work.request.session) for work in works]
        parameters = [params[n] for n in numbers], numbers, [work.request.sampled for work in works]
        output = cache.forward(rounded, plan)
        hidden, routes = output.hidden_NH[output.sampling_R], output.routes_NLk
        assert routes is not None
        plain = sampler.sample(rounded.logits(hidden), *parameters, routes[output.sampling_R])
        assert graphs.take(plan)
        drawn = graphs.run(rounded, plan, tabulated(*parameters))
        is_mixed = any(work.count > 1 for work in plan)
        met.add((is_mixed, len(works) < len(plan)))
        assert drawn.token_ids.tolist() == plain.token_ids.tolist()
        np.testing.assert_allclose(drawn.logprobs, plain.logprobs, rtol=0, atol=0.02 if is_mixed else 0)
        np.testing.assert_array_equal(drawn.routes, plain.routes)
        sets = [[one.kept_row(row).tolist() for row in range(len(works))] for one in (drawn, plain)]
        assert sets[0] == sets[1]
        for work in plan:
            scheduler.advance(work)
        for work, token in zip(works, plain.token_ids.tolist(), strict=True):
            scheduler.append(work.request, token, 0.0, 0)
    assert met == {(True, False), (True, True), (False, False)}
