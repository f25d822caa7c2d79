"""Every key of a recipe, one frozen section per stage.

A recipe is a TOML file with these sections; unknown keys, wrong types and out-of-range values are refused with a
message that names the key and the one closest to it. ``etude config`` explains them, ``etude run RECIPE --dry-run``
prints all keys with their resolved values.
A stage receives its own section, never the tree.
"""

from typing import Self, cast
from urllib.parse import unquote, urlsplit

from pydantic import Field, model_validator

from etude.config.credit import CreditConfig
from etude.config.feedback import FeedbackConfig
from etude.config.hints import HintsConfig
from etude.config.imitation import MidtrainConfig, SftConfig
from etude.config.inference import EngineConfig, GatewayConfig, NativeOptions, NumericsConfig
from etude.config.judge import JudgeConfig
from etude.config.live import LiveConfig
from etude.config.log import AlertConfig, LogConfig, check_alerts
from etude.config.lora import LoraConfig
from etude.config.placement import PlacementConfig
from etude.config.release import ReleaseConfig
from etude.config.reward import RewardConfig
from etude.config.rollouts import CodingOptions, CommandOptions, HarnessConfig, RolloutConfig, SingleTurnOptions
from etude.config.section import Section
from etude.config.tasks import (
    ANSWER_FAMILIES,
    BUILTIN_TOOL_OPTIONS,
    FAMILIES,
    MACHINE_FAMILIES,
    MIXED_FAMILIES,
    THIRD_PARTY_FAMILIES,
    BugfixOptions,
    CheatingConfig,
    DatasetOptions,
    SandboxConfig,
    TaskConfig,
)
from etude.config.training import EffortConfig, LossConfig, ModelConfig, OptimiserConfig, ParallelConfig, TrainerConfig


class LedgerConfig(Section):
    """``[ledger]``: the database of a run's durable state, and how long its processes wait for it."""

    url: str = ""
    """``postgresql://USER@HOST:PORT/DATABASE``, in which each run gets its own schema; empty: ``ledger.db`` in the run
    folder. Passwords belong into ``PGPASSWORD`` or ``~/.pgpass``, never in here.
    """
    retry_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which a process retries while its database is locked, full, restarting or unreachable."""
    lease_s: float = Field(default=20.0, gt=0)
    """Seconds of silence after which another process may take over a lease."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if not self.url:
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("ledger.url: expected postgresql://USER@HOST:PORT/DATABASE, or nothing for ledger.db")
        if parts.password is not None or "password" in unquote(parts.query).lower():
            raise ValueError(
                "ledger.url has a password in it, which would be written into the run folder: take it out and put it "
                "into PGPASSWORD or ~/.pgpass"
            )
        if parts.fragment:
            raise ValueError("ledger.url names a schema after '#': leave it out, every run gets one of its own")
        return self


class EvalConfig(Section):
    """``[eval]``: held-out evaluations, before and after each phase and during it."""

    enabled: bool = True
    """True if the run evaluates at all; throughput benches switch it off."""
    tasks: int = Field(default=256, ge=1)
    """Held-out tasks, or all there are, with equal shares of templates; each is tried once sampled at temperature 1 and
    once greedily.
    """
    pass_at: float = Field(default=1.0, gt=0)
    """Reward from which a task counts as passed; lower it for tasks that pay fractions. It decides only what is *shown*
    as passed or solved; training uses rewards.
    """
    every_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations during RL; 0: only before and after."""
    loss_every_steps: int = Field(default=0, ge=0)
    """Steps between two measurements of the held-out loss during mid-training and SFT; 0: only before and after."""
    heldout_every: int = Field(default=20, ge=2)
    """Holdout ratio: one text file, module or conversation in this many is held out, by its hash."""


OF_TURNS = ("mean", "leave_one_out")
"""Baselines that values of single turns are compared by, too."""
ROUNDING = 1e-9
"""By which a sum of a grader's fractions may miss what it stands for."""


def is_pass(graded: float, pass_at: float) -> bool:
    """True for a grader's word that is a pass, by ``eval.pass_at``."""
    return graded >= pass_at - ROUNDING


class RunConfig(Section):
    """A whole recipe."""

    name: str = Field(default="run", pattern=r"^[a-z0-9-]+$")
    """Names the run folder."""
    seed: int = Field(default=0, ge=0)
    """Seeds weights, data order, tasks and sampling."""
    heartbeat_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds without a sign of life after which a process is killed and started again. A trainer gives one with every
    micro-batch, the others with every turn of their event loop and every try to reach the weight store; writing a
    checkpoint must fit in. An hour is allowed before the first sign.
    """
    tasks: TaskConfig = TaskConfig()
    """The tasks."""
    sandboxes: SandboxConfig = SandboxConfig()
    """The sandboxes."""
    cheating: CheatingConfig = CheatingConfig()
    """Signs of cheating in rollouts, and what follows."""
    model: ModelConfig = ModelConfig()
    """Shape of the model."""
    midtrain: MidtrainConfig = MidtrainConfig()
    """From random weights to the start of RL."""
    sft: SftConfig = SftConfig()
    """Conversations to imitate after it."""
    harness: HarnessConfig = HarnessConfig()
    """Driver of the model, and the limits of a session."""
    rollouts: RolloutConfig = RolloutConfig()
    """Concurrency and staleness."""
    engine: EngineConfig = EngineConfig()
    """Inference."""
    numerics: NumericsConfig = NumericsConfig()
    """The numbers of both."""
    gateway: GatewayConfig = GatewayConfig()
    """The HTTP API in front of it."""
    loss: LossConfig = LossConfig()
    """The loss."""
    credit: CreditConfig = CreditConfig()
    """Credit assignment over the turns of a rollout."""
    reward: RewardConfig = RewardConfig()
    """The parts of the reward."""
    effort: EffortConfig = EffortConfig()
    """The effort penalty."""
    hints: HintsConfig = HintsConfig()
    """Hints for single turns."""
    judge: JudgeConfig = JudgeConfig()
    """The judge of aspects that no program can grade."""
    trainer: TrainerConfig = TrainerConfig()
    """The RL optimiser."""
    lora: LoraConfig = LoraConfig()
    """Adapters that are trained instead of the weights."""
    optimiser: OptimiserConfig = OptimiserConfig()
    """The optimiser of every phase."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks that take its steps together."""
    placement: PlacementConfig = PlacementConfig()
    """The GPUs of each process."""
    log: LogConfig = LogConfig()
    """Sinks: trackers, Prometheus, traces."""
    alerts: tuple[AlertConfig, ...] = ()
    """``[[alerts]]``: rules of what is told at once."""
    ledger: LedgerConfig = LedgerConfig()
    """Its durable state."""
    eval: EvalConfig = EvalConfig()
    """The measurement."""
    feedback: FeedbackConfig = FeedbackConfig()
    """Signals of users."""
    live: LiveConfig = LiveConfig()
    """Learning from them."""
    release: ReleaseConfig = ReleaseConfig()
    """The way of a version to users."""

    @model_validator(mode="before")
    @classmethod
    def _default_harness(cls, tree: object) -> object:
        """A third-party environment's harness is the one of its name, unless the recipe says otherwise."""
        tasks, harness = (tree.get(name, {}) for name in ("tasks", "harness")) if isinstance(tree, dict) else ({}, {})
        if isinstance(tasks, dict) and isinstance(harness, dict) and tasks.get("family") in THIRD_PARTY_FAMILIES:
            return {**cast("dict[str, object]", tree), "harness": {"kind": tasks["family"], **harness}}
        return tree

    @model_validator(mode="after")
    def _check_alerts(self) -> Self:
        check_alerts(self.alerts)
        return self

    @model_validator(mode="after")
    def _check_third_party(self) -> Self:
        family, kind = self.tasks.family, self.harness.kind
        if (family in THIRD_PARTY_FAMILIES or kind in THIRD_PARTY_FAMILIES) and family != kind:
            raise ValueError(
                f"harness.kind = {kind!r} does not go with tasks.family = {family!r}: the harnesses "
                f"{' and '.join(map(repr, THIRD_PARTY_FAMILIES))} and the families of these names belong "
                f"together; leave harness.kind out"
            )
        if family in THIRD_PARTY_FAMILIES:
            self.cheating.refuse_idle(
                "cheating", ["honeypots"], f"with tasks.family = {family!r}, whose agents never see a sandbox of ours"
            )
        return self

    @model_validator(mode="after")
    def _check_midtrain(self) -> Self:
        if self.model.checkpoint and not {"tokens", "mixture"} & self.midtrain.model_fields_set:
            raise ValueError(
                f"model.checkpoint is set and midtrain.tokens is not: mid-training on {self.midtrain.tokens} tokens "
                f"would change that model. Set midtrain.tokens = 0 to start RL from it, or the number of tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_loss_evaluations(self) -> Self:
        if self.eval.loss_every_steps and not (self.midtrain.tokens or self.sft.file):
            raise ValueError(
                f"eval.loss_every_steps = {self.eval.loss_every_steps} would have no effect with midtrain.tokens = 0 "
                f"and without sft.file: leave it out; eval.every_steps is that of RL"
            )
        return self

    @model_validator(mode="after")
    def _check_sandboxes(self) -> Self:
        if self.tasks.family in MACHINE_FAMILIES and self.sandboxes.kind == "local":
            raise ValueError(
                f"tasks.family = {self.tasks.family!r} needs a machine around its files: set sandboxes.kind = 'ns'"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        check_impl(self)
        check_adapters(self)
        if self.engine.kind != "native" and self.numerics.experts != "plain":
            raise ValueError(
                f"numerics.experts = {self.numerics.experts!r} with engine.kind = {self.engine.kind!r}, which loads "
                f"plain experts only: leave engine.kind out, or set numerics.experts = 'plain'"
            )
        check_drafts(self)
        check_sharding(self)
        return self

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        if self.tasks.family in ANSWER_FAMILIES and self.harness.kind in ("command", "shell"):
            raise ValueError(
                f"tasks.family = {self.tasks.family!r} asks for an answer, which harness.kind = {self.harness.kind!r} "
                f"has no way to give: leave harness.kind out"
            )
        options, single = self.tasks.options, isinstance(self.harness.options, SingleTurnOptions)
        if (
            single
            and self.tasks.family in FAMILIES.builtins
            and self.tasks.family not in (*ANSWER_FAMILIES, *MIXED_FAMILIES)
        ):
            raise ValueError(
                f"harness.kind = 'single_turn' can answer and change no file, which tasks.family = "
                f"{self.tasks.family!r} asks for: set harness.kind = 'coding'"
            )
        if isinstance(options, DatasetOptions) and options.messages and not single:
            raise ValueError(
                f"tasks.options.messages begins with a conversation, which harness.kind = {self.harness.kind!r} cannot "
                f"take up: set harness.kind = 'single_turn', or name a column of prompts"
            )
        return self

    @model_validator(mode="after")
    def _check_rubrics(self) -> Self:
        for aspect in self.reward.names("judge"):
            if aspect not in self.judge.rubrics:
                raise ValueError(f"reward.parts: there is no judge.rubrics.{aspect}: write one, or leave the part out")
        return self

    @model_validator(mode="after")
    def _check_old_policy(self) -> Self:
        if self.loss.correction == "decoupled" and self.rollouts.max_staleness < 2:
            raise ValueError(
                f"loss.correction = 'decoupled' would have no effect with rollouts.max_staleness = "
                f"{self.rollouts.max_staleness}: a policy between the engine's and the trainer's needs 2 at least"
            )
        if self.loss.old_policy == "recomputed" and not self.rollouts.max_staleness:
            raise ValueError(
                "loss.options.old_policy = 'recomputed' would have no effect with rollouts.max_staleness = 0: all "
                "tokens are of the policy that is trained, and nothing is clipped; set loss.kind = 'policy_gradient'"
            )
        return self

    @model_validator(mode="after")
    def _check_credit(self) -> Self:
        credit, size = self.credit, self.rollouts.group_size
        if credit.is_by_turn and self.loss.baseline not in OF_TURNS:
            raise ValueError(
                f"credit.kind = {credit.kind!r} does not go with loss.baseline = {self.loss.baseline!r} (loss.kind = "
                f"{self.loss.kind!r}), which looks at the rewards of whole rollouts: values of single turns have "
                f"others; set loss.baseline to one of {', '.join(OF_TURNS)}"
            )
        if credit.branches > 1 and (size % credit.branches or size == credit.branches):
            raise ValueError(
                f"credit.options.branches = {credit.branches} must divide rollouts.group_size = {size} and be below "
                f"it: what all rollouts of a group share has nothing to be compared with"
            )
        by_signals = credit.kind == "shaped" and self.feedback.reward.is_by_turn
        if credit.kind in ("shaped", "shared_prefix") and self.harness.kind != "coding" and not by_signals:
            raise ValueError(
                f"credit.kind = {credit.kind!r} needs the built-in harness, whose turns can be judged one by one and "
                f"replayed: set harness.kind = 'coding' or choose another kind"
            )
        harness = self.harness.options
        if credit.summaries == "mask" and isinstance(harness, CodingOptions) and harness.context != "summary":
            raise ValueError("credit.summaries = 'mask' would have no effect: no context of harness.options.context = "
                             f"{harness.context!r} is ever summarised; leave it out")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_resampling(self) -> Self:
        others = {
            f"credit.kind = {self.credit.kind!r}": self.credit.is_by_turn,
            "effort.weight": self.effort.weight > 0,
            "loss.reference_beta": self.loss.reference_beta > 0,
            "hints.weight": self.hints.weight > 0,
        }
        teaching = [name for name, teaches in others.items() if teaches]
        if self.rollouts.max_resamples and teaching:
            raise ValueError(
                f"rollouts.max_resamples = {self.rollouts.max_resamples} leaves out groups with equal rewards, but "
                f"{teaching[0]} teaches from these, too: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _check_shuffled_rewards(self) -> Self:
        others = {
            "credit.kind = 'shaped'": self.credit.kind == "shaped",
            "effort.weight": self.effort.weight > 0,
            "hints.weight": self.hints.weight > 0,
        }
        teaching = [name for name, teaches in others.items() if teaches]
        if self.reward.shuffled and teaching:
            raise ValueError(
                f"reward.shuffled = true is a control in which nothing can be learnt, but {teaching[0]} "
                f"teaches without the rewards that are shuffled: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _check_live(self) -> Self:
        _check_learning_signal(self)
        if self.live.groups_per_step:
            _check_live_conflicts(self)
        return self

    @model_validator(mode="after")
    def _check_hints(self) -> Self:
        if self.hints.judge and self.judge.kind != "model":
            raise ValueError("hints.judge = true needs a model that can be asked: set judge.kind = 'model'")
        return self

    @model_validator(mode="after")
    def _check_demonstrations(self) -> Self:
        if self.harness.kind != "coding" and isinstance(self.tasks.options, BugfixOptions):
            self.tasks.options.refuse_idle(
                "tasks.options",
                BUILTIN_TOOL_OPTIONS,
                f"with harness.kind = {self.harness.kind!r}, which has other tools",
            )
        harness, tasks = self.harness.options, self.tasks.options
        shows_search = isinstance(tasks, BugfixOptions) and tasks.search > 0
        if shows_search and isinstance(harness, CodingOptions) and not harness.find:
            raise ValueError(
                "tasks.options.search shows a tool that the agent does not have: set harness.options.find = true, or "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_summaries(self) -> Self:
        harness, max_length = self.harness.options, self.engine.max_length
        if not isinstance(harness, CodingOptions):
            return self
        summary = harness.max_tokens_per_summary if harness.context == "summary" else 0
        if harness.context != "grow" and harness.summary_at_tokens + summary >= max_length:
            raise ValueError(
                f"harness.options.summary_at_tokens={harness.summary_at_tokens} and a summary of {summary} tokens do "
                f"not fit into engine.max_length={max_length}: no context would ever start anew; lower one of them"
            )
        if self.gateway.summary_mark:
            raise ValueError(
                "gateway.summary_mark would have no effect: the built-in harness says by itself which call is for a "
                "summary; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_measurements(self) -> Self:
        harness = self.harness.options
        if isinstance(harness, CommandOptions):
            self._check_external(harness)
        if isinstance(harness, CommandOptions | SingleTurnOptions):
            self._check_conduct()
        return self

    def _check_conduct(self) -> None:
        """Behaviours that only the built-in harness has something to say of."""
        kind = self.harness.kind
        if "calls" in self.effort.prices:
            raise ValueError(f"effort.prices.calls would have no effect: harness.kind = {kind!r} counts no calls")
        if self.reward.of_harness:
            raise ValueError(
                f"reward.parts: source = {self.reward.of_harness[0]!r} would always be missing: harness.kind = "
                f"{kind!r} counts nothing; leave the part out, or set harness.kind = 'coding'"
            )
        if self.hints.weight and not (self.hints.rules or self.hints.judge):
            raise ValueError(
                f"hints.weight would have no effect: hints.tools is about the built-in tools, which harness.kind = "
                f"{kind!r} does not have; add hints.rules, or set hints.judge = true"
            )

    def _check_external(self, harness: CommandOptions) -> None:
        """Limits of an agent that runs by itself, and the ways in which it is measured."""
        if harness.timeout_s >= self.rollouts.timeout_s:
            raise ValueError(
                f"harness.options.timeout_s={harness.timeout_s:g} would have no effect: rollouts.timeout_s="
                f"{self.rollouts.timeout_s:g} ends the rollout first; raise it"
            )
        if self.eval.enabled and not harness.fills("temperature"):
            raise ValueError(
                "eval.enabled = true measures greedily, too, but harness.options.command has no {temperature}; add it, "
                "or set eval.enabled = false"
            )


def check_impl(config: RunConfig) -> None:
    """Raise ``ValueError`` for what does not go with a model that transformers computes."""
    if config.model.impl != "hf":
        return
    arguments = getattr(config.engine.options, "arguments", {})
    faults = {
        "engine.kind = 'native', which has étude's own families alone: set 'vllm' or 'sglang'":
            config.engine.kind == "native",
        "an empty model.checkpoint: name the folder of one": not config.model.checkpoint,
        "engine.options.arguments.trust-remote-code: code of a checkpoint is never run; leave it out":
            "trust-remote-code" in arguments,
        f"optimiser.kind = {config.optimiser.kind!r}, which knows étude's own matrices: set 'adamw'":
            config.optimiser.kind != "adamw",
        "parallel.cp and parallel.ep above 1, which split étude's own layers: leave them out, raise parallel.dp":
            config.parallel.cp > 1 or config.parallel.ep > 1,
        "numerics.arithmetic = 'invariant', which is étude's own: leave it out":
            config.numerics.arithmetic == "invariant",
        f"numerics.replay = {config.numerics.replay!r}: transformers' routers cannot be told; set 'off'":
            config.numerics.replay not in ("auto", "off"),
        "lora.rank, whose adapters are for étude's own layers: leave [lora] out, all weights are trained":
            bool(config.lora.rank),
    }  # fmt: skip
    for fault, is_there in faults.items():
        if is_there:
            raise ValueError(f"model.impl = 'hf' does not go with {fault}")


def has_drafts(config: RunConfig) -> bool:
    """True if the recipe's model has a draft head."""
    return bool(config.loss.draft_learning_rate or config.engine.draft_tokens)


def check_sharding(config: RunConfig) -> None:
    """Raise ``ValueError`` for a choice of sharding that has no effect."""
    if config.parallel.sharding != "full" and most_ranks(config) == 1:
        raise ValueError(
            f"parallel.sharding = {config.parallel.sharding!r} would have no effect on one rank: leave it out, or "
            f"raise parallel.dp or parallel.imitation_dp"
        )


def most_ranks(config: RunConfig) -> int:
    """The most ranks that any phase has."""
    return max(config.parallel.ranks, config.parallel.imitation.ranks)


def check_drafts(config: RunConfig) -> None:
    """Raise ``ValueError`` for a draft head that could not be served, trained or right."""
    if not has_drafts(config):
        return
    key = "loss.draft_learning_rate" if config.loss.draft_learning_rate else "engine.options.draft_tokens"
    if not isinstance(config.engine.options, NativeOptions):
        raise ValueError(
            f"{key} with engine.kind = {config.engine.kind!r}, which would not know a draft head in its weights: leave "
            f"it out; what vLLM has is engine.options.arguments.speculative-config"
        )
    if (config.model.checkpoint and most_ranks(config) > 1) or config.parallel.ranks > 1:
        raise ValueError(
            f"{key} gives the model a draft head, which is not sharded over {most_ranks(config)} ranks: leave it "
            f"out, or parallel.dp, parallel.cp and parallel.imitation_dp"
        )
    if config.lora.rank and "rl" in config.lora.phases:
        raise ValueError(
            f"{key} gives the model a draft head, which would be frozen with the base of lora.rank = "
            f"{config.lora.rank} and not know its adapters: leave it out, or 'rl' out of lora.phases"
        )
    if not config.model.checkpoint and not config.loss.draft_learning_rate:
        raise ValueError(
            "engine.options.draft_tokens with random weights, whose draft head nothing trains: set "
            "loss.draft_learning_rate"
        )


def check_adapters(config: RunConfig) -> None:
    """Raise ``ValueError`` for what ``[lora]`` does not go with."""
    if not config.lora.rank:
        return
    is_random = not config.model.checkpoint
    first = "midtrain" if config.midtrain.tokens else "sft" if config.sft.file else "rl"
    refused = {
        f"lora.phases with {first!r} would adapt random weights that are never trained: set model.checkpoint, or "
        f"lora.phases to later phases": is_random and first in config.lora.phases,
        f"{most_ranks(config)} ranks: adapters are trained by one process; leave [parallel] out": most_ranks(config)
        > 1,
        "optimiser.kind = 'muon' is for whole matrices, not for their factors: leave it out": (
            config.optimiser.kind == "muon"
        ),
        f"engine.kind = {config.engine.kind!r} cannot load adapters while it serves: set 'native' or 'vllm'": (
            config.engine.kind not in ("native", "vllm") and "rl" in config.lora.phases
        ),
    }
    if reasons := [reason for reason, is_so in refused.items() if is_so]:
        raise ValueError(f"lora.rank = {config.lora.rank} does not go with {reasons[0]}")


def _check_learning_signal(config: RunConfig) -> None:
    """Live sessions, and rewards of single turns, need something to learn from, and a step to learn in."""
    parts, live = config.feedback.reward.parts, config.live
    by_turn = next((part.name for part in parts if part.per == "turn"), "")
    if by_turn and config.credit.kind != "shaped":
        raise ValueError(
            f"feedback.reward.parts: {by_turn!r} is about single turns, and credit.kind = {config.credit.kind!r} "
            f"gives all turns the same: set credit.kind = 'shaped', or per = 'session'"
        )
    if not live.groups_per_step:
        return
    if not parts:
        raise ValueError(
            f"live.groups_per_step = {live.groups_per_step} has nothing to learn from: say in "
            f"[[feedback.reward.parts]] what a session is worth"
        )
    if live.after_steps >= config.trainer.steps:
        raise ValueError(
            f"live.after_steps = {live.after_steps} leaves no step of trainer.steps = {config.trainer.steps} to live "
            f"sessions: lower it"
        )


def _check_live_conflicts(config: RunConfig) -> None:
    """Settings that do not go with live sessions."""
    release_every, most_ahead = config.release.every_steps, config.rollouts.max_staleness + 1
    if release_every > most_ahead:
        raise ValueError(
            f"release.every_steps = {release_every} is above rollouts.max_staleness + 1 = {most_ahead}, the steps "
            f"by which the trainer may be ahead of what users have: it would wait for a candidate for ever. Lower "
            f"release.every_steps, or raise rollouts.max_staleness"
        )
    alone = {
        "loss.baseline = 'mean_std' (set 'mean' or 'leave_one_out')": config.loss.baseline == "mean_std",
        "rollouts.max_resamples (leave it out)": config.rollouts.max_resamples > 0,
        "credit.kind = 'shared_prefix' (set another)": config.credit.kind == "shared_prefix",
        "reward.shuffled (leave it out)": config.reward.shuffled,
    }
    compares = [name for name, is_set in alone.items() if is_set]
    if compares:
        raise ValueError(
            f"live.groups_per_step = {config.live.groups_per_step}: a live session is a group of one, and "
            f"{compares[0]} needs the other rollouts of a group"
        )
    if config.trainer.checkpoint_steps > 1:
        raise ValueError(
            f"trainer.checkpoint_steps = {config.trainer.checkpoint_steps} does not go with live sessions: a step "
            f"that may have to be done again cannot forget a user's session; leave it out"
        )
    if config.loss.old_policy == "recomputed":
        raise ValueError(
            "loss.options.old_policy = 'recomputed' does not go with live sessions: after a rollback some are of "
            "weights that the trainer no longer has; set loss.options.old_policy = 'engine'"
        )
