"""Capabilities that a spec needs from its provider, and the error if the provider lacks one.

The only I/O is the check that paths exist.

A provider that silently offers less is worse than one that reports an error: the run would continue in an environment
that differs from its recipe.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from etude.errors import SandboxError, Unsupported
from etude.sandbox_spec import Capability, SandboxLimits, SandboxSpec, is_place

WHO_CAN: Mapping[Capability, str] = MappingProxyType(
    {Capability.OWN_KERNEL: "gvisor or qemu", Capability.LIVE_FORK: "gvisor or qemu"}
)
"""Providers with the capabilities that the built-in provider, ``ns``, lacks."""
LIMITS: Mapping[str, Capability] = MappingProxyType(
    {
        "memory_bytes": Capability.MEMORY_LIMIT,
        "disk_bytes": Capability.DISK_LIMIT,
        "processes": Capability.PROCESS_LIMIT,
    }
)
"""Field of :class:`~etude.sandbox_spec.SandboxLimits` → the capability that enforces it."""
WALLED = frozenset({Capability.MEMORY_LIMIT, Capability.PROCESS_LIMIT})
"""Capabilities that ``LIMIT_WALL`` can replace."""


def demands(spec: SandboxSpec) -> Mapping[Capability, str]:
    """The capabilities that a spec needs, each with the part of the spec that needs it.

    A limit needs a capability only if it differs from the default: a provider that cannot measure usage has its own
    limits.
    """
    needed: dict[Capability, str] = {}
    if spec.image.base or spec.image.layers:
        needed[Capability.IMAGES] = (
            f"an image of {len(spec.image.layers)} layers over {spec.image.base or 'its own base'}"
        )
    elif spec.user == "root":
        needed[Capability.IMAGES] = "user='root'"
    running = {"names": spec.names, "ENTRYPOINT": spec.image.entrypoint, "HEALTHCHECK": spec.image.healthchecks}
    if spec.image.services:
        needed[Capability.IMAGE_SERVICES] = f"services {[service.name for service in spec.image.services]}"
    for name, value in running.items():
        if value:
            needed[Capability.BACKGROUND] = f"{name} {list(value)}"
    if spec.allow:
        needed[Capability.ALLOW_LIST] = f"allow={list(spec.allow)}"
    usual = SandboxLimits()
    for name, capability in LIMITS.items():
        if getattr(spec.limits, name) != getattr(usual, name):
            needed[capability] = f"limits.{name}={getattr(spec.limits, name)}"
    return needed


def check_spec(spec: SandboxSpec, granted: frozenset[Capability], provider: str) -> None:
    """Raise :class:`~etude.errors.Unsupported` for a spec that needs a capability ``provider`` lacks."""
    enough = granted | WALLED if Capability.LIMIT_WALL in granted else granted
    for capability, words in demands(spec).items():
        check_capability(capability, enough, provider, words)


def check_sources(spec: SandboxSpec, bases: Mapping[str, Path]) -> None:
    """Raise :class:`~etude.errors.SandboxError` for a base system, layer or mount that does not exist, and
    ``ValueError`` for an invalid path in a sandbox. ``bases`` are the stored base systems.
    """
    image = spec.image
    if image.base and image.base not in bases:
        raise SandboxError(
            f"base system {image.base!r} is not stored, but {sorted(bases)}: "
            f"build it with `etude images build {image.base}`"
        )
    missing = [str(path) for path in (*image.layers, *spec.mounts.values()) if not path.exists()]
    if missing:
        raise SandboxError(f"a sandbox cannot show {' and '.join(missing)}: there is no such folder or file")
    for place in (image.workdir, *spec.mounts):
        if not is_place(place) or place == "/":
            raise ValueError(f"{place!r} is not a place in a sandbox: use an absolute path without '..'")


def check_capability(capability: Capability, granted: frozenset[Capability], provider: str, words: str = "") -> None:
    """Raise :class:`~etude.errors.Unsupported` unless ``capability`` is granted; ``words`` name the request."""
    if capability not in granted:
        raise unsupported(provider, words or capability.replace("_", " "), WHO_CAN.get(capability, "ns"))


def unsupported(provider: str, words: str, instead: str) -> Unsupported:
    """The error of a provider that does not support ``words``, with an alternative provider."""
    return Unsupported(f"{provider} sandboxes cannot keep to {words} on this machine: use {instead}")
