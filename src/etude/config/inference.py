"""``[engine]``, ``[numerics]``, ``[gateway]``: sampling from the model, and its arithmetic."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, JsonValue, PlainValidator, SerializeAsAny, model_validator

from etude.config.plugins import Registry
from etude.config.section import OptionsOf, Section

Swap: TypeAlias = Literal["keep", "recompute", "drain"]
"""Effects of new weights on turns in progress."""
HIGHEST_PORT = 65535


class NativeOptions(Section):
    """étude's own engine."""

    max_waiting: int = Field(default=4096, ge=1)
    """Most queued calls; further calls are refused and told to retry later."""
    step_tokens: int = Field(default=2048, ge=16)
    """Tokens computed in one step: one for every sequence that decodes, the rest for prefill."""
    cache_tokens: int = Field(default=0, ge=0)
    """Positions of the key/value cache, which is all the memory that calls take; 0: enough for ``max_running``
    sequences of ``max_length``. If the cache is full, the least urgent calls are preempted and prefilled again later.
    """
    swap: Swap = "keep"
    """Effect of new weights on turns in progress. ``keep``: they keep their cached keys and values. ``recompute``: they
    are prefilled again with the new weights. ``drain``: they finish first.
    """
    draft_tokens: int = Field(default=0, ge=0, le=16)
    """Tokens that a draft head proposes for each sequence (speculative decoding); the next step verifies all of them at
    once, and the sampled tokens are the same as without it. The head is the checkpoint's, or a new one
    (``loss.draft_learning_rate``). 0: no draft head.
    """
    spare_weights: bool = True
    """True to hold the weights twice: an update then pauses sampling only to exchange two references. False: it pauses
    sampling while the changed weights are written.
    """
    threads: int = Field(default=1, ge=1)
    """CPU threads."""


ARGUMENT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""The spelling of an argument of a server, without ``--``."""
OURS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.checkpoint",
        "model-path": "model.checkpoint",
        "dtype": "numerics.dtype",
        "device": "engine.device",
        "host": "nothing: the server listens on loopback alone",
        "port": "nothing: a free one is chosen",
        "api-key": "nothing: it is drawn at each start",
        "max-model-len": "engine.max_length",
        "context-length": "engine.max_length",
        "max-num-seqs": "engine.max_running",
        "max-running-requests": "engine.max_running",
        "enable-return-routed-experts": "numerics.replay",
    }
)
"""Arguments that étude gives a server itself → the key that decides them."""


def check_arguments(arguments: dict[str, "Argument"]) -> dict[str, "Argument"]:
    """Raise ``ValueError`` for the name of an argument that is none, or that étude gives itself."""
    for name in arguments:
        if not ARGUMENT.fullmatch(name):
            raise ValueError(
                f"{name!r} is not an argument of a server: write it as on its command line, without `--`, such as "
                "`tensor-parallel-size = 2`"
            )
        if name in OURS:
            raise ValueError(f"{name} is decided by {OURS[name]}")
    return arguments


Argument: TypeAlias = bool | int | float | str | dict[str, JsonValue]
Arguments: TypeAlias = Annotated[dict[str, Argument], AfterValidator(check_arguments)]
"""Arguments of a server's command line by name; true is a flag, false leaves it out, a table is written as JSON."""


class VllmOptions(Section):
    """A vLLM server."""

    python: str = ""
    """The interpreter of its Python environment; empty: ``ETUDE_VLLM_PYTHON``, else ``.venv-vllm``."""
    swap: Swap = "keep"
    """Effect of new weights on turns in progress, as for the native engine."""
    arguments: Arguments = Field(default={})
    """Further arguments of its command line, without ``--``: ``tensor-parallel-size = 2``, ``gpu-memory-utilization =
    0.6``; true for a flag; a table for an argument in JSON, such as ``speculative-config = { method = "ngram",
    num_speculative_tokens = 4 }``. Environment variables ``VLLM_…`` are passed on to it.
    """


class SglangOptions(Section):
    """An SGLang server."""

    python: str = ""
    """The interpreter of its Python environment; empty: ``ETUDE_SGLANG_PYTHON``, else ``.venv-sglang``."""
    arguments: Arguments = Field(default={})
    """Further arguments of its command line, without ``--``: ``tp-size = 2``, ``mem-fraction-static = 0.6``; true for a
    flag.
    """


ENGINES = Registry(
    "engine.kind",
    "engine",
    {
        "native": "etude.engines.native.opener:open_native",
        "vllm": "etude.engines.vllm.opener:open_vllm",
        "sglang": "etude.engines.sglang.opener:open_sglang",
    },
)
"""Engines by name: each is an :data:`etude.engines.kinds.Opener`."""
ENGINE_OPTIONS = OptionsOf(
    "engine", "kind", {"native": NativeOptions, "vllm": VllmOptions, "sglang": SglangOptions}, names=ENGINES
)


class EngineConfig(Section):
    """``[engine]``: inference."""

    kind: Annotated[str, AfterValidator(ENGINES)] = "native"
    """``native``: étude's own engine; ``vllm`` or ``sglang``: such a server in a Python environment of its own; or an
    engine of your own (``docs/extending.md``).
    """
    max_running: int = Field(default=96, ge=1)
    """Most sequences that are decoded at a time."""
    max_length: int = Field(default=640, ge=64)
    """Most tokens of one sequence, prompt and completion together."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """``auto``: a GPU if torch finds one, else the CPU."""
    host: str = "127.0.0.1"
    """Address to listen on. For an address other than loopback, which gateways on other machines need, a second
    listener is opened. Callers always need the run's engine key (``etude keys derive RUN engine``).
    """
    tls_cert: str = ""
    """PEM file with the certificate chain of that listener; empty: plain HTTP, which is for trusted networks only."""
    tls_key: str = ""
    """PEM file with the private key of the certificate."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine; each further replica has the next number. 0: any free port."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Engines that ``etude run`` starts on this machine, each with its own weights and cache."""
    options: Annotated[SerializeAsAny[Section], PlainValidator(ENGINE_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[engine.options]``: keys of the kind alone."""

    @property
    def public(self) -> bool:
        """True if others than this machine's processes are served."""
        return is_public(self.host, self.tls_cert)

    @property
    def native(self) -> NativeOptions:
        """Options of our own engine, or of one that is built on it, of which alone this may be asked."""
        assert isinstance(self.options, NativeOptions), self.kind
        return self.options

    @property
    def draft_tokens(self) -> int:
        """Tokens that a draft head guesses ahead of each sequence, verified together in the next step; what is sampled
        stays the same. The head is the checkpoint's, or a new one (``loss.draft_learning_rate``); 0: none.
        """
        return self.options.draft_tokens if isinstance(self.options, NativeOptions) else 0

    @property
    def resolved_cache_tokens(self) -> int:
        """Positions of the native engine's cache that was asked for."""
        return self.native.cache_tokens or self.max_running * self.max_length

    @model_validator(mode="after")
    def _check_listening(self) -> Self:
        check_last_port("engine", self.port, self.replicas)
        check_both_halves("engine", self.tls_cert, self.tls_key)
        return self

    @model_validator(mode="after")
    def _check_capacity(self) -> Self:
        if not isinstance(self.options, NativeOptions):
            return self
        if self.options.step_tokens < self.max_running:
            raise ValueError(f"engine.options.step_tokens={self.options.step_tokens} is below engine.max_running="
                             f"{self.max_running}: not all decode")  # fmt: skip
        if self.resolved_cache_tokens < self.max_length:
            raise ValueError(f"engine.options.cache_tokens={self.options.cache_tokens} cannot hold one sequence of "
                             f"engine.max_length={self.max_length}")  # fmt: skip
        return self


class NumericsConfig(Section):
    """``[numerics]``: arithmetic of engine and trainer, in one section because both must use the same."""

    arithmetic: Literal["auto", "invariant", "fast"] = "auto"
    """``invariant``: every sum in one fixed order, so that engine and trainer agree to the last bit (CPU). ``fast``:
    torch's own kernels, on any device. ``auto``: invariant on a CPU, where it is also faster, else fast; also fast if
    several processes train (``[parallel]``).
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of published weights and of the key/value cache; the trainer's own copy stays float32. ``auto``: bfloat16
    where engine and trainer are on GPUs, else float32.
    """
    experts: Literal["plain", "fp8", "mxfp8", "nvfp4"] = "plain"
    """Format of expert matrices in every forward pass and in what is published; ``plain`` is ``dtype``."""
    replay: Literal["auto", "off", "completion", "full"] = "auto"
    """Router replay: the tokens that the trainer sends to the experts that the engine used. ``off``: none;
    ``completion``: sampled tokens; ``full``: all tokens. ``auto``: ``completion`` in fast arithmetic, ``off`` in
    invariant arithmetic, where both choose the same experts.
    """
    replay_floor: float = Field(default=0.5, ge=0, le=1)
    """A replayed expert is replaced by the trainer router's best unused expert if that router scores it below this
    share of its own k-th best; 0: all are replayed.
    """
    warn_k3: float = Field(default=1e-3, gt=0)
    """Mismatch of engine and trainer (k3) above which a step warns."""
    stop_k3: float = Field(default=1e-2, gt=0)
    """Mismatch of engine and trainer (k3) above which the run stops (a collapse was reported at 0.013)."""

    @property
    def stored_dtype(self) -> Literal["float32", "bfloat16"]:
        """The type, decided: what is still ``auto`` was never asked for on GPUs."""
        return "float32" if self.dtype == "auto" else self.dtype

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.warn_k3 > self.stop_k3:
            raise ValueError(f"warn_k3={self.warn_k3:g} is above stop_k3={self.stop_k3:g}: no step would ever warn")
        return self


class GatewayConfig(Section):
    """``[gateway]``: the HTTP API between harnesses and engines."""

    host: str = "127.0.0.1"
    """Address to listen on. In a run, a second listener is opened for an address other than loopback: the run's own
    processes on this machine always use loopback.
    """
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first gateway; each further replica has the next number. 0: any free port."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Gateways that ``etude run`` starts on this machine; sessions are spread over them, and each knows all engines."""
    tls_cert: str = ""
    """PEM file with the certificate chain; empty: plain HTTP, which is for loopback and trusted networks only."""
    tls_key: str = ""
    """PEM file with the private key of the certificate."""
    engine_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a call waits for unavailable engines before it counts as an infrastructure failure."""
    max_session_tokens: int = Field(default=2**24, ge=1)
    """Most tokens of one session, with each branch of its conversation counted once; further calls are refused, which
    ends the rollout. In memory a token takes at most 6 bytes and its text; a sampled token takes 12 bytes more.
    """
    chat_template_kwargs: dict[str, str | bool | int | float] = Field(default={})
    """Values of variables of the model's chat template, such as ``enable_thinking = false``, unless a call sets them;
    also used by the phases before RL. A variable that the template does not have is refused.
    """
    keys: str = ""
    """File with the keys of people and products (``etude keys``); empty: only the admin key and the keys of rollouts
    are valid.
    """
    access_log: bool = False
    """True to log each call as a line of JSON, without its content."""
    summary_mark: str = ""
    """Text that marks a request for a summary: a call counts as one if its last message is the user's and contains this
    text. For harnesses that compact their own history and cannot send ``X-Etude-Turn``; empty: none.
    """

    @property
    def public(self) -> bool:
        """True if others than this machine's processes are served."""
        return is_public(self.host, self.tls_cert)

    @model_validator(mode="after")
    def _check_listening(self) -> Self:
        check_last_port("gateway", self.port, self.replicas)
        check_both_halves("gateway", self.tls_cert, self.tls_key)
        return self


def check_last_port(section: str, port: int, replicas: int) -> None:
    """Raise ``ValueError`` where the last of several processes would have a port that there is not."""
    if port and port + replicas - 1 > HIGHEST_PORT:
        raise ValueError(
            f"{section}.port={port} and {section}.replicas={replicas}: the last would listen on {port + replicas - 1}, "
            f"and there is no port above {HIGHEST_PORT}; lower the port"
        )


def check_both_halves(section: str, tls_cert: str, tls_key: str) -> None:
    """Raise ``ValueError`` for a certificate without its key, or a key without its certificate."""
    if bool(tls_cert) != bool(tls_key):
        missing = "tls_key" if tls_cert else "tls_cert"
        raise ValueError(f"{section}.{missing} is missing: TLS needs a certificate and its key")


def is_public(host: str, tls_cert: str) -> bool:
    """True for a listener that others than this machine's processes are to reach."""
    return host not in ("127.0.0.1", "localhost", "::1") or bool(tls_cert)
