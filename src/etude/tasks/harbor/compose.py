"""``environment/docker-compose.yaml`` of a task: services that run with the agent, in the sandbox of ``main``.

    services:
      main: {depends_on: [api], environment: {API: http://api:8080}, healthcheck: {test: curl -f http://api:8080}}
      api:  {build: ., command: ./serve, environment: {…}, working_dir: /srv, healthcheck: {test: …}}
      db:   {image: redis:7, volumes: [data:/data, ./redis.conf:/etc/redis.conf]}

A service has either the image of ``main`` (``build: .``) or one of its own. The former shares the files of ``main``,
and a script before the entry point starts it. The latter has its own root file system inside the sandbox, and the
sandbox starts it (:class:`~etude.sandbox_spec.ImageService`). Services with their own images start first; all start in
the order of ``depends_on``, each when those before it are healthy. Service names resolve to the sandbox's loopback.
Text in, settings out; an unsupported key is refused by name.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from etude.config.section import Section
from etude.sandbox_spec import Healthcheck
from etude.sandboxes.images.containers import ServiceOrder
from etude.tasks.harbor.settings import TaskFolderError, explain, fill_variables, frozen_lists

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml if PyYAML has it: ten times as fast."""
MOST_DEPTH, MOST_NODES = 100, 100_000
MAIN = "main"
"""The agent's own service."""
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "networks": "services have the loopback of the sandbox",
        "network_mode": "services have the loopback of the sandbox",
        "env_file": "write environment",
        "restart": "a service that ends has ended",
        "deploy": "the limits are those of task.toml, for all services together",
        "cap_add": "no command of a sandbox has capabilities",
        "privileged": "no command of a sandbox has capabilities",
    }
)
"""Refused keys of a service → fix; any other key that is not a field below is refused, too."""
OF_OWN_IMAGE: Mapping[str, str] = MappingProxyType(
    {
        "image": "write it into task.toml as environment.docker_image",
        "entrypoint": "write ENTRYPOINT, or command",
        "user": "it runs as the agent does: write USER",
        "tmpfs": "it has the files of main: make the folder in the Dockerfile",
        "volumes": "it has the files of main: copy them in the Dockerfile",
    }
)
"""Keys that only a service with its own image may have → fix for a service with the image of ``main``."""
NOTES: Mapping[str, str] = MappingProxyType(
    {
        "version": "carried",
        "volumes": "carried: names alone",
        "services.*.image": "a root of its own in the sandbox; not main's",
        "services.*.build.context": "in part: . is the image of main; else a folder below environment/",
        "services.*.build.dockerfile": "",
        "services.*.entrypoint": "of an image of its own",
        "services.*.user": "of an image of its own, by name or number",
        "services.*.tmpfs": "in part: a folder like any other",
        "services.*.volumes": "in part: files of environment/, which are copied, and names that one service alone has",
        "services.*.hostname": "one more name",
        "services.*.container_name": "one more name",
        "services.*.environment": "in part: values and defaults, no variable of the machine",
        "services.*.command": "in part: main does nothing but sleep",
        "services.*.working_dir": "in part: of main it is WORKDIR, or environment.workdir",
        "services.*.depends_on.*.condition": "in part: started is healthy, too, where there is a check",
        "services.*.ports": "in part: every port is the sandbox's own, and none is seen outside",
        "services.*.expose": "every port is the sandbox's own",
    }
)
"""Limits of supported keys that are not obvious from their names."""
UNKNOWN_KEY = "it is not held to: drop it, or do without"
UP, LOGS = "/tmp/.services-up", "/tmp/.services"
"""In the sandbox: a file that exists once all services have started, and one with the log of an unhealthy service."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Names of services."""
SLEEPS = ("sleep infinity", "tail -f /dev/null", "sh -c 'sleep infinity'")
"""The allowed commands of ``main``: they do nothing."""
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
        """The health check of a sandbox."""
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


class BuildSettings(Section):
    """``build`` of a service; the defaults are those of ``main``."""

    context: str = "."
    dockerfile: str = "Dockerfile"

    @field_validator("dockerfile")
    @classmethod
    def _is_plain(cls, path: str) -> str:
        if path.endswith(".in"):
            raise ValueError(
                "the preprocessor that podman runs on .in files can include files of the machine: rename it"
            )
        return path

    @field_validator("context", "dockerfile")
    @classmethod
    def _is_inside(cls, path: str) -> str:
        plain = PurePosixPath(path)
        if plain.is_absolute() or ".." in plain.parts or ":" in path:
            raise ValueError("name a folder or file below environment/, such as ./api")
        return str(plain)


class ServiceSettings(Section):
    """The supported keys of a service."""

    image: str = ""
    build: BuildSettings | None = None
    """In the file: its context alone, or a table."""
    entrypoint: str | tuple[str, ...] | None = None
    user: str | int = ""
    tmpfs: str | tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    hostname: str = ""
    container_name: str = ""
    environment: dict[str, Any] = Field(default_factory=dict)
    command: str | tuple[str, ...] = ()
    working_dir: str = ""
    """Empty: that of the image."""
    healthcheck: CheckSettings | None = None
    depends_on: tuple[str, ...] | dict[str, DependencySettings] = ()
    """Services to wait for; always until they are healthy, if they have a check."""
    ports: tuple[Any, ...] = ()
    expose: tuple[Any, ...] = ()
    """Without effect: every port is the sandbox's own, and none is visible outside."""

    @field_validator("build", mode="before")
    @classmethod
    def _is_table(cls, build: Any) -> Any:
        return {"context": build} if isinstance(build, str) else build

    @property
    def has_own_image(self) -> bool:
        """True unless the service has the image of ``main``."""
        return bool(self.image) if self.build is None else self.build != BuildSettings()

    @property
    def line(self) -> str:
        """The command, for a shell."""
        return self.command if isinstance(self.command, str) else shlex.join(self.command)

    @property
    def variables(self) -> dict[str, str]:
        """The environment, as text."""
        return {name: str(value) for name, value in self.environment.items()}

    @property
    def more_names(self) -> Iterator[str]:
        """Further names of the service."""
        return filter(None, (self.hostname, self.container_name))


class ComposeSettings(Section):
    """The whole file."""

    version: Any = None
    """Obsolete, in Docker as well."""
    volumes: dict[str, dict[str, str] | None] = Field(default_factory=dict)
    """Names of volumes; without effect."""
    services: dict[str, ServiceSettings] = Field(min_length=1)

    @field_validator("services")
    @classmethod
    def _are_names(cls, services: dict[str, ServiceSettings]) -> dict[str, ServiceSettings]:
        for name in services:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid service name: letters, digits and ._- only")
        return services


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeServices:
    """Additions of a task's services to its sandbox."""

    entrypoint: tuple[str, ...] = ()
    """Runs before the entry point of the image."""
    healthchecks: tuple[Healthcheck, ...] = ()
    names: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of ``main``."""
    orders: tuple[ServiceOrder, ...] = ()
    """Services with images of their own, in starting order."""


def _read_yaml(text: str) -> object:
    """The plain values of a text.

    Raises ``yaml.YAMLError``, also for a text that is too deep or, with its aliases expanded, too large: a deep one
    would crash the process in the fast loader, and reading a large one would not end.
    """
    brackets = accumulate((char in "[{") - (char in "]}") for char in text)
    if max(brackets, default=0) > MOST_DEPTH:  # checked before parsing: libyaml needs quadratic time
        raise yaml.YAMLError(f"it opens more than {MOST_DEPTH} brackets")
    sizes, open_nodes = dict[str, int](), [("", 0)]
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor or "", 1))
            continue
        anchor, size = (event.anchor or "", 1) if isinstance(event, yaml.ScalarEvent) else ("", 0)
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, MOST_NODES)  # the alias is inside of its own anchor
        sizes[anchor] = size
        outer, so_far = open_nodes.pop()
        open_nodes.append((outer, so_far + size))
        if len(open_nodes) > MOST_DEPTH or so_far + size > MOST_NODES:
            raise yaml.YAMLError(f"it is nested more than {MOST_DEPTH} deep, or has more than {MOST_NODES} values")
    return yaml.load(text, Loader=LOADER)


def parse_compose(text: str, *, source: str) -> ComposeServices:
    """Read a compose file; ``source`` is its path, for messages.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` with every unsupported key.
    """
    try:
        tree = _filled(frozen_lists(_read_yaml(text)), source, "")
        settings = ComposeSettings.model_validate(tree)
    except (yaml.YAMLError, RecursionError) as error:
        raise TaskFolderError(f"{source} is not YAML: {error}") from error
    except ValidationError as error:
        faults = [
            explain(fault, REFUSED.get(str(next(reversed(fault["loc"]), "")), UNKNOWN_KEY)) for fault in error.errors()
        ]
        raise TaskFolderError(f"{source}:\n  " + "\n  ".join(faults)) from error
    if MAIN not in settings.services:
        raise TaskFolderError(f"{source}: services has {list(settings.services)}, and no {MAIN!r}, the agent's own")
    order = _order(settings, source)
    main, others = settings.services[MAIN], [name for name in order if name != MAIN]
    own = [name for name in others if settings.services[name].has_own_image]
    shared = [name for name in others if name not in own]
    _check_images(settings, own, source)
    names = [*others, *(name for service in settings.services.values() for name in service.more_names)]
    if main.line not in ("", *SLEEPS) or main.working_dir:
        raise TaskFolderError(
            f"{source}: services.main.command and working_dir: write ENTRYPOINT, and WORKDIR, instead"
        )
    scripts = [_script(name, settings.services[name], source) for name in shared]
    checks = (main.healthcheck.check,) if main.healthcheck else ()
    return ComposeServices(
        entrypoint=("sh", "-c", "\n".join([f"rm -f {UP}", *scripts, f": >{UP}", 'exec "$@"']), "services")
        if scripts
        else (),
        healthchecks=(_all_healthy([settings.services[name] for name in shared]), *checks) if scripts else checks,
        names=tuple(dict.fromkeys(names)),
        environment=main.variables,
        orders=tuple(_order_of(name, settings.services[name], source, (MAIN, *names)) for name in own),
    )


def _filled(value: Any, source: str, key: str) -> Any:
    """A value of the file with its variables replaced by their defaults, ``$$`` by ``$``, and lists of variables by
    tables.
    """
    if key.endswith(".environment") and isinstance(value, tuple):
        lines = (str(line).partition("=") for line in value)
        value = {name: text if equals else None for name, equals, text in lines}
    if isinstance(value, dict):
        own = key.endswith(".environment")  # without a value, Docker takes that of the machine
        texts = {name: f"${{{name}}}" if own and item is None else item for name, item in value.items()}
        return {name: _filled(item, source, f"{key}.{name}".lstrip(".")) for name, item in texts.items()}
    if isinstance(value, tuple):
        return tuple(_filled(item, source, key) for item in value)
    if not isinstance(value, str):
        return value
    above, _, leaf = key.rpartition(".")
    return fill_variables({leaf: value}, source=source, key=above)[leaf].replace("$$", "$")


def _check_images(settings: ComposeSettings, own: Sequence[str], source: str) -> None:
    """Refuse keys that need an own image, dependencies on services that start later, and shared volumes."""
    for name, service in settings.services.items():
        keys = [key for key in OF_OWN_IMAGE if key in service.model_fields_set and name not in own]
        if keys:
            raise TaskFolderError(f"{source}: services.{name}.{keys[0]}: {OF_OWN_IMAGE[keys[0]]}")
    users: dict[str, str] = {}
    for name in own:
        late = [other for other in settings.services[name].depends_on if other not in own]
        if late:
            raise TaskFolderError(
                f"{source}: services.{name}.depends_on = {late}: those have the image of main, and are started later "
                "than services with images of their own: give them one, by a build of their own"
            )
        for volume, _ in _volumes(name, settings.services[name], source):
            if volume and not volume.startswith(".") and users.setdefault(volume, name) != name:
                raise TaskFolderError(
                    f"{source}: services.{name}.volumes has {volume!r}, as {users[volume]} has: each root is its own, "
                    "so let one service have it, and others ask that one"
                )


def _volumes(name: str, service: ServiceSettings, source: str) -> list[tuple[str, str]]:
    """Source and mount point of each volume; the source of an unnamed volume is empty."""
    pairs = []
    for text in service.volumes:
        first, _, rest = text.removesuffix(":rw").removesuffix(":ro").rpartition(":")
        is_inside = not first.startswith(("/", "~")) and ".." not in PurePosixPath(first).parts
        if not rest.startswith("/") or rest == "/" or ".." in PurePosixPath(rest).parts or not is_inside:
            raise TaskFolderError(
                f"{source}: services.{name}.volumes has {text!r}: write ./FILE:/PLACE, of a file or folder of "
                "environment/, or NAME:/PLACE"
            )
        pairs.append((first, rest))
    return pairs


def _order_of(name: str, service: ServiceSettings, source: str, names: Sequence[str]) -> ServiceOrder:
    """The order to start a service with an image of its own."""
    folder = Path(source).parent
    volumes = _volumes(name, service, source)
    build = service.build
    own = [build.context, f"{build.context}/{build.dockerfile}"] if build else []
    for path in (*own, *(first for first, _ in volumes if first.startswith("."))):
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise TaskFolderError(f"{source}: services.{name}: {path} leads out of {folder}: copy what it points to")
    tmpfs = (service.tmpfs,) if isinstance(service.tmpfs, str) else service.tmpfs
    return ServiceOrder(
        name=name,
        source=str(folder / build.context) if build else f"docker://{service.image}",  # never a file of this machine
        dockerfile=build.dockerfile if build else "Dockerfile",
        entrypoint=_words(service.entrypoint) if service.entrypoint is not None else None,
        command=_words(service.command) or None,
        environment=service.variables,
        workdir=service.working_dir,
        user=str(service.user),
        healthchecks=(service.healthcheck.check,) if service.healthcheck else (),
        folders=(
            *(path.partition(":")[0] for path in tmpfs),
            *(place for first, place in volumes if not first.startswith(".")),
        ),
        files={place: folder / first for first, place in volumes if first.startswith(".")},
        names=tuple(names),
    )


def _words(command: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else command


def seconds(text: str) -> float:
    """A duration such as ``1m30s``, in seconds. Raises ``ValueError``."""
    if not DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration: write 5s, 500ms or 1m30s")
    return sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))


def _order(settings: ComposeSettings, source: str) -> list[str]:
    """The service names, each after its dependencies."""
    graph = {name: tuple(service.depends_on) for name, service in settings.services.items()}
    strangers = sorted({name for names in graph.values() for name in names} - {*graph})
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise TaskFolderError(f"{source}: depends_on goes in a circle: {error.args[1]}") from error
    if strangers:
        raise TaskFolderError(f"{source}: depends_on names {strangers}, which are not services here")
    return order


def _script(name: str, service: ServiceSettings, source: str) -> str:
    """Shell lines that start a service and wait until it is healthy."""
    if not service.line or service.build is None:
        raise TaskFolderError(
            f"{source}: services.{name} needs an image, a build, or build: . for the image of main and a command that "
            "says how it is started"
        )
    words = [f"{key}={shlex.quote(value)}" for key, value in service.variables.items()]
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


def _all_healthy(services: Sequence[ServiceSettings]) -> Healthcheck:
    """A check that succeeds once the script has found all services healthy."""
    checks = [service.healthcheck.check for service in services if service.healthcheck]
    script = f"[ -e {UP} ] && [ ! -e {LOGS} ] || {{ cat {LOGS} 2>/dev/null; exit 1; }}"
    retries = 3 + round(sum(map(_retry_timeout_s, checks)))
    return Healthcheck(argv=("sh", "-c", script), interval_s=1.0, retries=retries)
