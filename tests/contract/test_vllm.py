"""Contract tests of a real vLLM behind étude's engine protocol: its samples, and its logprobs after weight updates.

One server for the module. It needs an environment of its own: ``make test`` installs ``.venv-vllm``; another one can be
named by ``ETUDE_VLLM_PYTHON``. The reference is transformers' forward pass over the same checkpoint.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from etude.engines.api_client import ApiClient
from etude.engines.native.scheduler import SwapMode
from etude.engines.server_process import ServerProcess, limits_of
from etude.engines.vllm.answers import ServerFeatures
from etude.engines.vllm.engine import VllmEngine
from etude.engines.vllm.process import VllmServer, start
from etude.errors import DamagedError, EngineUnavailable
from etude.protocols import Completion, SamplingParams, TokenChunk
from etude.types import Finish, Floats
from etude.weights.digest import state_digest
from etude.weights.interop.checkpoint import read_checkpoint, write_checkpoint
from etude.weights.replica import ChangedNumbers
from etude.weights.state import StoredTensor, snapshot

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ETUDE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
START_S = 240.0
RETRY_TIMEOUT_S = 60.0
SWAPS = 5
"""Tries to swap weights in flight: this process may stand still while vLLM samples to the end."""
"""For what comes soon, on a busy machine."""
VOCAB_SIZE, MAX_LENGTH = 320, 2048
PROMPT = [5, 6, 7, 8]
SHAPE = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.2, "tie_word_embeddings": True,
    }
)  # fmt: skip
TOLERANCE = 1e-4
"""Largest difference of two float32 logprobs whose sums were made in another order."""
LONG_TOLERANCE = 1e-3
"""The same behind 1,500 tokens: 1.4e-4 was seen, for one in 1,500. Other weights differ by nats."""

pytestmark = pytest.mark.heavy("vLLM: make .venv-vllm/stamp", missing=not PYTHON.exists())
torch.set_num_threads(1)
T = TypeVar("T")


@dataclass
class Stage:
    """The server, the client and the weights it should have."""

    runner: asyncio.Runner
    process: ServerProcess
    client: ApiClient
    engine: VllmEngine
    folder: Path
    state: dict[str, StoredTensor]
    version: int

    @property
    def digest(self) -> str:
        return state_digest(self.state)

    def play(self, scene: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(scene)

    def next_state(self, seed: int) -> dict[str, StoredTensor]:
        """A few numbers of every tensor changed, well visible in logprobs."""
        state = snapshot(self.state)
        rng = np.random.default_rng(seed)
        for stored in state.values():
            values = stored.data.view(np.float32)
            chosen = rng.random(len(values)) < 0.05
            values[chosen] += rng.normal(0, 0.3, int(chosen.sum())).astype(np.float32)
        return state

    def changes(self, after: dict[str, StoredTensor]) -> dict[str, list[ChangedNumbers]]:
        changes = {}
        for name, stored in after.items():
            indices = np.flatnonzero(stored.numbers != self.state[name].numbers).astype(np.uint64)
            changes[name] = [ChangedNumbers(indices=indices, bits=stored.numbers[indices])]
        return changes

    async def follow(self, after: dict[str, StoredTensor], mode: SwapMode = SwapMode.KEEP) -> None:
        """A sparse update."""
        await self.engine.update(self.version + 1, state_digest(after), self.changes(after), mode)
        self.state, self.version = after, self.version + 1

    def logprobs(self, prompt: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0) -> Floats:
        """[C] logprobs that transformers computes with the expected weights."""
        return reference(self.folder, self.state, [*prompt, *token_ids], temperature)[len(prompt) - 1 :]


def reference(folder: Path, state: dict[str, StoredTensor], token_ids: list[int], temperature: float) -> Floats:
    """[L − 1] the logprob of every token but the first."""
    save(folder, state)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        ids_1L = torch.tensor([token_ids])
        logprobs_LV = (model(ids_1L).logits[0, :-1] / temperature).log_softmax(-1)
        expected_N: Floats = logprobs_LV.gather(1, ids_1L[0, 1:, None])[:, 0].numpy()
    return expected_N


def save(folder: Path, state: dict[str, StoredTensor]) -> None:
    """Replace the weights in a folder."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    write_checkpoint(folder, state)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    config = Qwen3MoeConfig.from_dict({**SHAPE, "max_position_embeddings": MAX_LENGTH, "eos_token_id": None})
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(model)
    (folder / "reference").mkdir()
    (folder / "reference" / "config.json").write_bytes((model / "config.json").read_bytes())
    # A patch on a disk is synced to it, for as long as that takes; vLLM samples on meanwhile.
    with asyncio.Runner() as runner, TemporaryDirectory(dir="/dev/shm") as memory, ExitStack() as ends:
        http = runner.run(session())
        ends.callback(lambda: runner.run(http.close()))
        server, process, client = runner.run(served(model, folder, http, ends))
        engine = VllmEngine(client, limits_of(server.model, MAX_LENGTH), ServerFeatures(), Path(memory))
        state = read_checkpoint(model)
        runner.run(engine.start(3, state_digest(state)))
        yield Stage(runner, process, client, engine, folder / "reference", state, 3)


async def served(
    model: Path, folder: Path, http: ClientSession, ends: ExitStack, tries: int = 2
) -> tuple[VllmServer, ServerProcess, ApiClient]:
    """A server that answers; started again if it exits at once, because another process may have taken its port."""
    server = VllmServer(python=PYTHON, model=model, port=free_port(), max_length=MAX_LENGTH, max_running=32)
    process = start(server, folder)
    client = ApiClient("vLLM", process.base_url, http)
    ends.callback(process.stop)
    try:
        await process.ready(client, START_S)
    except EngineUnavailable:
        if tries == 1 or process.is_running:
            raise
        return await served(model, folder, http, ends, tries - 1)
    return server, process, client


async def session() -> ClientSession:
    return ClientSession()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_checkpoint_at_the_sampling_temperature(stage: Stage, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature)
    completion = stage.play(stage.engine.generate(PROMPT, params, session="s"))
    expected = stage.logprobs(PROMPT, completion.token_ids.tolist(), temperature)
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)
    assert completion.versions.tolist() == [stage.version] * 24
    assert completion.finish is Finish.LENGTH
    dtypes = [array.dtype for array in (completion.token_ids, completion.logprobs, completion.versions)]
    assert dtypes == [np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.int32)]


def test_a_seed_repeats_greedy_is_certain_and_a_stop_token_is_kept(stage: Stage) -> None:
    async def scene() -> None:
        params = [SamplingParams(max_tokens=20, seed=seed, priority=seed or 0) for seed in (1, 1, 2, None, None)]
        same, again, other, free, more = [
            (await stage.engine.generate(PROMPT, one, session="s")).token_ids.tolist() for one in params
        ]
        assert same == again != other
        assert free != more
        stop = SamplingParams(max_tokens=20, seed=1, stop_ids=(same[7],))
        stopped = await stage.engine.generate(PROMPT, stop, session="s")
        assert stopped.token_ids.tolist() == same[: same.index(same[7]) + 1]
        assert stopped.finish is Finish.STOP
        greedy = [SamplingParams(max_tokens=20, temperature=0.0, seed=seed) for seed in (1, 2)]
        first, second = [await stage.engine.generate(PROMPT, one, session="s") for one in greedy]
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert not first.logprobs.any()

    stage.play(scene())


@pytest.mark.parametrize(
    ("prompt_ids", "params"),
    [
        ([], SamplingParams(max_tokens=4)),
        ([VOCAB_SIZE], SamplingParams(max_tokens=4)),  # would end vLLM's engine process
        ([-1], SamplingParams(max_tokens=4)),
        (PROMPT, SamplingParams(max_tokens=0)),
        (PROMPT, SamplingParams(max_tokens=MAX_LENGTH)),
        (PROMPT, SamplingParams(max_tokens=4, stop_ids=(VOCAB_SIZE,))),
        (PROMPT, SamplingParams(max_tokens=4, want_routes=True)),
        (PROMPT, SamplingParams(max_tokens=4, top_p=0.9)),
        (PROMPT, SamplingParams(max_tokens=4, top_k=3)),
    ],
)
def test_what_cannot_be_served_is_a_value_error_and_hurts_no_other(
    stage: Stage, prompt_ids: list[int], params: SamplingParams
) -> None:
    with pytest.raises(ValueError, match=r"prompt|max_tokens|stop id|experts|top_p"):
        stage.play(stage.engine.generate(prompt_ids, params, session="s"))
    stage.play(stage.engine.generate(PROMPT, SamplingParams(max_tokens=1), session="s"))


def test_concurrent_calls_get_their_own_answers(stage: Stage) -> None:
    async def scene() -> None:
        params = [SamplingParams(max_tokens=12, seed=seed, priority=seed % 3) for seed in range(12)]
        alone = [await stage.engine.generate(PROMPT, one, session="s") for one in params]
        batched = await asyncio.gather(*(stage.engine.generate(PROMPT, one, session="s") for one in params))
        assert [one.token_ids.tolist() for one in batched] == [one.token_ids.tolist() for one in alone]
        np.testing.assert_allclose([one.logprobs for one in batched], [one.logprobs for one in alone], atol=TOLERANCE)

    stage.play(scene())


def test_a_stream_is_the_completion_in_chunks_and_closing_it_cancels(stage: Stage) -> None:
    async def scene() -> None:
        params = SamplingParams(max_tokens=400, seed=4)
        whole = await stage.engine.generate(PROMPT, params, session="s")
        chunks = [chunk async for chunk in stage.engine.stream(PROMPT, params, session="s")]
        assert len(chunks) > 1  # a busy vLLM sends several tokens at a time
        assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == whole.token_ids.tolist()
        last = chunks[-1].completion
        assert last is not None and last.token_ids.tolist() == whole.token_ids.tolist()
        endless = stage.engine.stream(PROMPT, SamplingParams(max_tokens=MAX_LENGTH - 10), session="s")
        assert len((await anext(endless)).token_ids) >= 1
        await endless.aclose()
        await until_idle(stage)

    stage.play(scene())


async def until_idle(stage: Stage) -> None:
    async with asyncio.timeout(RETRY_TIMEOUT_S):
        while (health := await stage.engine.health()).running + health.waiting:
            await asyncio.sleep(0.1)


def test_a_sparse_and_a_whole_update_are_visible_in_every_logprob(stage: Stage) -> None:
    async def sample() -> Completion:
        return await stage.engine.generate(PROMPT, SamplingParams(max_tokens=24, seed=9), session="s")

    before = stage.play(sample())
    stage.play(stage.follow(stage.next_state(1)))
    sparse = stage.play(sample())
    np.testing.assert_allclose(sparse.logprobs, stage.logprobs(PROMPT, sparse.token_ids.tolist()), atol=TOLERANCE)
    assert set(sparse.versions.tolist()) == {stage.version}
    assert np.abs(before.logprobs - sparse.logprobs).max() > 0.1

    after = stage.next_state(2)
    save(stage.folder, after)
    stage.play(stage.engine.update(stage.version + 1, state_digest(after), stage.folder))
    stage.state, stage.version = after, stage.version + 1
    whole = stage.play(sample())
    np.testing.assert_allclose(whole.logprobs, stage.logprobs(PROMPT, whole.token_ids.tolist()), atol=TOLERANCE)
    health = stage.play(stage.engine.health())
    assert (health.version, health.digest) == (stage.version, stage.digest)
    assert stage.play(stage.engine.digest()) == stage.digest


@pytest.mark.parametrize("kind", ["wrong digest", "wrong base", "unknown tensor", "no folder"])
def test_an_update_that_is_not_what_it_says_is_refused_and_the_old_weights_go_on(stage: Stage, kind: str) -> None:
    after = stage.next_state(3)
    digest, source = state_digest(after), stage.changes(after)
    if kind == "wrong digest":
        digest = stage.digest
    elif kind == "wrong base":
        source.pop("model.norm.weight")
    elif kind == "unknown tensor":
        source["nobody"] = source.pop("model.norm.weight")
    with pytest.raises(DamagedError):
        stage.play(stage.engine.update(99, digest, stage.folder / "nowhere" if kind == "no folder" else source))
    assert stage.play(stage.engine.health()).version == stage.version
    assert stage.play(stage.engine.digest()) == stage.digest
    completion = stage.play(stage.engine.generate(PROMPT, SamplingParams(max_tokens=8), session="s"))
    expected = stage.logprobs(PROMPT, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


@dataclass(frozen=True)
class Swapped:
    """A completion into which an update fell, and the weights before it."""

    completion: Completion
    before: dict[str, StoredTensor]
    boundary: int
    """How many of its tokens the old weights sampled."""


def swap_while_sampling(stage: Stage, mode: SwapMode, count: int) -> Swapped:
    """Change the weights as soon as the first of ``count`` tokens is there; labels are checked here."""
    before, version, after = stage.state, stage.version, stage.next_state(4)
    digest, changes = state_digest(after), stage.changes(after)
    params = SamplingParams(max_tokens=count, seed=11)

    async def scene() -> list[TokenChunk]:
        stream = stage.engine.stream(PROMPT, params, session="s")
        first = await anext(stream)
        update = asyncio.create_task(stage.engine.update(version + 1, digest, changes, mode))
        chunks = [first, *[chunk async for chunk in stream]]
        await update
        return chunks

    chunks = stage.play(scene())
    stage.state, stage.version = after, version + 1
    completion = chunks[-1].completion
    assert completion is not None
    versions = completion.versions.tolist()
    boundary = versions.count(version)
    assert versions == [version] * boundary + [version + 1] * (count - boundary)
    assert np.concatenate([chunk.versions for chunk in chunks]).tolist() == versions
    assert np.concatenate([chunk.token_ids for chunk in chunks]).tolist() == completion.token_ids.tolist()
    return Swapped(completion, before, boundary)


@pytest.mark.parametrize("mode", list(SwapMode))
def test_a_token_carries_the_version_that_sampled_it(stage: Stage, mode: SwapMode) -> None:
    """During a swap, logprobs before the boundary are those of the old checkpoint; after it they depend on the mode."""
    count = 1500  # seconds of work
    for _ in range(SWAPS):
        swapped = swap_while_sampling(stage, mode, count)
        if mode is SwapMode.DRAIN or swapped.boundary < count:
            break
    completion, boundary = swapped.completion, swapped.boundary
    token_ids = [*PROMPT, *completion.token_ids.tolist()]
    first = reference(stage.folder, swapped.before, token_ids, 1.0)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(completion.logprobs[:boundary], first[:boundary], atol=LONG_TOLERANCE)
    second = reference(stage.folder, stage.state, token_ids, 1.0)[len(PROMPT) - 1 :]
    differences = np.abs(completion.logprobs - second)[boundary:]
    if mode is SwapMode.DRAIN:
        assert boundary == count
    else:
        assert 0 < boundary < count
    if mode is SwapMode.KEEP:  # keys of the old weights are still read: neither checkpoint's
        assert differences.max() > LONG_TOLERANCE
    else:
        assert (differences < LONG_TOLERANCE).all()


def test_a_prefix_is_reused_within_a_version_and_never_across_two(stage: Stage) -> None:
    prompt = np.random.default_rng(5).integers(0, VOCAB_SIZE, 300).tolist()
    params = SamplingParams(max_tokens=8, seed=1)

    async def hits() -> int:
        lines = (await stage.client.text("/metrics")).split(b"\n")
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(b"vllm:prefix_cache_hits_total{"))

    async def scene() -> tuple[Completion, int]:
        before = await hits()
        for _ in range(2):
            await stage.engine.generate(prompt, params, session="s")
        async with asyncio.timeout(RETRY_TIMEOUT_S):  # counters come a little later than answers
            while await hits() < before + 256:  # two pages of 128 of the 300
                await asyncio.sleep(0.05)
        # Somebody keeps pages, so that the cache cannot be thrown away as a whole.
        holder = stage.engine.stream(PROMPT, SamplingParams(max_tokens=MAX_LENGTH - 10), session="s")
        await anext(holder)
        await stage.follow(stage.next_state(6))
        completion = await stage.engine.generate(prompt, params, session="s")
        await holder.aclose()
        await until_idle(stage)
        return completion, await hits() - before

    completion, reused = stage.play(scene())
    assert reused == 256
    expected = stage.logprobs(prompt, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE)


def test_traffic_goes_on_through_updates_and_every_label_is_true(stage: Stage) -> None:
    states = {stage.version: stage.state}

    async def traffic(seed: int) -> list[Completion]:
        params = SamplingParams(max_tokens=6, seed=seed)
        completions = []
        while len(states) < 4:
            completions.append(await stage.engine.generate(PROMPT, params, session="s"))
        return completions

    async def scene() -> list[list[Completion]]:
        calls = [asyncio.create_task(traffic(seed)) for seed in range(4)]
        for seed in range(3):
            await stage.follow(stage.next_state(seed), SwapMode.RECOMPUTE)
            states[stage.version] = stage.state
        return await asyncio.gather(*calls)

    answers = [completion for completions in stage.play(scene()) for completion in completions]
    versions = [completion.versions.tolist() for completion in answers]
    assert all(labels == sorted(labels) for labels in versions)
    assert len({label for labels in versions for label in labels}) > 1
    for completion in answers[:: 1 + len(answers) // 8]:
        read = [*PROMPT, *completion.token_ids.tolist()]
        for label in set(completion.versions.tolist()):
            its_own = completion.versions == label
            expected = reference(stage.folder, states[label], read, 1.0)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(completion.logprobs[its_own], expected[its_own], atol=TOLERANCE)


def test_a_killed_server_is_unavailable_and_leaves_no_process_behind(stage: Stage) -> None:
    """Last of all: the module's server does not survive it."""
    family = descendants(stage.process.pid)
    assert len(family) >= 3  # its API server, its scheduler and its worker

    async def read(number: int, begun: asyncio.Event) -> None:
        async for _ in stage.engine.stream(PROMPT, SamplingParams(max_tokens=2000), session=f"s{number}"):
            begun.set()

    async def scene() -> None:
        begun = asyncio.Event()
        calls = [asyncio.ensure_future(read(number, begun)) for number in range(16)]
        await begun.wait()
        os.kill(family[0], signal.SIGKILL)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends if end is not None} == {EngineUnavailable}  # some may just have ended
        with pytest.raises(EngineUnavailable):
            await stage.engine.health()
        async with asyncio.timeout(RETRY_TIMEOUT_S):
            while stage.process.is_running or any(is_alive(pid) for pid in family):
                await asyncio.sleep(0.1)

    stage.play(scene())


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
