"""The settings of a sandbox server's clients: read strictly, and nothing is allowed by default."""

from pathlib import Path

import pytest

from etude.errors import ConfigError, SandboxError, Unsupported
from etude.sandbox_spec import Image, SandboxSpec
from etude.sandboxes.remote.principals import (
    EACH,
    SNAPSHOT,
    TOTAL,
    Permissions,
    Quota,
    limits_of_many,
    read_clients,
    usual_quota,
)

ONE, OTHER = "1" * 64, "2" * 64
FILE = f"""
allow = ["pypi.internal:443"]
each.cpus = 2.0

[clients.one]
key_sha256 = "{ONE}"

[clients.other]
key_sha256 = "{OTHER}"
allow = ["127.0.0.1:5432"]
folders = ["/opt/tools"]
sandboxes = 3
each = {{memory_bytes = 1000}}
total = {{processes = 9000}}
"""

STORED = Image(digest="d", layers=(Path("/stored"),), environment={"A": "stored", "B": "stored"}, workdir="/srv")


def find(reference: str) -> Image:
    if reference != "d":
        raise ConfigError(f"no image {reference!r}")
    return STORED


def test_an_image_is_found_by_its_digest_and_its_paths_are_the_servers() -> None:
    permissions = Permissions(images=find)
    asked_for = Image(digest="d", layers=(Path("/of/the/client"),), environment={"B": "asked"})
    image = permissions.resolve(SandboxSpec(image=asked_for), {}).image
    assert image.layers == STORED.layers
    assert image.environment == {"A": "stored", "B": "asked"}
    assert image.workdir == "/srv"
    with pytest.raises(ConfigError, match="no image 'e'"):
        permissions.resolve(SandboxSpec(image=Image(digest="e")), {})
    assert permissions.resolve(SandboxSpec(image=Image(digest="s")), {"s": STORED}).image.layers == STORED.layers


def test_only_shared_folders_can_be_named(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "out").symlink_to("/etc")
    permissions = Permissions(folders=(shared,))
    layer = SandboxSpec(image=Image(layers=(shared / "a",)), mounts={"/m": shared / "b"})
    assert permissions.resolve(layer, {}) == layer
    for path in (Path("/etc"), shared / ".." / "x", shared / "out", tmp_path):
        for spec in (SandboxSpec(image=Image(layers=(path,))), SandboxSpec(mounts={"/m": path})):
            with pytest.raises(Unsupported, match="share the folder"):
                permissions.resolve(spec, {})


def test_what_holds_for_all_is_said_once_and_anew_by_a_client(tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    file.write_text(FILE)
    clients = read_clients(file, find)
    one, other = clients["one"], clients["other"]
    assert (one.digest, other.digest) == (ONE, OTHER)
    assert "pypi.internal:443" in one.permissions.allow
    assert "pypi.internal:443" not in other.permissions.allow
    assert "127.0.0.1:5432" in other.permissions.allow
    assert (one.permissions.folders, other.permissions.folders) == ((), (Path("/opt/tools"),))
    assert (one.quota.each.cpus, one.quota.each.memory_bytes, one.quota.total) == (2.0, EACH.memory_bytes, TOTAL)
    assert (other.quota.sandboxes, other.quota.each.memory_bytes, other.quota.each.cpus) == (3, 1000, EACH.cpus)
    assert (other.quota.total.processes, other.quota.total.cpus) == (9000, TOTAL.cpus)


def test_a_large_machine_lets_a_key_have_more_and_a_number_that_is_named_has_limits_to_match(tmp_path: Path) -> None:
    assert usual_quota(1 << 30) == Quota()
    large = usual_quota(1 << 40)
    assert (large.sandboxes, large.total) == (16_384, limits_of_many(16_384))
    file = tmp_path / "clients.toml"
    file.write_text(f"""
        [clients.usual]
        key_sha256 = "{ONE}"
        [clients.many]
        key_sha256 = "{OTHER}"
        sandboxes = 100000
        operator = true
    """)
    clients = read_clients(file, None, large)
    assert (clients["usual"].quota, clients["usual"].is_operator) == (large, False)
    assert clients["many"].quota == Quota(sandboxes=100_000, total=limits_of_many(100_000))
    assert clients["many"].is_operator


def test_a_snapshot_of_an_earlier_server_is_a_failure_of_the_machine() -> None:
    with pytest.raises(SandboxError, match="started anew"):
        Permissions().resolve(SandboxSpec(image=Image(digest=f"{SNAPSHOT}0")), {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no clients"),
        ("clients = 3", "names no clients"),
        ("[clients]\none = 3", "names no clients"),
        ("[clients.one", "clients.toml"),
        ("[clients.one]\nallow = []", "key_sha256"),
        ("[clients.one]\nkey_sha256 = 'the key'", "key_sha256 = 'the key'"),
        (FILE + "[clients.third]\nkey_sha256 = '" + ONE + "'", "same key_sha256"),
        (FILE.replace("pypi.internal:443", "*"), r"client 'one': allow=\['\*'\]: a place is written host:port"),
        (FILE.replace("folders", "folder"), "client 'other': folder = "),
        (FILE.replace("cpus = 2.0", "cpus = 0.0"), "cpus=0.0"),
        (FILE.replace("cpus = 2.0", "cpus = inf"), "cpus"),
        (FILE.replace("processes = 9000", "processes = 90"), r"each.processes=4096 is more than total.processes=90"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_key_and_value(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "clients.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_clients(file, None)


def test_a_file_that_is_not_there_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_clients(tmp_path / "nowhere.toml", None)
