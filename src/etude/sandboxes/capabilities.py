"""What a specification asks of its provider, and the refusal of what the provider does not claim. Pure.

A provider that would quietly give less is worse than one that refuses: a run would go on in a world that is not what
its recipe says.
"""

from collections.abc import Mapping
from types import MappingProxyType

from etude.errors import Unsupported
from etude.sandbox_spec import Capability, SandboxLimits, SandboxSpec

WHO_CAN: Mapping[Capability, str] = MappingProxyType(
    {Capability.OWN_KERNEL: "gvisor or qemu", Capability.LIVE_FORK: "gvisor or qemu"}
)
"""Providers that hold to what the embedded one, ``ns``, does not."""
LIMITS: Mapping[str, Capability] = MappingProxyType(
    {
        "memory_bytes": Capability.MEMORY_LIMIT,
        "disk_bytes": Capability.DISK_LIMIT,
        "processes": Capability.PROCESS_LIMIT,
    }
)
"""Field of :class:`~etude.sandbox_spec.SandboxLimits` → what it takes to keep it."""


def demands(spec: SandboxSpec) -> Mapping[Capability, str]:
    """The capabilities that a specification cannot do without, each with the words that ask for it.

    Limits are asked for by a number that is not the usual one: a provider that cannot count what its sandboxes use has
    limits of its own.
    """
    asked: dict[Capability, str] = {}
    if spec.image.base or spec.image.layers:
        asked[Capability.IMAGES] = (
            f"an image of {len(spec.image.layers)} layers over {spec.image.base or 'its own base'}"
        )
    elif spec.user == "root":
        asked[Capability.IMAGES] = "user='root'"
    if spec.allow:
        asked[Capability.ALLOW_LIST] = f"allow={list(spec.allow)}"
    usual = SandboxLimits()
    for name, capability in LIMITS.items():
        if getattr(spec.limits, name) != getattr(usual, name):
            asked[capability] = f"limits.{name}={getattr(spec.limits, name)}"
    return asked


def check_spec(spec: SandboxSpec, granted: frozenset[Capability], provider: str) -> None:
    """Raise :class:`~etude.errors.Unsupported` for a specification that asks for what ``provider`` does not claim."""
    for capability, words in demands(spec).items():
        check_claim(capability, granted, provider, words)


def check_claim(capability: Capability, granted: frozenset[Capability], provider: str, words: str = "") -> None:
    """Raise :class:`~etude.errors.Unsupported` unless ``capability`` is granted; ``words`` say what was asked for."""
    if capability not in granted:
        raise unsupported(provider, words or capability.replace("_", " "), WHO_CAN.get(capability, "ns"))


def unsupported(provider: str, words: str, instead: str) -> Unsupported:
    """The refusal of ``words`` by a provider, and which one to use instead."""
    return Unsupported(f"{provider} sandboxes cannot keep to {words} on this machine: use {instead}")
