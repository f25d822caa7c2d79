"""``environment/docker-compose.yaml`` of a task: programs that run beside the agent, in the sandbox of ``main``.

    services:
      main: {depends_on: [api], environment: {API: http://api:8080}, healthcheck: {test: curl -f http://api:8080}}
      api:  {build: ., command: ./serve, environment: {…}, working_dir: /srv, healthcheck: {test: …}}

A sandbox has one root, so every service is made of the image of ``main``; it is started by a script in front of that
image's entry point, in the order of ``depends_on``, each when those before it are healthy, and found by its name, which
leads to the sandbox's own loopback. Text in, settings out; a key that is not held to is refused by its name.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from etude.config.section import Section
from etude.sandbox_spec import Healthcheck
from etude.tasks.harbor.settings import TaskFolderError, explain, fill_variables, frozen_lists

MAIN = "main"
"""The agent's own service."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "image": "a sandbox has one root: install its program in the Dockerfile of main, and write build: .",
        "entrypoint": "write it into command",
        "user": "services run as the agent does",
        "volumes": "services have the files of the sandbox",
        "networks": "services have the loopback of the sandbox",
        "network_mode": "services have the loopback of the sandbox",
        "env_file": "write environment",
        "restart": "a service that ends has ended",
        "deploy": "the limits are those of task.toml, for all services together",
        "cap_add": "no command of a sandbox has capabilities",
        "privileged": "no command of a sandbox has capabilities",
    }
)
"""Keys of a service that are refused, and what to do; so is any other that is not a field below."""
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "version": "carried",
        "services.*.build": "in part: . alone, the image of main",
        "services.*.environment": "in part: values and defaults, no variable of the machine",
        "services.*.command": "in part: main does nothing but sleep",
        "services.*.working_dir": "in part: of main it is WORKDIR, or environment.workdir",
        "services.*.depends_on.*.condition": "in part: started is healthy, too, where there is a check",
        "services.*.ports": "in part: every port is the sandbox's own, and none is seen outside",
        "services.*.expose": "every port is the sandbox's own",
    }
)
"""Limits of keys that are read, where the name alone does not say it."""
UNKNOWN_KEY = "it is not held to: a service is the image of main (build: .) with a command of its own"
UP, LOGS = "/tmp/.services-up", "/tmp/.services"
"""A file that is there when all services are healthy, and the end of their logs, inside."""
BUILDS: tuple[object, ...] = (".", "./", {"context": "."}, {"context": ".", "dockerfile": "Dockerfile"})
"""Ways to name the folder that the image of ``main`` is built from."""
SLEEPS = ("sleep infinity", "tail -f /dev/null", "sh -c 'sleep infinity'")
"""Commands of ``main`` that do nothing, which is what it does."""
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
DURATION = re.compile(rf"(?:{PART.pattern})+")
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class CheckSettings(Section):
    """``healthcheck`` of a service."""

    test: str | tuple[str, ...]
    interval: str = "30s"
    timeout: str = "30s"
    start_period: str = "0s"
    retries: int = Field(default=3, gt=0)

    @field_validator("interval", "timeout", "start_period")
    @classmethod
    def _is_duration(cls, text: str) -> str:
        seconds(text)
        return text

    @property
    def check(self) -> Healthcheck:
        """The same for a sandbox."""
        kind, *words = ("CMD-SHELL", self.test) if isinstance(self.test, str) else self.test
        return Healthcheck(
            argv=("sh", "-c", *words) if kind == "CMD-SHELL" else tuple(words),
            interval_s=seconds(self.interval),
            timeout_s=seconds(self.timeout),
            start_period_s=seconds(self.start_period),
            retries=self.retries,
        )


class DependencySettings(Section):
    """A service that another one depends on."""

    condition: Literal["service_started", "service_healthy"] = "service_started"


class ServiceSettings(Section):
    """A service, as far as étude holds to it."""

    build: Any = None
    environment: dict[str, Any] | tuple[str, ...] = Field(default_factory=dict)
    command: str | tuple[str, ...] = ()
    working_dir: str = ""
    """Empty: that of the image."""
    healthcheck: CheckSettings | None = None
    depends_on: tuple[str, ...] | dict[str, DependencySettings] = ()
    """Always until it is healthy, if it has a check."""
    ports: tuple[Any, ...] = ()
    expose: tuple[Any, ...] = ()
    """Every port is the sandbox's own, and none is seen outside."""

    @field_validator("build")
    @classmethod
    def _is_mains(cls, build: Any) -> Any:
        if build is not None and build not in BUILDS:
            raise ValueError("a sandbox has one root: copy its program into the Dockerfile of main, and write build: .")
        return build

    @property
    def line(self) -> str:
        """Its command, for a shell."""
        return self.command if isinstance(self.command, str) else shlex.join(self.command)

    @property
    def variables(self) -> dict[str, str]:
        """Its environment, of whatever form."""
        if isinstance(self.environment, dict):
            return {name: str(value) for name, value in self.environment.items()}
        pairs = [line.partition("=") for line in self.environment]
        return {name: value if equals else f"${{{name}}}" for name, equals, value in pairs}


class ComposeSettings(Section):
    """The whole file."""

    version: Any = None
    """Obsolete, for Docker, too."""
    services: dict[str, ServiceSettings] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeServices:
    """Services of a task: what they add to its sandbox."""

    entrypoint: tuple[str, ...] = ()
    """Comes before that of the image."""
    healthchecks: tuple[Healthcheck, ...] = ()
    names: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of ``main``."""


def parse_compose(text: str, *, source: str) -> ComposeServices:
    """Read a compose file; ``source`` is its path, for messages.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` with every key that is not held to.
    """
    try:
        settings = ComposeSettings.model_validate(frozen_lists(yaml.safe_load(text)))
    except yaml.YAMLError as error:
        raise TaskFolderError(f"{source} is no YAML: {error}") from error
    except ValidationError as error:
        faults = [explain(fault, REFUSED.get(str(fault["loc"][-1]), UNKNOWN_KEY)) for fault in error.errors()]
        raise TaskFolderError(f"{source}:\n  " + "\n  ".join(faults)) from error
    if MAIN not in settings.services:
        raise TaskFolderError(f"{source}: services has {list(settings.services)}, and no {MAIN!r}, the agent's own")
    order = _order(settings, source)
    main, others = settings.services[MAIN], [name for name in order if name != MAIN]
    if main.line not in ("", *SLEEPS) or main.working_dir:
        raise TaskFolderError(
            f"{source}: services.main.command and working_dir: write ENTRYPOINT, and WORKDIR, instead"
        )
    scripts = [_script(name, settings.services[name], source) for name in others]
    checks = (main.healthcheck.check,) if main.healthcheck else ()
    return ComposeServices(
        entrypoint=("sh", "-c", "\n".join([*scripts, f": >{UP}", 'exec "$@"']), "services") if scripts else (),
        healthchecks=(_all_healthy(settings), *checks) if scripts else checks,
        names=tuple(others),
        environment=fill_variables(main.variables, source=source, key="services.main.environment"),
    )


def seconds(text: str) -> float:
    """A duration such as ``1m30s``, in seconds. Raises ``ValueError``."""
    if not DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is no duration: write 5s, 500ms or 1m30s")
    return sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))


def _order(settings: ComposeSettings, source: str) -> list[str]:
    """The services, each after those that it depends on."""
    graph = {name: tuple(service.depends_on) for name, service in settings.services.items()}
    strangers = sorted({name for names in graph.values() for name in names} - {*graph})
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise TaskFolderError(f"{source}: depends_on goes in a circle: {error.args[1]}") from error
    if strangers:
        raise TaskFolderError(f"{source}: depends_on names {strangers}, which are no services here")
    return order


def _script(name: str, service: ServiceSettings, source: str) -> str:
    """Shell lines that start a service and wait until it is healthy."""
    if not service.line or service.build is None:
        raise TaskFolderError(
            f"{source}: services.{name} needs a command, and build: . for the image of main: a sandbox has one root, "
            "so install its program in the Dockerfile, and say here how it is started"
        )
    variables = fill_variables(service.variables, source=source, key=f"services.{name}.environment")
    words = [f"{key}={shlex.quote(value)}" for key, value in variables.items()]
    folder = f"cd {shlex.quote(service.working_dir)} && " if service.working_dir else ""
    lines = [f"( {folder}env {' '.join(words)} sh -c {shlex.quote(service.line)} ) >{LOGS}-{name} 2>&1 </dev/null &"]
    if service.healthcheck:
        check = service.healthcheck.check
        lines += [
            f"tries=0; until {shlex.join(check.argv)} >/dev/null 2>&1; do",
            f"    tries=$((tries + 1)); [ $tries -le {_retry_timeout_s(check):.0f} ] || break; sleep 1",
            f"done; [ $tries -le {_retry_timeout_s(check):.0f} ] ||",
            f"    {{ echo service {name} is not healthy; tail -n 20 {LOGS}-{name}; }} >{LOGS}",
        ]
    return "\n".join(lines)


def _retry_timeout_s(check: Healthcheck) -> float:
    return check.start_period_s + check.retries * check.interval_s


def _all_healthy(settings: ComposeSettings) -> Healthcheck:
    """A check that succeeds when the script has found all services healthy."""
    checks = [service.healthcheck.check for service in settings.services.values() if service.healthcheck]
    script = f"[ -e {UP} ] && [ ! -e {LOGS} ] || {{ cat {LOGS} 2>/dev/null; exit 1; }}"
    retries = 3 + round(sum(map(_retry_timeout_s, checks)))
    return Healthcheck(argv=("sh", "-c", script), interval_s=1.0, retries=retries)
