"""``task.toml`` of a Harbor task: supported keys, refused keys, and error messages.

Every key of the format is listed here. A supported key is a field. A key that would change the meaning of the task, and
that sandboxes do not support, is refused by name if it is used. ``[metadata]`` and ``[task]`` are carried unchanged.
Nothing is ignored silently. Reads text, not folders (:mod:`etude.tasks.harbor.folder`).

The format: https://harborframework.com/docs/tasks, as in ``harbor.models.task.config`` of release 0.25.
"""

import re
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from etude.config.section import Section
from etude.errors import UserError
from etude.sandbox_spec import Healthcheck, SandboxLimits

PROCESSES = 512
"""Process limit of one sandbox; Harbor has neither a key nor a limit for it."""
WEB_PORTS = (443, 80)
"""Ports of each host on Harbor's allow list, whose entries have no port."""
MIB = 1 << 20
SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])", re.IGNORECASE)
"""A size in older tasks: ``memory = "2G"``."""
SIZE_UNITS: Mapping[str, float] = MappingProxyType({"K": 1 / 1024, "M": 1.0, "G": 1024.0})
"""Unit → its size in MiB."""
HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.IGNORECASE)
TEMPLATE = re.compile(r"(?<!\$)\$\{(\w+)(?::-([^}]*))?\}")
"""``${NAME}`` and ``${NAME:-default}`` in the values of variables."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "steps": "a task of several steps is several tasks here: write a folder for each",
        "multi_step_reward_strategy": "a task of several steps is several tasks here: write a folder for each",
        "environment.gpus": "sandboxes have no GPU",
        "environment.gpu_types": "sandboxes have no GPU",
        "environment.tpu": "sandboxes have no TPU",
        "environment.mcp_servers": "agents of étude have the tools of their harness only",
        "environment.skills_dir": "agents of étude have the tools of their harness only",
        "verifier.collect": "nothing runs in the agent's sandbox once it is done: declare files in artifacts",
        "verifier.environment": "the verifier has a fresh copy of the task's own image: install its programs there",
        "verifier.network_mode": "the verifier may reach what the environment may reach",
        "verifier.allowed_hosts": "the verifier may reach what the environment may reach",
        "agent.network_mode": "the agent may reach what the environment may reach",
        "agent.allowed_hosts": "the agent may reach what the environment may reach",
    }
)
"""Keys that change the meaning of a task in an unsupported way → fix."""
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "source": "carried",
        "task": "carried; task.name is the name of the task",
        "metadata": "carried; metadata.etude is étude's own table",
        "artifacts.source": "in part: below the working folder, of which alone the agent is the owner",
        "artifacts.destination": "carried: a folder of the machine that Harbor runs on",
        "artifacts.exclude": "in part: empty",
        "artifacts.service": "in part: main",
        "verifier.user": "in part: root, in a sandbox of its own",
        "verifier.environment_mode": "in part: always apart; for shared with the agent's whole working folder",
        "verifier.env": "in part: values and defaults, no variable of the machine",
        "agent.timeout_sec": "in part: of a solution that is checked; a harness has its own",
        "agent.user": "in part: any but root; else the image's USER, and agent where that is root",
        "environment.docker_image": "by tag or digest; not read where there is a Dockerfile",
        "environment.os": "in part: linux",
        "environment.env": "in part: values and defaults, no variable of the machine",
        "environment.network_mode": "in part: no network unless said; public for folders that are read as offline",
        "environment.allowed_hosts": "in part: whole names, at ports 80 and 443",
        "environment.memory_mb": "also as memory",
        "environment.storage_mb": "also as storage",
        "environment.healthcheck.start_interval_sec": "tried every half second at least",
        "solution.env": "in part: values and defaults, no variable of the machine",
    }
)
"""Limits or purposes of supported keys that are not obvious from their names."""


class TaskFolderError(UserError):
    """A task folder is invalid or needs an unsupported feature; the message names file, key, value and fix."""


class ArtifactSettings(Section):
    """``[[artifacts]]``: a file of the agent that the verifier needs."""

    source: str
    """Path in the agent's sandbox."""
    destination: str | None = None
    """Folder on the machine in which Harbor keeps a copy; the verifier sees ``source``, so this has no effect here."""
    exclude: tuple[str, ...] = Field(default=(), max_length=0)
    """Unsupported: declare the needed files instead."""
    service: Literal["main"] | None = None
    """Only the agent's own service is supported."""


class VerifierSettings(Section):
    """``[verifier]``: how the verifier is run."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: Literal["root", 0] | None = None
    """The verifier is root in a sandbox of its own."""
    environment_mode: Literal["shared", "separate"] | None = None
    """Verifiers are always separate. One that was written for ``shared`` (Harbor's default) finds the agent's whole
    working folder in its sandbox, but no changes that the agent made elsewhere.
    """


class AgentSettings(Section):
    """``[agent]``: how the agent is run."""

    timeout_sec: float | None = Field(default=None, gt=0)
    """Advice for the harness's configuration; a task of étude has no deadline of its own."""
    user: str | int | None = None
    """A user of the image, or ``agent``; agents are never root."""

    @field_validator("user")
    @classmethod
    def _is_not_root(cls, user: str | int | None) -> str | int | None:
        if str(user).partition(":")[0] in ("root", "0"):
            raise ValueError("agents are never root: name a user of the image, or leave it out")
        return user


class HealthcheckSettings(Section):
    """``[environment.healthcheck]``: a command that succeeds as soon as the agent may start."""

    command: str
    interval_sec: float = Field(default=5.0, gt=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, gt=0)
    """Sandboxes try every half second at least."""
    retries: int = Field(default=3, gt=0)

    @property
    def check(self) -> Healthcheck:
        """The health check of a sandbox."""
        return Healthcheck(
            argv=("sh", "-c", self.command),
            interval_s=self.interval_sec,
            timeout_s=self.timeout_sec,
            start_period_s=self.start_period_sec,
            retries=self.retries,
        )


class EnvironmentSettings(Section):
    """``[environment]``: the agent's sandbox."""

    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float = Field(default=1.0, gt=0)
    memory_mb: int = Field(default=2048, gt=0)
    storage_mb: int = Field(default=10240, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    healthcheck: HealthcheckSettings | None = None
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    """``None`` means no network: the image contains what a task needs."""
    allowed_hosts: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _modernise(cls, tree: Any) -> Any:
        """Convert the old keys ``memory``, ``storage`` and ``allow_internet``."""
        if not isinstance(tree, dict):
            return tree
        tree = dict(tree)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in tree:
                size = SIZE.fullmatch(str(tree.pop(old)))
                if size is None or new in tree:
                    raise ValueError(f"{old} is the old name of {new}: keep one of them, such as {new} = 2048")
                tree[new] = int(float(size[1]) * SIZE_UNITS[size[2].upper()])
        if "allow_internet" in tree:
            allowed = tree.pop("allow_internet")
            tree.setdefault("network_mode", "public" if allowed else "no-network")
        if isinstance(tree.get("os"), str):
            tree["os"] = tree["os"].lower()
        return tree

    @field_validator("allowed_hosts")
    @classmethod
    def _plain_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [host for host in hosts if not HOST.fullmatch(host)]
        if wrong:
            raise ValueError(f"{wrong} are not plain host names: write each host out, without wildcards or ranges")
        return hosts

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if (self.network_mode == "allowlist") != bool(self.allowed_hosts):
            raise ValueError("allowed_hosts goes with network_mode = 'allowlist', and only with it")
        return self

    @property
    def limits(self) -> SandboxLimits:
        """The limits of a sandbox."""
        return SandboxLimits(
            memory_bytes=self.memory_mb * MIB,
            disk_bytes=self.storage_mb * MIB,
            processes=PROCESSES,
            cpus=self.cpus,
        )

    @property
    def allow(self) -> tuple[str, ...]:
        """``host:port`` that commands may reach."""
        return tuple(f"{host}:{port}" for host in self.allowed_hosts for port in WEB_PORTS)


class SolutionSettings(Section):
    """``[solution]``: how the reference solution is run."""

    env: dict[str, str] = Field(default_factory=dict)


class TaskSettings(Section):
    """The supported keys of ``task.toml``."""

    schema_version: str = Field(default="1.0", pattern=r"1\.\d+")
    source: str | None = None
    """Origin of the task, for people."""
    task: dict[str, Any] = Field(default_factory=dict)
    """``[task]``: name, version, authors, keywords; carried."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """``[metadata]``: carried."""
    artifacts: tuple[ArtifactSettings, ...] = ()
    verifier: VerifierSettings = VerifierSettings()
    agent: AgentSettings = AgentSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    solution: SolutionSettings = SolutionSettings()

    @model_validator(mode="before")
    @classmethod
    def _modernise(cls, tree: Any) -> Any:
        """Convert the old key ``version`` to ``schema_version``, and artefacts that are only a path to tables."""
        if not isinstance(tree, dict):
            return tree
        tree = dict(tree)
        if "version" in tree:
            tree.setdefault("schema_version", tree.pop("version"))
        entries = tree.get("artifacts")
        if isinstance(entries, tuple):
            tree["artifacts"] = tuple({"source": entry} if isinstance(entry, str) else entry for entry in entries)
        return tree


def parse_settings(text: str, *, source: str, offline: bool = False) -> TaskSettings:
    """Validate the text of a ``task.toml``; ``source`` is its path, for messages.

    With ``offline`` a task that requires the public network is accepted and has none. Raises
    :class:`TaskFolderError` with every fault found.
    """
    try:
        tree = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskFolderError(f"{source} is not TOML: {error}") from error
    faults = [f"{key} = {value!r}: {REFUSED[key]}" for key, value in _take_refused(tree) if value]
    settings = None
    try:
        settings = TaskSettings.model_validate(frozen_lists(tree))
    except ValidationError as error:
        faults += [explain(fault, "Harbor has no such key; put notes into [metadata]") for fault in error.errors()]
    if settings is not None and settings.environment.network_mode == "public" and not offline:
        faults.append(
            "environment.network_mode = 'public': sandboxes reach what is on a list or nothing; name the hosts in "
            "allowed_hosts with network_mode = 'allowlist', or read the folder as offline tasks"
        )
    if faults or settings is None:
        raise TaskFolderError(f"{source}:\n  " + "\n  ".join(faults))
    return settings


def fill_variables(variables: Mapping[str, str], *, source: str, key: str) -> dict[str, str]:
    """``variables`` with each ``${NAME:-default}`` replaced by its default.

    Harbor looks up ``${NAME}`` on its machine; then the task would differ between machines, and secrets would get into
    sandboxes. Raises :class:`TaskFolderError` for a variable without a default.
    """
    filled = {}
    for name, text in variables.items():
        missing = [match[1] for match in TEMPLATE.finditer(text) if match[2] is None]
        if missing:
            raise TaskFolderError(
                f"{source}: {key}.{name} = {text!r}: variables of the machine are not handed into sandboxes; "
                f"write the value, or a default as in ${{{missing[0]}:-value}}"
            )
        filled[name] = TEMPLATE.sub(lambda match: match[2], text)
    return filled


def _take_refused(tree: dict[str, Any]) -> list[tuple[str, Any]]:
    """Remove the keys of ``REFUSED`` and return them with their values; the caller accepts empty ones."""
    taken = []
    for key in REFUSED:
        *parents, leaf = key.split(".")
        node: Any = tree
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and leaf in node:
            taken.append((key, node.pop(leaf)))
    return taken


def frozen_lists(value: Any) -> Any:
    """Convert lists to tuples, recursively: settings are frozen."""
    if isinstance(value, dict):
        return {key: frozen_lists(item) for key, item in value.items()}
    return tuple(map(frozen_lists, value)) if isinstance(value, list) else value


def explain(fault: ErrorDetails, unknown: str) -> str:
    """One line for a pydantic error; ``unknown`` is the text for unknown keys."""
    key, value = ".".join(map(str, fault["loc"])) or "the file", fault["input"]
    if fault["type"] == "extra_forbidden":
        return f"{key} = {value!r}: {unknown}"
    shown = "" if isinstance(value, dict) else f" = {value!r}"
    return f"{key}{shown}: {fault['msg'].removeprefix('Value error, ')}"
