"""SGLang as an engine, over its HTTP API. **Not run against a live server**: its formats are taken from the sources of
SGLang 0.5.23 (``srt/managers/io_struct.py``, ``srt/entrypoints/http_server.py``, ``srt/managers/tokenizer_manager.py``,
``srt/state_capturer/routed_experts.py``), and tested against these.

    generate ──gate──▶ /generate, again for the rest after each update
    update ──closes the gate──▶ /pause_generation abort ▶ /update_weights_from_disk ▶ /continue_generation ──opens it

SGLang labels a whole answer, not each token, with the version that is served at its end. So an update aborts all
running requests: each returns its tokens so far, all of one version, and is sent again for the rest under the new
weights, which read its prompt and tokens again. That is the mode RECOMPUTE; SGLang's own in-place pause would leave
tokens of unknown version. SGLang checks once a second whether aborted requests have ended, so an update with running
requests pauses for at least a second. :mod:`etude.engines.sglang.server` starts the server.
"""

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from etude.engines.api_client import ApiClient, RequestLimits
from etude.errors import DamagedError, EngineUnavailable
from etude.protocols import Completion, EngineHealth, SamplingParams, TokenChunk
from etude.types import Finish, Floats, Ids, Routes, TokenIds, as_list
from etude.weights.digest import state_digest
from etude.weights.interop.checkpoint import read_checkpoint

GENERATE = "/generate"
ABORTED = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFeatures:
    """The features that a server was started with."""

    sparse_layers: tuple[int, ...] = ()
    """Hidden layers with experts, ascending, under ``--enable-return-routed-experts``; empty without."""
    hidden_layers: int = 0
    """Number of all hidden layers: routes arrive as a flat array over all of them."""
    experts_per_token: int = 0
    seeds: bool = False
    """True if it supports seeds: only under ``--enable-deterministic-inference``."""

    def check(self, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a parameter that the server would silently ignore."""
        if params.adapter:
            raise ValueError(f"adapter={params.adapter!r}: SGLang serves what its run publishes and nothing else")
        if params.want_routes and not self.sparse_layers:
            raise ValueError(
                "this SGLang does not say which experts it used: start it with --enable-return-routed-experts"
            )
        if params.seed is not None and not self.seeds:
            raise ValueError(f"seed={params.seed}: SGLang heeds it under --enable-deterministic-inference only")
        if params.truncates:
            raise ValueError(
                f"top_p={params.top_p}, top_k={params.top_k}: SGLang's logprobs are those before the filters, which "
                "cannot be trained on: sample with top_p=1 and top_k=0"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SglangAnswer:
    """The result of one call to ``/generate``, up to the latest event; without tokens if it ended while waiting."""

    token_ids: Ids
    logprobs: Floats
    version: int
    """The weight version of all its tokens."""
    finish: str | None
    """``stop``, ``length``, ``abort``; ``None`` while it is in progress."""
    routes: Routes | None


@final
class SglangEngine:
    """Samples with an SGLang server; implements :class:`~etude.protocols.Engine`."""

    def __init__(self, client: ApiClient, limits: RequestLimits, features: SglangFeatures) -> None:
        """Only this client may update the server."""
        self._client = client
        self._limits = limits
        self._features = features
        self._version = -1
        self._digest = ""
        self._updates = 0
        self._inflight = 0
        self._open = asyncio.Event()
        self._fault = "no weights were named yet: call start() first"
        self._updating = asyncio.Lock()

    async def start(self, version: int, folder: Path) -> None:
        """Declare the checkpoint that the server was started with; to be called once, before anything else. Raises
        :class:`~etude.errors.EngineUnavailable` if the server reports another version.
        """
        self._version, self._digest = version, await asyncio.to_thread(_digest_of, folder)
        self._fault = ""
        self._open.set()
        await self.health()

    @property
    def version(self) -> int:
        """The weight version being served; −1 before the start."""
        return self._version

    async def generate(self, prompt_ids: TokenIds, params: SamplingParams, *, session: str) -> Completion:
        """Sample one completion, across any updates. Raises ``ValueError`` for a request that can never be served, and
        :class:`~etude.errors.EngineUnavailable`.
        """
        async for chunk in self.stream(prompt_ids, params, session=session):
            if chunk.completion is not None:
                return chunk.completion
        raise AssertionError("a stream ends with its completion")

    async def stream(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sample one completion and yield its tokens as they arrive; raises as :meth:`generate` does."""
        self._limits.check(prompt_ids, params)
        self._features.check(params)
        done: list[SglangAnswer] = []
        self._inflight += 1
        try:
            while not _is_finished(done):
                await self._admitted()
                given, answer, updates = 0, None, self._updates
                read = [*as_list(prompt_ids), *(token for part in done for token in part.token_ids.tolist())]
                rest = replace(params, max_tokens=params.max_tokens - len(read) + len(prompt_ids))
                async for answer in self._answers(read, rest):
                    if given < len(answer.token_ids) and answer.finish is None:
                        yield _chunk(answer, given)
                        given = len(answer.token_ids)
                if answer is None or answer.finish is None:
                    raise EngineUnavailable("SGLang ended a completion without saying why")
                if answer.finish == ABORTED and updates == self._updates:
                    raise EngineUnavailable("SGLang gave up on a completion")
                done.append(answer)
                if not _is_finished(done) and given < len(answer.token_ids):
                    yield _chunk(answer, given)
            yield replace(_chunk(done[-1], given), completion=_completion(done, params))
        finally:
            self._inflight -= 1

    async def health(self) -> EngineHealth:
        """The served weights; ``running`` counts this client's calls, including those that wait in the server. Raises
        :class:`~etude.errors.EngineUnavailable`, also if an update was interrupted.
        """
        if self._fault:
            raise EngineUnavailable(self._fault)
        await self._client.text("/health")
        label = (await self._client.get("/model_info"))["weight_version"]
        if label != str(self._version) and not self._updating.locked():
            raise EngineUnavailable(f"SGLang serves weight version {label!r}, not {self._version}: it was changed")
        return EngineHealth(version=self._version, digest=self._digest, running=self._inflight, waiting=0)

    async def update(self, version: int, digest: str, folder: Path) -> float:
        """Serve the checkpoint in ``folder``; returns the pause in seconds.

        The digest is verified on the files, because SGLang does not report its weights. Raises
        :class:`~etude.errors.DamagedError` if they have another digest; then nothing changes.
        """
        async with self._updating:
            if (digest_of_files := await asyncio.to_thread(_digest_of, folder)) != digest:
                raise DamagedError(f"{folder} holds the state {digest_of_files[:12]}, not {digest[:12]}")
            self._updates += 1
            self._open.clear()
            began_s = time.monotonic()
            try:
                await self._swap(version, folder)
                self._version, self._digest = version, digest
            except (EngineUnavailable, ValueError, asyncio.CancelledError) as error:
                self._fault = f"an update to weight version {version} broke off: {error}"
                raise
            finally:
                self._open.set()
            return time.monotonic() - began_s

    async def _swap(self, version: int, folder: Path) -> None:
        await self._client.post("/pause_generation", {"mode": ABORTED}, self._limits.load_s)
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        try:
            answer = await self._client.post("/update_weights_from_disk", body, self._limits.load_s)
        except ValueError as error:  # status 400 means that the load failed
            raise EngineUnavailable(f"SGLang did not load {folder}: {error}") from error
        if not answer["success"]:
            raise EngineUnavailable(f"SGLang did not load {folder}: {answer['message']}")
        await self._client.post("/continue_generation", {}, self._limits.load_s)

    async def _admitted(self) -> None:
        """Wait for the end of an update."""
        while not (self._fault or self._open.is_set()):
            async with asyncio.timeout(self._limits.load_s):
                await self._open.wait()
        if self._fault:
            raise EngineUnavailable(self._fault)

    async def _answers(self, read: Sequence[int], params: SamplingParams) -> AsyncIterator[SglangAnswer]:
        """Yield answers; each event contains the whole answer so far."""
        async for event in self._client.events(GENERATE, request_body(read, params)):
            yield read_answer(event, params, len(read), self._features)


def request_body(prompt_ids: TokenIds, params: SamplingParams) -> dict[str, Any]:
    """The body of a streamed ``/generate`` request."""
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "stop_token_ids": list(params.stop_ids),
        "ignore_eos": True,  # the caller sets the stop tokens
        "top_p": 1.0,
        "top_k": -1,
    }
    if params.seed is not None:
        sampling["sampling_seed"] = params.seed
    return {
        "input_ids": np.asarray(prompt_ids, np.int64),
        "sampling_params": sampling,
        "return_logprob": True,
        "return_routed_experts": params.want_routes,
        "priority": params.priority,
        "stream": True,
    }


def read_answer(event: Any, params: SamplingParams, prompt_tokens: int, features: SglangFeatures) -> SglangAnswer:
    """Parse an event of a stream. Raises :class:`~etude.errors.EngineUnavailable` if it cannot be read."""
    try:
        meta: Mapping[str, Any] = event["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        token_ids = np.array([*event["output_ids"]], np.int32)
        labels = np.array([entry[1] for entry in entries], np.int32)
        logprobs = np.array([float(entry[0]) for entry in entries], np.float32)
        version = int(meta["weight_version"])
        finish = None if meta["finish_reason"] is None else str(meta["finish_reason"]["type"])
        text = meta.get("routed_experts") if finish is not None else None
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise EngineUnavailable(f"SGLang's answer cannot be read: {type(error).__name__}: {event!r:.300}") from error
    if not np.array_equal(token_ids, labels) or not np.isfinite(logprobs).all():
        raise EngineUnavailable(f"SGLang sent {len(logprobs)} logprobs for {len(token_ids)} tokens, or of others")
    routes = None
    if (
        params.want_routes and finish is not None and len(token_ids)
    ):  # without tokens, it ended before the prompt was read
        routes = decode_routes(text, prompt_tokens + len(token_ids), features)
    if params.temperature == 0:
        logprobs = np.zeros_like(logprobs)  # its probability is 1
    return SglangAnswer(token_ids=token_ids, logprobs=logprobs, version=version, finish=finish, routes=routes)


def decode_routes(text: Any, tokens: int, features: SglangFeatures) -> Routes:
    """[tokens − 1, sparse layers, k] from base64 of flat int32 [tokens − 1, hidden layers, k].

    Raises :class:`~etude.errors.EngineUnavailable` if they are missing or of another size.
    """
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        routes_TLK = flat.reshape(tokens - 1, features.hidden_layers, features.experts_per_token)
    except (TypeError, ValueError, binascii.Error) as error:
        raise EngineUnavailable(f"SGLang's routes cannot be read: {type(error).__name__}: {error}") from error
    return np.ascontiguousarray(routes_TLK[:, list(features.sparse_layers)], np.uint16)


def _is_finished(done: Sequence[SglangAnswer]) -> bool:
    return bool(done) and done[-1].finish != ABORTED


def _chunk(answer: SglangAnswer, given: int) -> TokenChunk:
    """The tokens of an answer that were not yielded yet."""
    token_ids = answer.token_ids[given:]
    versions = np.full(len(token_ids), answer.version, np.int32)
    return TokenChunk(token_ids=token_ids, logprobs=answer.logprobs[given:], versions=versions)


def _completion(done: Sequence[SglangAnswer], params: SamplingParams) -> Completion:
    """Join the parts of one completion; each token's routes are from the answer in which it was first read."""
    token_ids = np.concatenate([part.token_ids for part in done])
    finish = Finish.STOP if done[-1].finish == "stop" else Finish.LENGTH
    if finish is Finish.STOP and int(token_ids[-1]) not in params.stop_ids:
        raise EngineUnavailable(f"SGLang stopped at token {token_ids[-1]}, which ends nothing")
    routes: Routes | None = None
    for part in done:
        if part.routes is not None:
            routes = part.routes if routes is None else np.concatenate([routes, part.routes[len(routes) :]])
    return Completion(
        token_ids=token_ids,
        logprobs=np.concatenate([part.logprobs for part in done]),
        versions=np.concatenate([np.full(len(part.token_ids), part.version, np.int32) for part in done]),
        finish=finish,
        routes=routes,
    )


def _digest_of(folder: Path) -> str:
    return state_digest(read_checkpoint(folder))
