"""Every knob of a run, one frozen section per stage.

A recipe is a TOML file with these sections; unknown keys, wrong types and out-of-range values are refused with a
message that names the key and its nearest neighbour. ``etude run RECIPE --dry-run`` prints the resolved whole.
A stage receives its own section, never the tree.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etude.errors import ConfigError


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and loose types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


OF_FOLDER = ("repository", "harbor")
"""Families whose tasks lie in a folder."""
OF_BUGFIX = ("kinds", "hidden_cases")
"""Keys of ``[tasks]`` that other families know nothing of."""


class TaskConfig(Section):
    """``[tasks]``: what is practised and how it is held out."""

    family: Literal["bugfix", "repository", "migrations", "harbor"] = "bugfix"
    """Planted bugs in short files; tasks built from repositories (``etude tasks build``); database migrations on a real
    PostgreSQL; tasks in Harbor's format.
    """
    folder: str = ""
    """Where the tasks of a ``repository`` or ``harbor`` family lie."""
    brief: bool = False
    """Of a ``repository`` family only the tasks of one wrong line, asked for in a line that names its function: for a
    small model, which then is mid-trained on such repairs.
    """
    impossible_share: float = Field(default=0.0, ge=0, le=0.1)
    """Share of training tasks that cannot be done: who passes one has cheated. 1 to 2 % is a meter."""
    kinds: tuple[Literal["arith", "slice", "comp", "loop", "range"], ...] = ("arith", "slice", "comp")
    """Kinds of planted-bug template in the family."""
    heldout_one_in: int = Field(default=6, ge=2, le=50)
    """Every how manieth template is held out."""
    hidden_cases: int = Field(default=10, ge=2, le=50)
    """Cases that grade a rollout; the agent never sees them."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if (self.family in OF_FOLDER) != bool(self.folder):
            has = "needs tasks.folder, where its tasks are" if not self.folder else "has no tasks.folder; leave it out"
            raise ValueError(f"tasks.family = {self.family!r} {has}")
        if self.impossible_share and self.family == "harbor":
            raise ValueError("tasks.impossible_share would have no effect on Harbor's verifiers; leave it out")
        if self.brief and self.family != "repository":
            raise ValueError(f"tasks.brief would have no effect with tasks.family = {self.family!r}; leave it out")
        for name in OF_BUGFIX if self.family != "bugfix" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"tasks.{name} would have no effect with tasks.family = {self.family!r}; leave it out")
        return self


class SandboxConfig(Section):
    """``[sandboxes]``: where agents' commands run."""

    kind: Literal["local", "ns", "gvisor", "qemu", "remote"] = "local"
    """``local`` forks short programs over a folder, thousands a minute; ``ns`` is a small machine of namespaces over an
    image; ``gvisor`` and ``qemu`` have a kernel of their own; ``remote`` is somewhere else.
    """
    url: str = ""
    """Of a ``remote`` server (``etude sandboxes serve``); its key is in ``ETUDE_SANDBOXES_KEY``."""
    images: str = ""
    """Folder of images; empty: ``ETUDE_IMAGES``, else the user's cache."""
    warm: int = Field(default=0, ge=0)
    """Most sandboxes that a warm pool holds, those in use included; 0: each is made when it is asked for."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if (self.kind == "remote") != bool(self.url):
            raise ValueError(f"sandboxes.kind = {self.kind!r} and sandboxes.url = {self.url!r} do not go together")
        if self.warm and self.kind == "local":
            raise ValueError("sandboxes.warm would have no effect with sandboxes.kind = 'local'; leave it out")
        return self


Outcome: TypeAlias = Literal["keep", "quarantine", "zero"]
"""What becomes of a rollout: trained on, kept out of training, trained on with a reward of zero."""


class CheatingConfig(Section):
    """``[cheating]``: what is looked for in rollouts, and what becomes of those in which it was found."""

    honeypots: bool = False
    """Lay baits in every sandbox: hidden tests, a solution, expected answers that are none."""
    on_low: Outcome = "keep"
    """What may well be honest, such as an edited visible test."""
    on_medium: Outcome = "quarantine"
    """What honest work hardly ever does."""
    on_high: Outcome = "zero"
    """What honest work never does."""
    exceptions: dict[str, Outcome] = {}
    """Name of a detector, or of a grader's ``cheat_`` part → what follows from it."""


class ModelConfig(Section):
    """``[model]``: shape of the Qwen3-MoE to train from scratch (Hugging Face's ``Qwen3MoeConfig``)."""

    vocab_size: int = Field(default=576, ge=300)
    """Entries of the byte-level BPE, special tokens included."""
    hidden_size: int = Field(default=96, ge=16)
    """Width of the residual stream."""
    layers: int = Field(default=3, ge=1)
    """Transformer blocks."""
    heads: int = Field(default=3, ge=1)
    """Query heads per layer."""
    kv_heads: int = Field(default=3, ge=1)
    """Key/value heads per layer; must divide ``heads``."""
    head_dim: int = Field(default=32, ge=8)
    """Width of one head; must be even for rotary positions."""
    experts: int = Field(default=8, ge=2)
    """Experts per layer."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that each token is routed to."""
    expert_size: int = Field(default=64, ge=8)
    """Inner width of one expert."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        return self


class MidtrainConfig(Section):
    """``[midtrain]``: from random weights to a model that knows the craft, badly."""

    tokens: int = Field(default=2_200_000, ge=1_000)
    """Training tokens, padding included."""
    batch_tokens: int = Field(default=2_000, ge=256)
    """Tokens of one optimiser step."""
    learning_rate: float = Field(default=4e-3, gt=0)
    """Peak of the schedule."""
    warmup_steps: int = Field(default=40, ge=1)
    """Linear warm-up from 0."""
    decay_share: float = Field(default=0.4, ge=0, le=1)
    """Last share of the steps, over which the rate falls linearly to 5 %."""
    weight_decay: float = Field(default=0.05, ge=0)
    """AdamW decay of matrices."""
    stdlib_share: float = Field(default=0.06, ge=0, le=1)
    """Share of steps on the Python standard library."""
    code_share: float = Field(default=0.34, ge=0, le=1)
    """Share of steps on clean domain code; the rest are agent transcripts."""
    context_weight: float = Field(default=0.3, ge=0, le=1)
    """Loss weight of transcript tokens that the agent did not write."""
    threads: int = Field(default=2, ge=1)
    """CPU threads; the machine is otherwise idle in this phase."""

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.stdlib_share + self.code_share > 1:
            raise ValueError("stdlib_share + code_share is more than 1: nothing would be left for transcripts")
        return self


class TranscriptConfig(Section):
    """``[transcripts]``: how imperfect the agent is that mid-training imitates."""

    right_edit: float = Field(default=0.4, ge=0, le=1)
    """Probability that an edit is the right one."""
    read_first: float = Field(default=0.8, ge=0, le=1)
    """Probability of reading the file before the first edit."""
    test_after: float = Field(default=0.5, ge=0, le=1)
    """Probability of testing after an edit."""
    retry: float = Field(default=0.45, ge=0, le=1)
    """Probability of trying again after a failing test."""


PLACEHOLDERS = ("prompt", "model", "temperature", "base_url", "workdir")
"""What ``harness.command`` and ``harness.environment`` may have filled in, written ``{prompt}``."""
OF_CODING = ("max_turns", "max_tokens_per_turn", "turn_timeout_s")
"""Keys of ``[harness]`` that an external command knows nothing of."""
OF_COMMAND = ("command", "environment", "files", "mounts", "timeout_s", "success_codes")
"""Keys of ``[harness]`` that the built-in harness has no use for."""


class HarnessConfig(Section):
    """``[harness]``: who drives the model, and the limits of one session."""

    kind: Literal["coding", "command"] = "coding"
    """The built-in coding agent, or any program that talks to a model over HTTP."""
    max_turns: int = Field(default=8, ge=1)
    """Model calls per rollout."""
    max_tokens_per_turn: int = Field(default=40, ge=4)
    """Sampled tokens per model call."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one model call, retries included."""
    command: tuple[str, ...] = ()
    """The program and its arguments, no shell between; ``{prompt}`` and its like are filled in."""
    environment: dict[str, str] = {}
    """Variables for it, filled in likewise, beside those by which OpenAI's and Anthropic's clients find a model."""
    files: dict[str, str] = {}
    """Its own files, by name, shown in ``/harness``; ``"@NAME"`` stands for the text of a file beside the recipe."""
    mounts: tuple[str, ...] = ()
    """Folders that it sees, read-only, at their own paths; their ``bin`` is on its ``PATH``. A virtual environment
    brings its Python along.
    """
    timeout_s: float = Field(default=240.0, gt=0)
    """How long it may take; then the rollout is graded as not submitted."""
    success_codes: tuple[int, ...] = (0,)
    """Exit codes that say: the agent submits what is there. Any other is graded as not submitted."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        idle = OF_COMMAND if self.kind == "coding" else OF_CODING
        for name in idle:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"harness.{name} would have no effect with harness.kind = {self.kind!r}; leave it out")
        if self.kind == "command":
            self._check_command()
        return self

    def fills(self, placeholder: str) -> bool:
        """Whether the command line or a variable takes ``placeholder``."""
        return any(f"{{{placeholder}}}" in text for text in (*self.command, *self.environment.values()))

    def _check_command(self) -> None:
        if not self.command or "=" in self.command[0]:
            raise ValueError(f"harness.command = {list(self.command)!r}: expected a program and its arguments")
        if not self.fills("prompt"):
            raise ValueError("harness.command has no {prompt}: the harness would not know its task")
        for text in (*self.command, *self.environment.values()):
            for name in re.findall(r"\{([a-z_]+)\}", text):
                if name not in PLACEHOLDERS:
                    raise ValueError(f"harness.command: {{{name}}} in {text!r} is none of {', '.join(PLACEHOLDERS)}")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"harness.environment: {name!r} is no name of a variable")
        for name, text in self.files.items():
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or text.startswith("@"):
                raise ValueError(f"harness.files: {name!r} must be a plain name, and its text must not start with '@'")


class RolloutConfig(Section):
    """``[rollouts]``: how many sessions run, and how far ahead of the trainer they may get."""

    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per optimiser step (P)."""
    group_size: int = Field(default=8, ge=2, le=128)
    """Rollouts of each task (G)."""
    max_staleness: int = Field(default=2, ge=0)
    """Weight versions that a trained token may be old (O); 0 is strictly synchronous."""
    concurrency: int = Field(default=128, ge=1)
    """Rollouts in flight (C)."""
    max_attempts: int = Field(default=4, ge=1)
    """Tries of one rollout slot before its group is dropped for infrastructure failure."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one whole rollout."""
    sandbox_workers: int = Field(default=2, ge=1)
    """Processes that fork sandboxed commands."""
    allow_unconfined: bool = False
    """Run the model's programs even where the machine grants no namespaces to confine them in."""

    @property
    def rollouts_per_step(self) -> int:
        """B = P·G."""
        return self.groups_per_step * self.group_size

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.concurrency < self.group_size:
            raise ValueError(f"concurrency={self.concurrency} is below group_size={self.group_size}: no group starts")
        window = (self.max_staleness + 1) * self.rollouts_per_step
        if self.concurrency > window:
            raise ValueError(
                f"concurrency={self.concurrency} would have no effect beyond {window} = (max_staleness + 1) * "
                f"groups_per_step * group_size; lower it or raise max_staleness"
            )
        return self


class EngineConfig(Section):
    """``[engine]``: inference."""

    kind: Literal["native", "vllm"] = "native"
    """Our own engine, or a vLLM server in a Python environment of its own."""
    vllm_python: str = ""
    """The interpreter of vLLM's environment; empty looks at ``ETUDE_VLLM_PYTHON``, then in ``.venv-vllm``."""
    max_running: int = Field(default=96, ge=1)
    """Sequences decoded together."""
    max_waiting: int = Field(default=4096, ge=1)
    """Calls in line before callers are told to come back later."""
    max_length: int = Field(default=640, ge=64)
    """Tokens of one sequence, prompt and completion."""
    step_tokens: int = Field(default=2048, ge=16)
    """Tokens computed in one step: one for every sequence that decodes, the rest for reading prompts."""
    cache_tokens: int = Field(default=0, ge=0)
    """Positions of the key/value cache, which is all the memory that calls take; 0 holds ``max_running`` sequences of
    ``max_length``. With less, the least urgent calls give way and are read again.
    """
    swap: Literal["keep", "recompute", "drain"] = "keep"
    """What new weights do to turns in progress: they go on with the keys they have, are read again under the new
    weights, or are waited for.
    """
    spare_weights: bool = True
    """Hold the weights twice, so that an update pauses sampling for the exchange of two references only; without, it
    pauses for writing what changed.
    """
    threads: int = Field(default=1, ge=1)
    """CPU threads."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""

    @property
    def resolved_cache_tokens(self) -> int:
        """Positions of the cache that was asked for."""
        return self.cache_tokens or self.max_running * self.max_length

    @model_validator(mode="after")
    def _roomy(self) -> Self:
        if self.step_tokens < self.max_running:
            raise ValueError(f"step_tokens={self.step_tokens} is below max_running={self.max_running}: not all decode")
        if self.resolved_cache_tokens < self.max_length:
            raise ValueError(
                f"cache_tokens={self.cache_tokens} cannot hold one sequence of max_length={self.max_length}"
            )
        return self


class NumericsConfig(Section):
    """``[numerics]``: the numbers that engine and trainer compute with; one section, because both must obey it."""

    arithmetic: Literal["auto", "invariant", "fast"] = "auto"
    """``invariant``: every sum in one written order, so that engine and trainer agree to the last bit (CPU). ``fast``:
    torch's own kernels, on any device. ``auto``: invariant on a CPU, where it is also the faster one, else fast.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of published weights and of the key/value cache; the trainer's own copy stays float32."""
    experts: Literal["plain", "fp8", "mxfp8", "nvfp4"] = "plain"
    """Format of expert matrices in every forward pass and in what is published; ``plain`` is ``dtype``."""
    replay: Literal["auto", "off", "completion", "full"] = "auto"
    """Whether the trainer sends tokens to the experts that the engine used: for none, for sampled tokens, or for all.
    ``auto``: ``completion`` in fast arithmetic, ``off`` in invariant arithmetic, which has nothing to repair.
    """
    replay_floor: float = Field(default=0.5, ge=0, le=1)
    """A replayed expert that the live router scores below this share of its own k-th best is replaced by the router's
    best that is not in use; 0 replays whatever comes.
    """
    warn_k3: float = Field(default=1e-3, gt=0)
    """Mismatch above which a step warns."""
    stop_k3: float = Field(default=1e-2, gt=0)
    """Mismatch above which the run stops rather than train on other numbers than were sampled (a collapse was reported
    at 0.013 in practice).
    """
    decide_tokens: int = Field(default=100, ge=1)
    """Fewer compared tokens than this neither warn nor stop."""

    @model_validator(mode="after")
    def _ladder(self) -> Self:
        if self.warn_k3 > self.stop_k3:
            raise ValueError(f"warn_k3={self.warn_k3:g} is above stop_k3={self.stop_k3:g}: no step would ever warn")
        return self


class GatewayConfig(Section):
    """``[gateway]``: the door between harnesses and engines."""

    host: str = "127.0.0.1"
    """Address to listen on. In a run, another one than loopback gets a listener of its own: the run's own processes
    talk over loopback in any case.
    """
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    tls_cert: str = ""
    """PEM file with the certificate chain; empty serves plain HTTP, which is for loopback and trusted networks."""
    tls_key: str = ""
    """PEM file with its private key."""
    max_production: int = Field(default=512, ge=1)
    """Production calls in progress."""
    max_rollouts: int = Field(default=512, ge=1)
    """Calls of rollouts in progress."""
    max_waiting: int = Field(default=1024, ge=0)
    """Calls of each class that may wait for a place before callers get 429."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest time of one call, waiting included; a caller may ask for less."""
    drain_s: float = Field(default=30.0, ge=0)
    """How long calls in flight may take once the gateway was told to stop."""
    engine_timeout_s: float = Field(default=30.0, gt=0)
    """How long a call waits for engines that are down before it fails as infrastructure."""
    max_body_mb: float = Field(default=16.0, gt=0)
    """Longer requests are refused unread; a context of a million tokens fits."""
    keys: str = ""
    """File with the keys of people and products (``etude keys``); empty knows the admin key and rollouts' only."""
    access_log: bool = False
    """Whether each call leaves a line of JSON; never what was said."""

    @property
    def max_body_bytes(self) -> int:
        """Of one request."""
        return int(self.max_body_mb * 2**20)

    @property
    def public(self) -> bool:
        """Whether others than this machine's processes are served."""
        return self.host not in ("127.0.0.1", "localhost", "::1") or bool(self.tls_cert)

    @model_validator(mode="after")
    def _both_halves(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ValueError(f"gateway.{missing} is missing: TLS needs a certificate and its key")
        return self


class TrainerConfig(Section):
    """``[trainer]``: the RL optimiser."""

    steps: int = Field(default=100, ge=1)
    """Optimiser steps."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """AdamW, after warm-up."""
    warmup_steps: int = Field(default=4, ge=1)
    """Linear warm-up."""
    decay_share: float = Field(default=0.4, ge=0, le=1)
    """Last share of the steps, over which the rate falls linearly to 5 %: the last policy is one that has settled."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Truncation of π_trainer / π_engine per token."""
    microbatch_tokens: int = Field(default=12_000, ge=64)
    """Padded tokens of one forward and backward pass."""
    mismatch_share: float = Field(default=0.1, ge=0, le=1)
    """Share of each batch's rollouts on which trainer and engine logprobs are compared."""
    threads: int = Field(default=1, ge=1)
    """CPU threads."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``."""


class EvalConfig(Section):
    """``[eval]``: the held-out measurement before and after."""

    enabled: bool = True
    """Whether a run measures at all; benches of throughput switch it off."""
    tasks: int = Field(default=256, ge=1)
    """Held-out tasks; each is tried once sampled at temperature 1 and once greedily."""


class RunConfig(Section):
    """A whole recipe."""

    name: str = Field(default="run", pattern=r"^[a-z0-9-]+$")
    """Names the run folder."""
    seed: int = Field(default=0, ge=0)
    """Seeds weights, data order, tasks and sampling."""
    tasks: TaskConfig = TaskConfig()
    """What is practised."""
    sandboxes: SandboxConfig = SandboxConfig()
    """Where it is practised."""
    cheating: CheatingConfig = CheatingConfig()
    """What is looked for in rollouts."""
    model: ModelConfig = ModelConfig()
    """Shape of the model."""
    midtrain: MidtrainConfig = MidtrainConfig()
    """From random weights to the start of RL."""
    transcripts: TranscriptConfig = TranscriptConfig()
    """The imperfect agent of mid-training."""
    harness: HarnessConfig = HarnessConfig()
    """Limits of a session."""
    rollouts: RolloutConfig = RolloutConfig()
    """Concurrency and staleness."""
    engine: EngineConfig = EngineConfig()
    """Inference."""
    numerics: NumericsConfig = NumericsConfig()
    """The numbers of both."""
    gateway: GatewayConfig = GatewayConfig()
    """The door to it."""
    trainer: TrainerConfig = TrainerConfig()
    """The RL optimiser."""
    eval: EvalConfig = EvalConfig()
    """The measurement."""

    @model_validator(mode="after")
    def _housed(self) -> Self:
        if self.tasks.family != "bugfix" and self.sandboxes.kind == "local":
            raise ValueError(
                f"tasks.family = {self.tasks.family!r} needs a machine around its files: set sandboxes.kind = 'ns'"
            )
        return self

    @model_validator(mode="after")
    def _measurable(self) -> Self:
        if self.harness.kind == "command":
            if self.harness.timeout_s >= self.rollouts.timeout_s:
                raise ValueError(
                    f"harness.timeout_s={self.harness.timeout_s:g} would have no effect: rollouts.timeout_s="
                    f"{self.rollouts.timeout_s:g} ends the rollout first; raise it"
                )
            if self.eval.enabled and not self.harness.fills("temperature"):
                raise ValueError(
                    "eval.enabled = true measures greedily, too, but harness.command has no {temperature}; add it, or "
                    "set eval.enabled = false"
                )
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe (a TOML file, or a folder with ``run.toml``) and apply ``section.key=value`` overrides in order.

    Raises :class:`~etude.errors.ConfigError` naming the key, the value and the fix.
    """
    file = path / "run.toml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"no recipe at {str(path)!r}: expected a TOML file or a folder with run.toml in it")
    try:
        tree: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    _read_harness_files(tree, file)
    return parse_config(tree, source=str(file))


def default_recipe(overrides: Sequence[str] = ()) -> RunConfig:
    """The defaults with ``section.key=value`` overrides. Raises like :func:`load_recipe`."""
    tree: dict[str, Any] = {}
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, source="--set")


def parse_config(tree: Mapping[str, Any], *, source: str) -> RunConfig:
    """Check a tree of plain values. Raises :class:`~etude.errors.ConfigError` with every fault found."""
    try:
        return RunConfig.model_validate(_tuples(dict(tree)))
    except ValidationError as error:
        faults = "\n  ".join(_explain(fault["loc"], fault["type"], fault["msg"], fault["input"])
                             for fault in error.errors())  # fmt: skip
        raise ConfigError(f"{source}:\n  {faults}") from error


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML that :func:`load_recipe` reads back to an equal value."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def _read_harness_files(tree: dict[str, Any], recipe: Path) -> None:
    """Replace ``"@NAME"`` in ``harness.files`` by text, so that a run holds all that decides it."""
    harness = tree.get("harness")
    files: Any = harness.get("files") if isinstance(harness, dict) else None
    if not isinstance(files, dict):
        return  # absent, or refused later
    for name, text in files.items():
        if isinstance(text, str) and text.startswith("@"):
            try:
                files[name] = (recipe.parent / text[1:]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{recipe}: harness.files.{name} = {text!r} cannot be read: {error}") from error


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: expected section.key=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
    node[leaf] = value


def _tuples(value: Any) -> Any:
    """TOML has arrays, frozen sections hold tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _explain(location: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in location)
    if kind != "extra_forbidden":
        message = message.removeprefix("Value error, ")
        return message if kind == "value_error" else f"{key} = {value!r}: {message}"
    known = _known_keys(location[:-1])
    nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.0)
    where = ".".join(str(part) for part in (*location[:-1], *nearest))
    return f"unknown key {key!r}: did you mean {where!r}?"


def _known_keys(parents: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for parent in parents:
        annotation = section.model_fields[str(parent)].annotation
        assert isinstance(annotation, type)
        section = annotation
    return list(section.model_fields)
