"""Votes that were already given."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.judge.votes import SPARED, StoredVotes, Vote, VoteCache, cache_key

KEY, OTHER = cache_key("one"), cache_key("other")
VOTE = Vote(score=3, reason="é", descending=True)


def test_a_vote_is_found_again_by_another_process(tmp_path: Path) -> None:
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        assert cache.get(KEY) is None
        cache.put(KEY, VOTE)
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        assert cache.get(KEY) == VOTE
        assert cache.get(OTHER) is None
        assert cache.get(KEY) == VOTE
        assert (cache.hits, cache.misses) == (2, 1)
    assert cache.get(KEY) is None  # it is closed
    assert (cache.hits, cache.misses) == (2, 2)


@pytest.mark.parametrize("damage", ["vote = x'00'", "sum = x'00'", "vote = '[5, \"\", false]'", "vote = NULL"])
def test_a_damaged_entry_is_a_miss_and_is_gone(tmp_path: Path, damage: str) -> None:
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        cache.put(KEY, VOTE)
        cache.put(OTHER, VOTE)
    with closing(sqlite3.connect(tmp_path / "judge.db")) as database, database:
        try:
            database.execute(f"UPDATE votes SET {damage} WHERE key = ?", (KEY,))
        except sqlite3.IntegrityError:
            return  # the schema itself refuses
    database.close()
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        assert cache.get(KEY) is None
        assert cache.get(OTHER) == VOTE
        assert len(cache) == 1


def test_an_entry_of_another_key_is_a_miss(tmp_path: Path) -> None:
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        cache.put(KEY, VOTE)
    with closing(sqlite3.connect(tmp_path / "judge.db")) as database, database:
        database.execute("UPDATE votes SET key = ?", (OTHER,))
    database.close()
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        assert cache.get(OTHER) is None


@pytest.mark.parametrize("junk", [b"", b"no database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_begun_anew(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "judge.db").write_bytes(junk)
    with VoteCache(tmp_path / "judge.db", 10) as cache:
        cache.put(KEY, VOTE)
        assert cache.get(KEY) == VOTE


def test_what_was_not_used_for_longest_makes_way() -> None:
    with VoteCache(None, 3) as cache:
        keys = [cache_key(str(number)) for number in range(4)]
        for key in keys[:3]:
            cache.put(key, VOTE)
        assert cache.get(keys[0]) == VOTE
        cache.put(keys[3], VOTE)
        assert [cache.get(key) is not None for key in keys] == [True, False, True, True]
        assert len(cache) == 3


def test_a_large_cache_makes_room_for_several_at_once() -> None:
    entries = 3 * SPARED + 1
    with VoteCache(None, entries) as cache:
        for number in range(entries + 1):
            cache.put(cache_key(str(number)), VOTE)
        assert len(cache) == entries + 1 - 3


def test_a_cache_in_memory_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with VoteCache(None, 3) as cache:
        cache.put(KEY, VOTE)
    assert not list(tmp_path.iterdir())


def test_half_of_a_pair_in_a_reason_becomes_a_question_mark() -> None:
    with VoteCache(None, 3) as cache:
        cache.put(KEY, Vote(score=3, reason="half \ud83d"))
        assert cache.get(KEY) == Vote(score=3, reason="half ?")


def test_people_read_votes_from_every_cache_that_can_be_read(tmp_path: Path) -> None:
    first, second, junk, missing = (tmp_path / f"judge-{number}.db" for number in range(4))
    better = Vote(score=5, reason="better")
    with VoteCache(first, 10) as cache:
        cache.put(KEY, VOTE)
        cache.put(OTHER, VOTE)
    with closing(sqlite3.connect(first)) as database, database:
        database.execute("UPDATE votes SET sum = x'00' WHERE key = ?", (OTHER,))
    with VoteCache(second, 10) as cache:
        cache.put(KEY, better)
        cache.put(OTHER, better)
    junk.write_bytes(b"no database")
    with StoredVotes([missing, junk, first, second]) as stored:
        assert (stored.get(KEY), stored.get(OTHER), stored.get(cache_key("third"))) == (VOTE, better, None)
    assert stored.get(KEY) is None  # it is closed
    assert not missing.exists()


def test_the_newest_vote_under_a_key_counts() -> None:
    with VoteCache(None, 3) as cache:
        cache.put(KEY, VOTE)
        cache.put(KEY, Vote(score=5, reason="better"))
        assert (cache.get(KEY), len(cache)) == (Vote(score=5, reason="better"), 1)


def test_a_cache_of_no_entries_keeps_nothing() -> None:
    with VoteCache(None, 0) as cache:
        cache.put(KEY, VOTE)
        assert cache.get(KEY) is None


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_keys_are_equal_for_equal_parts_alone(one: list[str], two: list[str]) -> None:
    assert (cache_key(*one) == cache_key(*two)) == (one == two)


def test_a_key_may_be_of_half_of_a_pair() -> None:
    assert cache_key("\ud800") != cache_key("\ud801")
