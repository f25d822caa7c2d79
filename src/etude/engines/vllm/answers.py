"""Requests and answers of vLLM's ``/inference/v1/generate`` as étude's types: pure functions over parsed JSON.

Owns the wire format of vLLM 0.32; does no I/O. Legend: P prompt tokens, C sampled tokens, L all hidden layers, S sparse
ones, k experts per token.
"""

import base64
import binascii
import io
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from etude.errors import EngineUnavailable
from etude.protocols import SamplingParams
from etude.types import Finish, Floats, Ids, Routes, SamplingMask, TokenIds

Choice = Mapping[str, Any]
"""One entry of ``choices``, or of one event's ``choices``."""
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFeatures:
    """The features that a server was started with: what it returns beyond tokens and their probabilities."""

    sparse_layers: tuple[int, ...] = ()
    """Hidden layers with experts, ascending; empty if the server returns no routes."""
    sampling_mask: bool = False
    """True if it returns sampling masks."""

    def check(self, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a parameter that the server would silently ignore."""
        if params.adapter:
            raise ValueError(
                f"adapter={params.adapter!r}: vLLM serves that of its run; engine.kind = 'native' has more"
            )
        if params.want_routes and not self.sparse_layers:
            raise ValueError(
                "this vLLM does not say which experts it used: start it with --enable-return-routed-experts, which "
                "needs Model Runner V2 and hence a GPU, or do without replay"
            )
        if params.truncates and not self.sampling_mask:
            raise ValueError(
                f"top_p={params.top_p}, top_k={params.top_k}: this vLLM does not say what they left to draw from, so "
                "it cannot be trained on: start it with --return-sampling-mask, which needs Model Runner V2 and hence "
                "a GPU, or sample with top_p=1 and top_k=0"
            )


def request_body(
    prompt_ids: TokenIds, params: SamplingParams, *, salt: str, stream: bool, adapter: str = ""
) -> dict[str, Any]:
    """The body of a generate request; only prompts with the same ``salt`` share cached prefixes. ``adapter`` is the
    name of a loaded adapter; without it the served checkpoint is used.
    """
    return {
        **({"model": adapter} if adapter else {}),
        "token_ids": np.asarray(prompt_ids, np.int64),
        "cache_salt": salt,
        "priority": params.priority,
        "stream": stream,
        "sampling_params": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p if params.temperature > 0 else 1.0,
            "top_k": params.top_k if params.temperature > 0 else 0,
            "stop_token_ids": params.stop_ids,
            "seed": params.fresh_seed,
            "ignore_eos": True,  # the caller sets the stop tokens
            "logprobs": 0,
            "detokenize": False,
        },
    }


def read_choice(answer: Any) -> Choice:
    """The one choice of an answer or event. Raises :class:`~etude.errors.EngineUnavailable` if there is none."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EngineUnavailable(f"vLLM answered {answer!r:.300} instead of one choice")
    return choices[0]


def tokens_of(choice: Choice, *, greedy: bool) -> tuple[Ids, Floats]:
    """[C] the sampled tokens and their log-probabilities: log 1 if ``greedy``.

    Raises :class:`~etude.errors.EngineUnavailable` for an answer that cannot be read.
    """
    try:
        content = choice["logprobs"]["content"] or []
        token_ids = np.array([*choice["token_ids"]], np.int32)
        labels = np.array([entry["token_id"] for entry in content], np.int32)
        logprobs = np.array([float(entry["logprob"]) for entry in content], np.float32)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineUnavailable(f"vLLM's tokens cannot be read: {type(error).__name__}: {error}") from error
    if not np.array_equal(token_ids, labels) or not np.isfinite(logprobs).all():
        raise EngineUnavailable(f"vLLM sent {len(logprobs)} finite logprobs for {len(token_ids)} tokens, or of others")
    return token_ids, np.zeros_like(logprobs) if greedy else logprobs


def finish_of(choice: Choice) -> Finish:
    """The finish reason. Raises :class:`~etude.errors.EngineUnavailable` if the server gave up on it."""
    reason = choice.get("finish_reason")
    if not isinstance(reason, str) or reason not in FINISHES:
        raise EngineUnavailable(f"vLLM ended a completion with {reason!r}")
    return FINISHES[reason]


def versions_of(choice: Choice, count: int) -> Ids:
    """[C] the weight version of each token, from the spans of the last answer; they must cover all ``count``.

    Raises :class:`~etude.errors.EngineUnavailable` otherwise: a token of unknown weights is of no use.
    """
    spans = choice.get("weight_versions") or []
    versions = np.full(count, -1, np.int32)
    try:
        for span in spans:
            versions[span["start"] : span["end"]] = int(span["version"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineUnavailable(f"vLLM's weight versions cannot be read: {spans!r:.200}") from error
    if (versions < 0).any():
        raise EngineUnavailable(f"vLLM says no weight version for some of {count} tokens: {spans!r:.200}")
    return versions


def decode_routes(choice: Choice, tokens: int, sparse_layers: Sequence[int]) -> Routes:
    """[P + C − 1, S, k] the experts of each of ``tokens`` − 1 tokens, from a base64 ``.npy`` of [P + C − 1, L, k].

    Raises :class:`~etude.errors.EngineUnavailable` if they are missing or of another shape.
    """
    text = choice.get("routed_experts") or ""
    try:
        routes_TLK = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, binascii.Error, EOFError, OSError, tokenize.TokenError) as error:
        raise EngineUnavailable(f"vLLM's routes cannot be read: {type(error).__name__}: {error}") from error
    fits = routes_TLK.ndim == 3 and len(routes_TLK) == tokens - 1 and routes_TLK.shape[1] > max(sparse_layers)
    if not fits or routes_TLK.dtype.kind not in "iu" or (routes_TLK.size and routes_TLK.min() < 0):
        raise EngineUnavailable(f"vLLM sent routes {routes_TLK.dtype} {list(routes_TLK.shape)} for {tokens} tokens")
    return np.ascontiguousarray(routes_TLK[:, list(sparse_layers)], np.uint16)


def mask_of(masks: Sequence[Sequence[int]], count: int) -> SamplingMask:
    """The sampling mask of ``count`` tokens: the ids that remain for each after top-p and top-k.

    Raises :class:`~etude.errors.EngineUnavailable` unless there is one set for each.
    """
    if len(masks) != count:
        raise EngineUnavailable(f"vLLM named {len(masks)} sampling masks for {count} tokens")
    return SamplingMask.of_rows([np.sort(np.array(mask, np.int32)) for mask in masks])
