"""Addresses inside a sandbox of the places that it may reach."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandboxes.ns.root import NAMES_NETWORK, hosts_text, places

HOSTS = st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{2,4})?", fullmatch=True)


def test_names_have_addresses_of_their_own_and_literals_keep_theirs() -> None:
    reachable = places(["pypi.internal:443", "127.0.0.1:8400", "pypi.internal:80", "10.1.2.3:5432", "localhost:6379"])
    assert [(place.host, place.port, place.address) for place in reachable] == [
        ("pypi.internal", 443, "127.77.0.1"),
        ("127.0.0.1", 8400, "127.0.0.1"),
        ("pypi.internal", 80, "127.77.0.1"),
        ("10.1.2.3", 5432, "10.1.2.3"),
        ("localhost", 6379, "127.0.0.1"),
    ]
    lines = hosts_text(reachable, "sandbox").splitlines()
    assert "127.77.0.1 pypi.internal" in lines
    assert not any("10.1.2.3" in line or line.count("localhost") > 1 for line in lines[2:])


@given(st.lists(st.tuples(HOSTS, st.integers(1, 65535)), max_size=30))
def test_a_host_has_one_address_and_no_two_hosts_share_one(expected: list[tuple[str, int]]) -> None:
    reachable = places([f"{host}:{port}" for host, port in expected])
    assert {(place.host, place.port) for place in reachable} == set(expected)
    addresses = {place.host: place.address for place in reachable}
    assert all(addresses[place.host] == place.address for place in reachable)
    named = [address for host, address in addresses.items() if host != "localhost"]
    assert len(set(named)) == len(named)
    assert all(ipaddress.IPv4Address(address) in NAMES_NETWORK for address in named)


@pytest.mark.parametrize("allow", [["host:0"], ["host:65536"], [f"host{n}:1" for n in range(65)]])
def test_what_cannot_be_reached_is_refused(allow: list[str]) -> None:
    with pytest.raises(ValueError, match="allow"):
        places(allow)
