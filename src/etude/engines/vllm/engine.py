"""A vLLM server as an engine: token ids in and out over HTTP, weights changed under running requests.

    generate, stream ──gate──▶ /inference/v1/generate
    update ──closes the gate──▶ /pause ▶ start, update, finish_weight_update ▶ /reset_prefix_cache ▶ /resume ──opens it

Every token has the version that sampled it: vLLM labels spans of a finished completion, and changes the label only
while nothing runs. Cached prefixes are salted with the state digest, so that those of old weights are never found
again, even if they could not be removed. Owns the protocol; the process is in ``process.py``, the wire format in
``answers.py``, the part inside vLLM in ``extension.py``. Only one client may update a server.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from etude.engines.api_client import ANSWER_TIMEOUT_S, ApiClient, RequestLimits
from etude.engines.native.scheduler import SwapMode
from etude.engines.vllm.answers import (
    Choice,
    ServerFeatures,
    decode_routes,
    finish_of,
    mask_of,
    read_choice,
    request_body,
    tokens_of,
    versions_of,
)
from etude.engines.vllm.patches import Patch, write_patch
from etude.errors import DamagedError, EngineUnavailable
from etude.protocols import Completion, EngineHealth, SamplingParams, TokenChunk
from etude.types import Finish, Floats, Ids, TokenIds
from etude.weights.replica import ChangedNumbers

GENERATE = "/inference/v1/generate"
PATCH_FILE = "patch.safetensors"
GAUGES = {"running": b"vllm:num_requests_running{", "waiting": b"vllm:num_requests_waiting{"}
"""Prefixes of lines of ``/metrics``, one for each data-parallel rank."""

Source = Mapping[str, Sequence[ChangedNumbers]] | Path
"""The source of a new version: the numbers that changed, or the folder of a whole checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPause:
    """The pause of a server's requests during a weight update."""

    pause_s: float
    """Time from the pause request until sampling resumed."""
    load_s: float
    """The part of it in which weights were verified and loaded."""


@dataclass(slots=True, kw_only=True)
class _Adapter:
    """A loaded adapter and its use."""

    name: str
    version: int
    digest: str
    folder: Path
    running: int = 0
    """Completions in progress."""
    is_old: bool = False
    """True if it is to be unloaded after the last of these."""


class _Draft:
    """A partially received completion; the work per part does not grow with the earlier parts."""

    def __init__(self) -> None:
        self._tokens: list[Ids] = []
        self._logprobs: list[Floats] = []
        self.masks: list[Sequence[int]] = []
        self._given_parts = 0
        self.given = 0
        """Number of tokens returned so far."""

    def add(self, choice: Choice, *, greedy: bool) -> None:
        """Add the next part."""
        token_ids, logprobs = tokens_of(choice, greedy=greedy)
        self._tokens.append(token_ids)
        self._logprobs.append(logprobs)
        self.masks += choice.get("sampling_mask") or []

    def whole(self) -> tuple[Ids, Floats]:
        """All tokens and log-probabilities so far."""
        return np.concatenate(self._tokens), np.concatenate(self._logprobs)

    def pending(self) -> tuple[Ids, Floats]:
        """The tokens and log-probabilities that were not returned yet."""
        start, self._given_parts = self._given_parts, len(self._tokens)
        token_ids, logprobs = np.concatenate(self._tokens[start:]), np.concatenate(self._logprobs[start:])
        self.given += len(token_ids)
        return token_ids, logprobs


@final
class VllmEngine:
    """Samples with a vLLM server; implements :class:`~etude.protocols.Engine`."""

    def __init__(self, client: ApiClient, limits: RequestLimits, features: ServerFeatures, patch_folder: Path) -> None:
        """``patch_folder`` must be readable by the server; use a memory file system to avoid disk access."""
        self._client = client
        self._limits = limits
        self._features = features
        self._patch = patch_folder / PATCH_FILE
        self._version = -1
        self._digest = ""
        self._updates = 0
        """Number of updates started: a completion requested before the last one may be of two versions."""
        self._open = asyncio.Event()
        self._fault = "no weights were named yet: call start() first"
        self._updating = asyncio.Lock()
        self._adapter: _Adapter | None = None
        """The adapter of new requests; ``None``: only the served checkpoint."""

    @property
    def version(self) -> int:
        """The weight version being served."""
        return self._version if self._adapter is None else self._adapter.version

    async def load_adapter(self, version: int, digest: str, folder: Path) -> None:
        """Use the adapter in a PEFT folder, weight version ``version``, for all requests from now on. Nothing pauses:
        completions in progress continue with their adapter, which is unloaded after the last of them. The engine owns
        the folder from now on: vLLM may read it again until the adapter is unloaded.
        """
        self._updates += 1
        name = f"v{version}-{self._updates}"  # a version may come back while its old adapter is still in use
        load = {"lora_name": name, "lora_path": str(_absolute(folder))}
        await self._client.order("/v1/load_lora_adapter", load, self._limits.load_s)
        before, self._adapter = self._adapter, _Adapter(name=name, version=version, digest=digest, folder=folder)
        if before is not None:
            before.is_old = True
            await self._forget(before)

    @asynccontextmanager
    async def _adapted(self) -> AsyncIterator["_Adapter | None"]:
        """The adapter of a request, which stays loaded while the context is open."""
        adapter = self._adapter
        if adapter is None:
            yield None
            return
        adapter.running += 1
        try:
            yield adapter
        finally:
            adapter.running -= 1
            await self._forget(adapter)

    async def _forget(self, adapter: "_Adapter") -> None:
        if adapter.is_old and not adapter.running:
            adapter.is_old = False
            await self._client.order("/v1/unload_lora_adapter", {"lora_name": adapter.name})
            shutil.rmtree(adapter.folder)

    async def start(self, version: int, digest: str, *, frozen: bool = False) -> None:
        """Declare the checkpoint that the server was started with; to be called once, before anything else. A
        ``frozen`` checkpoint is never updated; adapters are loaded over it. Raises
        :class:`~etude.errors.EngineUnavailable` with the server's message unless its state has this ``digest``.
        """
        info = {"init_info": {"digest": digest, "frozen": frozen}}
        await self._client.post("/init_weight_transfer_engine", info, self._limits.load_s)
        await self._prove(digest)
        await self._client.post("/update_weight_version", {"new_version": str(version)})
        self._version, self._digest, self._fault = version, digest, ""
        self._open.set()

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion; prefixes are shared by all sessions.

        Raises ``ValueError`` for a request that can never be served, and :class:`~etude.errors.EngineUnavailable`.
        """
        await self._admit(prompt_ids, params)
        async with self._adapted() as adapter:
            body = self._body(prompt_ids, params, adapter, stream=False)
            choice = read_choice(await self._client.post(GENERATE, body, ANSWER_TIMEOUT_S))
            draft = _Draft()
            draft.add(choice, greedy=params.temperature == 0)
            return self._completion(prompt_ids, params, draft, choice, adapter)

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and yield its tokens as they arrive.

        vLLM reports only at the end where versions change. So tokens are yielded at once until an update begins; later
        ones come with the last chunk. Raises as :meth:`generate` does.
        """
        await self._admit(prompt_ids, params)
        async with self._adapted() as adapter:
            version = self.version if adapter is None else adapter.version
            updates = self._updates
            draft = _Draft()
            body = self._body(prompt_ids, params, adapter, stream=True)
            last: Choice | None = None
            events = self._client.events(GENERATE, body)
            async for event in events:
                last = read_choice(event)
                draft.add(last, greedy=params.temperature == 0)
                if last.get("finish_reason") is None and (adapter is not None or updates == self._updates):
                    token_ids, logprobs = draft.pending()
                    versions = np.full(len(token_ids), version, np.int32)
                    yield TokenChunk(token_ids=token_ids, logprobs=logprobs, versions=versions)
            if last is None:
                raise EngineUnavailable("vLLM ended a completion without an answer")
            given = draft.given
            completion = self._completion(prompt_ids, params, draft, last, adapter)
            if (completion.versions[:given] != version).any():
                raise EngineUnavailable(
                    "another client changed vLLM's weight version: only one client may update a server"
                )
            token_ids, logprobs = draft.pending()
            yield TokenChunk(
                token_ids=token_ids, logprobs=logprobs, versions=completion.versions[given:], completion=completion
            )

    async def health(self) -> EngineHealth:
        """The served weights, with the last verified digest. Raises :class:`~etude.errors.EngineUnavailable`, also if
        an update was interrupted.
        """
        if self._fault:
            raise EngineUnavailable(self._fault)
        label = (await self._client.get("/weight_info"))["weight_version"]
        if label != str(self._version) and not self._updating.locked():
            raise EngineUnavailable(f"vLLM serves weight version {label!r}, not {self._version}: it was changed")
        metrics = await self._client.text("/metrics")
        counts = {name: _gauge(metrics, prefix) for name, prefix in GAUGES.items()}
        digest = self._digest if self._adapter is None else self._adapter.digest
        return EngineHealth(version=self.version, digest=digest, **counts)

    async def digest(self) -> str:
        """The state digest of the weights in the server, computed now. On a CPU it is that of the copy that was loaded:
        the weights that vLLM computes with are packed and not accessible.
        """
        answer = await self._client.post("/collective_rpc", {"method": "etude_digest"}, self._limits.load_s)
        digests = {worker["digest"] for worker in answer["results"]}
        if len(digests) != 1:
            raise DamagedError(f"vLLM's workers hold different weights: {sorted(digests)}")
        return str(digests.pop())

    async def update(self, version: int, digest: str, source: Source, mode: SwapMode = SwapMode.KEEP) -> VllmPause:
        """Serve other weights; requests wait meanwhile, and continue as ``mode`` says.

        Raises :class:`~etude.errors.DamagedError` if ``source`` does not result in ``digest``: then the old weights are
        still served. If vLLM has lost them as well, the engine is unavailable from then on. In mode KEEP, a prompt that
        was requested but not yet read may also continue with cached keys of the old weights.
        """
        async with self._updating:
            update = await asyncio.to_thread(self._describe, digest, source)
            self._updates += 1
            self._open.clear()
            try:
                return await self._swap(version, digest, update, mode)
            except _Refused:
                raise
            except (EngineUnavailable, DamagedError, ValueError, asyncio.CancelledError) as error:
                self._fault = f"an update to weight version {version} broke off: {error}"
                raise
            finally:
                self._open.set()

    async def _swap(self, version: int, digest: str, update: Mapping[str, Any], mode: SwapMode) -> VllmPause:
        began_s = time.monotonic()
        wait = "wait" if mode is SwapMode.DRAIN else "keep"
        await self._client.post(f"/pause?mode={wait}&clear_cache=false", timeout_s=self._limits.load_s)
        paused_s = time.monotonic()
        await self._client.post("/start_weight_update")
        fault = ""
        try:
            await self._client.post("/update_weights", {"update_info": update}, self._limits.load_s)
        except EngineUnavailable as error:
            fault = str(error)
        await self._prove(self._digest if fault else digest)
        loaded_s = time.monotonic()
        if not fault:
            await self._client.post("/finish_weight_update", {"weight_version": str(version)})
            self._version, self._digest = version, digest
            await self._forget_prefixes(mode)
        await self._client.post("/resume")
        if fault:
            raise _Refused(fault)
        return VllmPause(pause_s=time.monotonic() - began_s, load_s=loaded_s - paused_s)

    async def _forget_prefixes(self, mode: SwapMode) -> None:
        """Free the memory of outdated prefixes; running requests read theirs again, or keep them."""
        again = mode is SwapMode.RECOMPUTE
        path = f"/reset_prefix_cache?reset_running_requests={str(again).lower()}"
        answer = await self._client.post(path, timeout_s=self._limits.load_s)
        if again and not answer["success"]:
            raise EngineUnavailable("vLLM did not discard the keys that running requests computed with the old weights")

    async def _prove(self, digest: str) -> None:
        if (actual := await self.digest()) != digest:
            raise DamagedError(f"vLLM holds the state {actual[:12]}, not {digest[:12]}")

    async def _admit(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        """Wait for the end of an update, and check the request."""
        self._limits.check(prompt_ids, params)
        self._features.check(params)
        while not (self._fault or self._open.is_set()):
            async with asyncio.timeout(self._limits.load_s):
                await self._open.wait()
        if self._fault:
            raise EngineUnavailable(self._fault)

    def _describe(self, digest: str, source: Source) -> dict[str, str]:
        """The body of an update request; changed numbers are written to a file that the server reads."""
        if isinstance(source, Path):
            return {"folder": str(_absolute(source)), "digest": digest}
        write_patch(self._patch, Patch(base=self._digest, digest=digest, changes=source))
        return {"patch": str(_absolute(self._patch)), "digest": digest}

    def _body(
        self, prompt_ids: TokenIds, params: SamplingParams, adapter: "_Adapter | None", *, stream: bool
    ) -> dict[str, Any]:
        """The body of a request; an adapter reuses only prefixes that it computed itself."""
        name, salt = ("", self._digest) if adapter is None else (adapter.name, adapter.digest)
        return request_body(prompt_ids, params, salt=salt, stream=stream, adapter=name)

    def _completion(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        draft: _Draft,
        last: Choice,
        adapter: "_Adapter | None" = None,
    ) -> Completion:
        token_ids, logprobs = draft.whole()
        count, finish = len(token_ids), finish_of(last)
        if finish is Finish.STOP and int(token_ids[-1]) not in params.stop_ids:
            raise EngineUnavailable(f"vLLM stopped at token {token_ids[-1]}, which ends nothing")
        layers = self._features.sparse_layers
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions_of(last, count) if adapter is None else np.full(count, adapter.version, np.int32),
            finish=finish,
            routes=decode_routes(last, len(prompt_ids) + count, layers) if params.want_routes else None,
            sampling_mask=mask_of(draft.masks, count) if params.truncates else None,
        )


class _Refused(DamagedError):
    """The server rejected an update and still serves the old weights."""


def _absolute(path: Path) -> Path:
    """A path that is valid in another process."""
    return path.resolve()


def _gauge(metrics: bytes, prefix: bytes) -> int:
    lines = [line for line in metrics.split(b"\n") if line.startswith(prefix)]
    return sum(int(float(line.rsplit(b" ", 1)[1])) for line in lines)
