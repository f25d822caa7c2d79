"""``[harness]``, ``[rollouts]``: the agent program, the number of sessions, and their lead over the trainer."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, SerializeAsAny, model_validator

from etude.config.plugins import Registry
from etude.config.section import OptionsOf, Section

DEFAULT_CONCURRENCY = 128
"""Rollouts in flight where the bound on staleness allows as many."""
PLACEHOLDERS = ("prompt", "model", "temperature", "base_url", "workdir")
"""Placeholders in a harness's command and variables, written as ``{prompt}``."""
OF_CONTEXTS = ("summary_at_tokens", "summary_request", "max_tokens_per_summary", "max_summaries")
"""Options that decide when and how a new context starts."""
OF_SUMMARIES = ("summary_request", "max_tokens_per_summary")
"""The options among them about summaries."""


class CodingOptions(Section):
    """The built-in coding agent."""

    max_turns: int = Field(default=8, ge=1, le=4096)
    """Model calls per rollout, those for summaries included."""
    max_tokens_per_turn: int = Field(default=40, ge=4)
    """Sampled tokens per model call."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one model call, retries included."""
    find: bool = False
    """True if the agent has the tool ``find NAME``, which lists the task's files of that name."""
    usage: bool = False
    """True if the answer to a malformed call shows the syntax: ``bad call: edit FILE N``."""
    context: Literal["grow", "summary", "truncate"] = "grow"
    """Reaction to a full context. ``grow``: the rollout ends. ``summary``: a new context starts with the task and a
    summary that the model writes. ``truncate``, for comparison: a new context starts with the task and the last result.
    """
    summary_at_tokens: int = Field(default=0, ge=0)
    """Tokens of a context, up to the end of the last reply, at which it counts as full. The result of the last action,
    the request for a summary and the summary follow: leave room for them in ``engine.max_length``.
    """
    summary_request: str = Field(default="Please summarize the conversation.", min_length=1)
    """Text of the request for a summary, which follows the result of the last action."""
    max_tokens_per_summary: int = Field(default=256, ge=4)
    """Most sampled tokens of a summary; a longer one is truncated."""
    max_summaries: int = Field(default=64, ge=1)
    """Most new contexts of one rollout; the last one grows until it is full."""

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        idle = {"grow": OF_CONTEXTS, "truncate": OF_SUMMARIES, "summary": ()}[self.context]
        self.refuse_idle("harness.options", idle, f"with harness.options.context = {self.context!r}")
        if self.context != "grow" and not self.summary_at_tokens:
            raise ValueError(
                f"harness.options.context = {self.context!r} needs harness.options.summary_at_tokens: how full a "
                f"context may become"
            )
        return self


class CommandOptions(Section):
    """Any program that talks to a model over HTTP."""

    command: tuple[str, ...] = ()
    """The program and its arguments, run without a shell; placeholders such as ``{prompt}`` are filled in."""
    environment: dict[str, str] = Field(default={})
    """The program's environment variables, with the same placeholders. The variables by which OpenAI's and Anthropic's
    clients find a model are set as well.
    """
    files: dict[str, str] = Field(default={})
    """Files of the program, by name, mounted at ``/harness``; ``"@NAME"`` stands for the text of a file beside the
    recipe.
    """
    mounts: tuple[str, ...] = ()
    """Folders that are mounted read-only at their own paths; their ``bin`` is on the program's ``PATH``. With a virtual
    environment, its Python is mounted as well.
    """
    timeout_s: float = Field(default=240.0, gt=0)
    """Seconds that the program may take; then the rollout is graded as not submitted."""
    success_codes: tuple[int, ...] = (0,)
    """Exit codes that mean a submission. Any other is graded as not submitted."""

    def fills(self, placeholder: str) -> bool:
        """Return whether the command line or a variable takes ``placeholder``."""
        return any(f"{{{placeholder}}}" in text for text in (*self.command, *self.environment.values()))

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        command = "harness.options.command"
        if not self.command or "=" in self.command[0]:
            raise ValueError(f"{command} = {list(self.command)!r}: expected a program and its arguments")
        if not self.fills("prompt"):
            raise ValueError(f"{command} has no {{prompt}}: the harness would not know its task")
        for text in (*self.command, *self.environment.values()):
            for name in re.findall(r"\{([a-z_]+)\}", text):
                if name not in PLACEHOLDERS:
                    raise ValueError(f"{command}: {{{name}}} in {text!r} is none of {', '.join(PLACEHOLDERS)}")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"harness.options.environment: {name!r} is not a valid variable name")
        for name, text in self.files.items():
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or text.startswith("@"):
                raise ValueError(
                    f"harness.options.files: {name!r} must be a plain name, and its text must not start with '@'"
                )
        return self


class SingleTurnOptions(Section):
    """One call of the model, whose reply is the answer."""

    max_tokens_per_turn: int = Field(default=256, ge=1)
    """Most sampled tokens of the reply; a truncated reply is not an answer."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of the call, retries included."""
    system: str = ""
    """System message before each prompt; empty: none."""


class ShellOptions(Section):
    """An agent whose only tool is a shell, for any model that can write shell commands."""

    max_turns: int = Field(default=40, ge=1, le=4096)
    """Model calls per rollout."""
    max_tokens_per_turn: int = Field(default=2048, ge=16)
    """Sampled tokens per model call."""
    turn_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one model call, retries included."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one command may run; then it is killed, and the model is told."""


class VerifiersHarnessOptions(Section):
    """The agent of a ``verifiers`` environment."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that one rollout may take; one that takes longer is tried again."""


class OpenEnvHarnessOptions(Section):
    """A conversation with an OpenEnv environment."""

    max_steps: int = Field(default=50, ge=1)
    """Model calls after which a session ends."""
    max_tokens_per_turn: int = Field(default=256, ge=4)
    """Sampled tokens per answer."""
    turn_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one model call, retries included."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of each answer of the server, in seconds."""
    wait_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a rollout waits for a server whose sessions are all in use."""


HARNESSES = Registry(
    "harness.kind",
    "harness",
    {
        "coding": "etude.harnesses.coding:CodingHarness.open",
        "command": "etude.harnesses.command:CommandHarness.open",
        "verifiers": "etude.tasks.verifiers.harness:VerifiersHarness",
        "openenv": "etude.tasks.openenv:OpenEnvHarness",
        "single_turn": "etude.harnesses.single_turn:SingleTurnHarness.open",
        "shell": "etude.harnesses.shell:ShellHarness.open",
    },
)
"""Harnesses by name: each is called with its options and a :class:`~etude.harnesses.completions.HarnessContext`."""
HARNESS_OPTIONS = OptionsOf(
    "harness",
    "kind",
    {
        "coding": CodingOptions,
        "command": CommandOptions,
        "single_turn": SingleTurnOptions,
        "shell": ShellOptions,
        "verifiers": VerifiersHarnessOptions,
        "openenv": OpenEnvHarnessOptions,
    },
    names=HARNESSES,
)


class HarnessConfig(Section):
    """``[harness]``: the agent program around the model."""

    kind: Annotated[str, AfterValidator(HARNESSES)] = "coding"
    """``coding``: the built-in coding agent. ``shell``: an agent whose only tool is a shell, for models that were not
    trained for the first. ``command``: any program that talks to a model over HTTP. ``single_turn``: one call, whose
    reply is the answer. ``verifiers`` and ``openenv``: the default for the task families of those names. Or a harness
    of your own (``docs/extending.md``).
    """
    options: Annotated[SerializeAsAny[Section], PlainValidator(HARNESS_OPTIONS)] = Field(
        default_factory=Section, validate_default=True
    )
    """``[harness.options]``: limits of one session, and other keys of this kind."""


def _default_concurrency(section: Mapping[str, Any]) -> int:
    """Default number of rollouts in flight: no more than the other keys allow. A key with an invalid value is ignored
    here and refused later.
    """
    sizes: list[int] = [section.get(key, DEFAULT_CONCURRENCY) for key in ("groups_per_step", "group_size")]
    return min(DEFAULT_CONCURRENCY, math.prod(sizes) * (int(section.get("max_staleness", 0)) + 1))


class RolloutConfig(Section):
    """``[rollouts]``: the number of sessions, and the bound on their lead over the trainer."""

    groups_per_step: int = Field(default=16, ge=1)
    """Tasks per optimiser step (P)."""
    group_size: int = Field(default=8, ge=2, le=128)
    """Rollouts of each task (G)."""
    max_staleness: int = Field(default=2, ge=0)
    """Largest age of a trained token, in weight versions (O); 0 is strictly synchronous."""
    concurrency: int = Field(default_factory=_default_concurrency, ge=1)
    """Rollouts in flight (C). By default fewer than 128 if the staleness bound admits fewer: (O + 1) · P · G."""
    max_attempts: int = Field(default=4, ge=1)
    """Attempts for one rollout slot before it counts as lost to infrastructure; a group that loses more than half of
    its rollouts is dropped.
    """
    max_resamples: int = Field(default=0, ge=0)
    """Groups without a signal (all rewards equal) that may be dropped between two batches and replaced by new groups;
    0: they count as groups of their step.
    """
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that all commands of one agent may take together; then its work so far is graded. Waiting for the model
    is not counted: ``[harness]`` limits the sampled tokens.
    """
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for opening a session and for making a sandbox. A missed deadline is an infrastructure failure, as are
    the deadlines of the keys below.
    """
    silence_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a call to the sandbox after which a harness counts as hung. The built-in harness always gets at
    least the time of all its model calls.
    """
    grading_timeout_s: float = Field(default=900.0, gt=0)
    """Seconds that one grading may take beyond the limits of its task's verifier or tests: for making sandboxes, and
    for slow machines.
    """
    outage_s: float = Field(default=300.0, gt=0)
    """Seconds that a finished rollout waits for an unreachable judge, and an evaluation for an unreachable gateway."""
    max_outage_s: float = Field(default=0.0, ge=0)
    """Seconds without a successful rollout, while rollouts are tried, after which the run ends and says why. 0: it
    never ends for this reason; it reports what is unreachable and since when, waits, and continues by itself. Before
    the first rollout has succeeded, a minute is enough. The same limit holds for an unreachable weight store.
    """

    @property
    def rollouts_per_step(self) -> int:
        """B = P·G."""
        return self.groups_per_step * self.group_size

    @model_validator(mode="after")
    def _check_concurrency(self) -> Self:
        if self.concurrency < self.group_size:
            raise ValueError(f"concurrency={self.concurrency} is below group_size={self.group_size}: no group starts")
        window = (self.max_staleness + 1) * self.rollouts_per_step
        if self.concurrency > window:
            raise ValueError(
                f"concurrency={self.concurrency} would have no effect beyond {window} = (max_staleness + 1) * "
                f"groups_per_step * group_size; lower it or raise max_staleness"
            )
        return self
