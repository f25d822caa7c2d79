"""The page pool: nothing lost, nothing shared that can change, chains evicted from their ends."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.engines.native.pages import PAGE, PageNode, PagePool


def words(*letters: int) -> list[int]:
    """Tokens of whole pages: each letter fills one."""
    return [letter for letter in letters for _ in range(PAGE)]


def fill(pool: PagePool, letters: Sequence[int]) -> list[int]:
    """Acquire a chain of pages: reuse those in the index, and take and index new ones for the rest."""
    chain = pool.find(words(*letters), len(letters))
    for node in chain:
        pool.retain(node.page)
    pages = [node.page for node in chain]
    leaf: PageNode | None = chain[-1] if chain else pool.root
    for letter in letters[len(chain) :]:
        pages.append(pool.take())
        assert leaf is not None
        leaf = pool.enter(leaf, tuple(words(letter)), pages[-1])
    return pages


def test_a_chain_is_found_as_far_as_its_tokens_are_the_same() -> None:
    pool = PagePool(8)
    pages = fill(pool, [1, 2, 3])
    assert [node.page for node in pool.find(words(1, 2, 4), 3)] == pages[:2]
    assert [node.page for node in pool.find(words(1, 2, 3), 2)] == pages[:2]
    assert pool.find(words(2, 3), 2) == []
    other_in_the_last_token = [*words(1)[:-1], 9]
    assert pool.find(other_in_the_last_token, 1) == []


def test_a_page_of_a_chain_is_never_written() -> None:
    pool = PagePool(2)
    private = pool.take()
    assert pool.is_mutable(private)
    pool.enter(pool.root, tuple(words(1)), private)
    assert not pool.is_mutable(private)


def test_idle_pages_are_reused_until_others_need_the_room() -> None:
    pool = PagePool(4)
    pages = fill(pool, [1, 2])
    pool.release(pages)
    assert (pool.available, fill(pool, [1, 2]), pool.evicted) == (4, pages, 0)
    pool.release(pages)
    taken = [pool.take() for _ in range(3)]
    pool.check([taken])
    assert pool.evicted == 1
    # The end of the chain is gone, its beginning can still be read.
    assert [node.page for node in pool.find(words(1, 2), 2)] == pages[:1]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = PagePool(4)
    for letters in ([1, 2], [3, 4], [1, 2]):
        pool.release(fill(pool, letters))
    taken = [pool.take(), pool.take()]
    assert len(pool.find(words(1, 2), 2)) == 2
    assert pool.find(words(3, 4), 2) == []
    pool.check([taken])


def test_no_chain_is_found_under_another_version() -> None:
    pool = PagePool(4)
    pool.release(fill(pool, [1, 2]))
    pool.serve(7)
    assert pool.find(words(1, 2), 2) == []
    pool.serve(0)
    assert len(pool.find(words(1, 2), 2)) == 2


def test_chains_of_other_versions_are_evicted_before_those_that_serve() -> None:
    pool = PagePool(4)
    pool.serve(1)
    pool.release(fill(pool, [1, 2]))
    pool.serve(2)
    pool.release(fill(pool, [1, 2]))
    pool.serve(1)
    pool.release(fill(pool, [1, 2]))
    pool.serve(2)  # the chain of version 1 was used last, and is of no use now
    taken = [pool.take(), pool.take()]
    assert len(pool.find(words(1, 2), 2)) == 2
    pool.check([taken])


def test_of_two_pages_with_the_same_tokens_the_first_stays_while_it_is_held() -> None:
    pool = PagePool(4)
    first, second = pool.take(), pool.take()
    node = pool.enter(pool.root, tuple(words(1)), first)
    assert pool.enter(pool.root, tuple(words(1)), second) is node
    assert [node.page for node in pool.find(words(1), 1)] == [first]
    pool.check([[first], [second]])
    # What follows the private page is still found: by its tokens, it follows the first one as well.
    third = pool.take()
    assert node is not None
    pool.enter(node, tuple(words(2)), third)
    assert [node.page for node in pool.find(words(1, 2), 2)] == [first, third]
    pool.release([second, third])
    assert pool.available == 3


def test_of_two_pages_with_the_same_tokens_an_idle_one_makes_way() -> None:
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.enter(pool.root, tuple(words(1)), first)
    pool.release([first])
    pool.enter(pool.root, tuple(words(1)), second)
    assert [node.page for node in pool.find(words(1), 1)] == [second]
    pool.check([[second]])
    assert (pool.take(), pool.evicted) == (first, 0)


def test_nothing_is_indexed_behind_a_page_that_was_evicted() -> None:
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    node = pool.enter(pool.root, tuple(words(1)), first)
    assert pool.enter(pool.root, tuple(words(1)), second) is node is not None
    pool.release([first])
    taken = [second, pool.take(), pool.take()]
    assert pool.enter(node, tuple(words(2)), taken[1]) is None
    pool.check([taken])


def test_a_chain_ends_at_a_page_that_was_evicted_and_goes_on_when_it_is_there_again() -> None:
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    node = pool.enter(pool.root, tuple(words(1)), first)
    assert pool.enter(pool.root, tuple(words(1)), second) is node is not None
    third = pool.take()
    pool.enter(node, tuple(words(2)), third)
    pool.release([first])
    assert pool.take() == first  # the beginning goes although the end is held: its holder has a copy
    pool.check([[second, third], [first]])
    assert pool.find(words(1, 2), 2) == []
    pool.enter(pool.root, tuple(words(1)), second)
    assert [node.page for node in pool.find(words(1, 2), 2)] == [second, third]
    pool.check([[second, third], [first]])


def test_a_free_page_cannot_be_retained() -> None:
    with pytest.raises(AssertionError, match="free"):
        PagePool(1).retain(0)


@settings(max_examples=150, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["fill", "fill", "release", "serve"]), st.lists(st.integers(0, 2), max_size=4)),
        max_size=60,
    ),
    count=st.integers(1, 8),
)
def test_whatever_happens_no_page_is_lost(operations: list[tuple[str, list[int]]], count: int) -> None:
    pool, holders, content, version = PagePool(count), list[list[int]](), dict[int, tuple[int, tuple[int, ...]]](), 0
    for name, letters in operations:
        if name == "fill" and pool.available >= len(letters):
            for depth, node in enumerate(pool.find(words(*letters), len(letters))):
                assert content[node.page] == (version, tuple(letters[: depth + 1]))
            holders.append(fill(pool, letters))
            content |= {page: (version, tuple(letters[: depth + 1])) for depth, page in enumerate(holders[-1])}
        elif name == "release" and holders:
            pool.release(holders.pop(len(letters) % len(holders)))
        elif name == "serve":
            pool.serve(version := len(letters))
        pool.check(holders)
    for holder in holders:
        pool.release(holder)
    pool.check([])
    assert pool.available == count
