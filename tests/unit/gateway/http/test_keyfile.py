"""The key file: keys are read back as written, it contains no secret, and a truncated file gives no keys."""

import fcntl
import stat
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, DamagedError
from etude.gateway.http.auth import Key, KeyLimits, Keyring, Scope, digest_of, new_secret
from etude.gateway.http.keyfile import KeyFile

SECRET = new_secret(Scope.PRODUCTION)
KEY = Key(
    key_id="k1",
    digest=digest_of(SECRET),
    scope=Scope.PRODUCTION,
    limits=KeyLimits(requests_per_minute=60),
    created="2026-01-02T03:04:05+00:00",
    label="the editor",
)


def key_of(key_id: str) -> Key:
    return Key(key_id=key_id, digest=digest_of(key_id), scope=Scope.ADMIN)


def test_a_key_comes_back_as_it_was_without_its_secret(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "of" / "keys.json", now=0.0)
    file.add(KEY)
    file.add(key_of("k2"))
    assert file.load() == (KEY, key_of("k2"))
    assert SECRET not in file.path.read_text(encoding="utf-8")
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert {path.name for path in file.path.parent.iterdir()} == {"keys.json", ".keys.json.lock"}


def test_expiry_is_a_date_in_the_file_and_seconds_of_a_clock_in_the_ring(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", now=100.0)
    file.add(Key(key_id="k", digest=KEY.digest, scope=Scope.ADMIN, expires_at=160.0))
    (same,) = file.load()
    (later,) = KeyFile(file.path, now=1100.0).load()
    assert same.expires_at == pytest.approx(160.0, abs=1.0)
    assert later.expires_at == pytest.approx(1160.0, abs=5.0)
    assert file.load() == (same,)  # to the last bit: a ring must not take it for another key


def test_a_revoked_key_is_gone(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", now=0.0)
    file.add(KEY)
    file.add(replace(KEY, key_id="k12", digest="12" * 32))
    file.add(replace(KEY, key_id="k13", digest="13" * 32))
    file.revoke("k1")  # is an id, if also the beginning of others
    for nothing_alone in ("", "k1"):
        with pytest.raises(ValueError, match=r"has no key ''|begins several ids"):
            file.revoke(nothing_alone)
    file.revoke("k12")
    file.revoke("k")
    assert file.load() == ()
    with pytest.raises(ValueError, match="no key 'k1'"):
        file.revoke("k1")


def test_an_id_or_secret_is_there_once_and_no_rollouts_key_at_all(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", now=0.0)
    file.add(KEY)
    for twin in (key_of("k1"), Key(key_id="k2", digest=KEY.digest, scope=Scope.ADMIN)):
        with pytest.raises(ValueError, match="already"):
            file.add(twin)
    with pytest.raises(ValueError, match="dies with its session"):
        file.add(Key(key_id="r", digest=digest_of("r"), scope=Scope.ROLLOUT, session_id="s"))
    assert file.load() == (KEY,)


def test_a_file_never_has_more_keys_than_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.gateway.http.keyfile.MAX_KEYS", 1)
    file = KeyFile(tmp_path / "keys.json", now=0.0)
    file.add(KEY)
    with pytest.raises(ValueError, match="has 1 keys already: revoke some first"):
        file.add(key_of("k2"))
    assert file.load() == (KEY,)


def test_a_missing_file_is_named_with_the_way_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file .* `etude keys add"):
        KeyFile(tmp_path / "none.json", now=0.0).load()


RECORD = {
    "key_id": "k",
    "digest": "a" * 64,
    "scope": "admin",
    "label": "",
    "created": "",
    "expires": None,
    "requests_per_minute": None,
    "tokens_per_minute": None,
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 2, "keys": []}',
        b'{"version": 1}',
        b'{"version": 1, "keys": 3}',
        *(
            orjson.dumps({"version": 1, "keys": keys})
            for keys in (
                [3],
                [{"key_id": "k"}],
                [RECORD, RECORD],
                [RECORD | {"secret": "s"}],
                [RECORD | {"digest": "short"}],
                [RECORD | {"key_id": 3}],
                [RECORD | {"scope": "root"}],
                [RECORD | {"scope": ["admin"]}],
                [RECORD | {"scope": "rollout"}],
                [RECORD | {"expires": "soon"}],
                [RECORD | {"expires": "2026-01-01T00:00:00"}],
                [RECORD | {"requests_per_minute": 0}],
                [RECORD | {"requests_per_minute": True}],
                [RECORD | {"tokens_per_minute": 1.5}],
            )
        ),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = KeyFile(tmp_path / "keys.json", now=0.0)
    file.path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"keys\.json is not a file of keys"):
        file.load()
    with pytest.raises(DamagedError):
        file.add(KEY)
    assert file.path.read_bytes() == content


@given(st.binary(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode))
def test_no_content_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "keys.json"
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        KeyFile(path, now=0.0).load()


def test_a_ring_follows_the_file(tmp_path: Path) -> None:
    ours, theirs = KeyFile(tmp_path / "keys.json", now=0.0), KeyFile(tmp_path / "keys.json", now=0.0)
    ring = Keyring()
    theirs.add(KEY)
    assert ours.refresh(ring, now=0.0)
    assert ring.authenticate(SECRET, now=0.0) == KEY
    assert not ours.refresh(ring, now=0.0)
    theirs.revoke("k1")
    assert ours.refresh(ring, now=0.0)
    assert ring.authenticate(SECRET, now=0.0) is None


def test_a_refused_change_does_not_hide_what_another_process_revoked(tmp_path: Path) -> None:
    ours, theirs = KeyFile(tmp_path / "keys.json", now=0.0), KeyFile(tmp_path / "keys.json", now=0.0)
    ring = Keyring()
    theirs.add(KEY)
    ours.refresh(ring, now=0.0)
    theirs.revoke("k1")
    with pytest.raises(ValueError, match="has no key 'k1'"):
        ours.add(Key(key_id="f", digest=digest_of("f"), scope=Scope.FEEDBACK, opener="k1"))
    with pytest.raises(ValueError, match="has no key 'k1'"):
        ours.revoke("k1")
    ours.load()
    assert ours.refresh(ring, now=0.0)
    assert ring.authenticate(SECRET, now=0.0) is None


def test_a_ring_keeps_what_it_has_when_the_file_is_damaged_or_gone(tmp_path: Path) -> None:
    file, ring = KeyFile(tmp_path / "keys.json", now=0.0), Keyring()
    file.add(KEY)
    file.refresh(ring, now=0.0)
    good = file.path.read_bytes()
    file.path.write_bytes(b"{")
    with pytest.raises(DamagedError):
        file.refresh(ring, now=0.0)
    assert not file.refresh(ring, now=0.0)  # said once
    file.path.unlink()
    with pytest.raises(ConfigError):
        file.refresh(ring, now=0.0)
    assert not file.refresh(ring, now=0.0)
    assert ring.authenticate(SECRET, now=0.0) == KEY
    file.path.write_bytes(good)
    assert file.refresh(ring, now=0.0)


def test_two_processes_do_not_write_over_each_other(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", now=0.0)
    file.add(KEY)
    with (tmp_path / ".keys.json.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="try again"):
            file.add(key_of("k2"))
    file.add(key_of("k2"))
    assert len(file.load()) == 2
