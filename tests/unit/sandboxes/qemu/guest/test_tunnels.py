"""Addresses inside a virtual machine of the places that commands may reach."""

from etude.sandboxes.qemu.guest.tunnels import addresses_of


def test_every_place_has_an_address_and_every_name_a_line() -> None:
    places, hosts = addresses_of(["pypi.internal:443", "10.1.2.3:80", "localhost:8000", "pypi.internal:80", "db:5432"])
    assert places == {
        "pypi.internal:443": "127.1.0.1",
        "10.1.2.3:80": "10.1.2.3",
        "localhost:8000": "127.0.0.1",
        "pypi.internal:80": "127.1.0.1",
        "db:5432": "127.1.0.3",
    }
    assert hosts.splitlines() == ["127.0.0.1 localhost", "127.1.0.1 pypi.internal", "127.1.0.3 db"]


def test_without_places_there_is_only_the_machine_itself() -> None:
    assert addresses_of([]) == ({}, "127.0.0.1 localhost\n")
