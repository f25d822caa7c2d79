"""Unsupported specs are refused, with the missing capability and a fix."""

from pathlib import Path

import pytest

from etude.errors import Unsupported
from etude.sandbox_spec import Capability, Image, ImageService, SandboxLimits, SandboxSpec
from etude.sandboxes.capabilities import check_capability, check_spec, demands

SPECS = {
    Capability.IMAGES: SandboxSpec(image=Image(base="debian")),
    Capability.IMAGE_SERVICES: SandboxSpec(
        image=Image(services=(ImageService(name="db", argv=("serve",), environment={}),))
    ),
    Capability.ALLOW_LIST: SandboxSpec(allow=("pypi.internal:443",)),
    Capability.MEMORY_LIMIT: SandboxSpec(limits=SandboxLimits(memory_bytes=1 << 20)),
    Capability.DISK_LIMIT: SandboxSpec(limits=SandboxLimits(disk_bytes=1 << 20)),
    Capability.PROCESS_LIMIT: SandboxSpec(limits=SandboxLimits(processes=3)),
}


@pytest.mark.parametrize("capability", SPECS)
def test_each_wish_asks_for_its_capability(capability: Capability) -> None:
    assert set(demands(SPECS[capability])) == {capability}
    check_spec(SPECS[capability], frozenset({capability}), "x")
    others = frozenset(Capability) - {capability, Capability.LIMIT_WALL}
    with pytest.raises(Unsupported, match=r"^x sandboxes cannot keep to .* use ns$"):
        check_spec(SPECS[capability], others, "x")


@pytest.mark.parametrize("capability", [Capability.MEMORY_LIMIT, Capability.PROCESS_LIMIT])
def test_a_wall_at_some_distance_will_do_for_a_limit(capability: Capability) -> None:
    check_spec(SPECS[capability], frozenset({Capability.LIMIT_WALL}), "x")


def test_a_plain_specification_asks_for_nothing() -> None:
    plain = SandboxSpec(image=Image(workdir="/srv", environment={"A": "b"}), environment={"C": "d"}, ttl_s=1)
    assert demands(plain) == {}
    check_spec(plain, frozenset(), "x")


def test_root_and_layers_ask_for_images() -> None:
    assert set(demands(SandboxSpec(user="root"))) == {Capability.IMAGES}
    assert "2 layers" in demands(SandboxSpec(image=Image(layers=(Path("a"), Path("b")))))[Capability.IMAGES]


def test_the_error_names_a_provider_that_can() -> None:
    with pytest.raises(Unsupported, match="live fork on this machine: use gvisor or qemu"):
        check_capability(Capability.LIVE_FORK, frozenset(), "ns")
