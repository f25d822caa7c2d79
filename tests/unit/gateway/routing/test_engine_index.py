"""The index answers like a plain list of engines, after any sequence of changes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from etude.gateway.routing.engine_index import EngineIndex, EngineKind

NAMES = ["a", "b", "c", "d", "e"]
KINDS = [EngineKind(True, "here", 1, "x"), EngineKind(True, "there", 1, "x"), EngineKind(False, "here", None, None)]
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(NAMES), st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("load"), st.sampled_from(NAMES), st.integers(0, 2)),
        st.tuples(st.just("discard"), st.sampled_from(NAMES)),
    ),
    max_size=12,
)


def test_the_least_load_is_over_all_kinds_without_the_engines_to_avoid() -> None:
    index = EngineIndex()
    for name, kind, load in zip("abc", (KINDS[0], KINDS[1], KINDS[1]), (3, 1, 2), strict=True):
        index.put(name, kind, load, 0)
    for avoid, least in (("", 1), ("b", 2), ("bc", 3), ("abc", None)):
        assert index.tier(KINDS[:2], set(avoid)).least_load() == least


@given(CHANGES, st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(KINDS)), st.integers(0, 4))
def test_a_tier_is_what_a_plain_list_has(
    changes: list[tuple[Any, ...]], avoid: set[str], kinds: set[EngineKind], most: int
) -> None:
    index, plain = EngineIndex(), dict[str, tuple[EngineKind, int, int]]()
    for what, name, *facts in changes:
        if what == "put":
            index.put(name, *facts)
            kind, load, waiting = facts
            plain[name] = kind, load, waiting
        elif what == "discard":
            index.discard(name)
            plain.pop(name, None)
        else:
            index.add_load(name, *facts)
            if name in plain:
                kind, load, waiting = plain[name]
                plain[name] = kind, load + facts[0], waiting
    assert set(index.kinds) == {kind for kind, _, _ in plain.values()}
    assert index.waiting == sum(waiting for _, _, waiting in plain.values())
    chosen = [kind for kind in index.kinds if kind in kinds]
    loads = {name: load for name, (kind, load, _) in plain.items() if kind in chosen and name not in avoid}
    tier = index.tier(chosen, avoid)
    assert (sorted(tier), len(tier), tier.least_load()) == (
        sorted(loads),
        len(loads),
        min(loads.values(), default=None),
    )
    near = tier.within(most)
    assert sorted(near) == sorted(name for name, load in loads.items() if load <= most)
    assert len(near) == len(list(near))
    assert [name in near for name in NAMES] == [name in loads and loads[name] <= most for name in NAMES]
    for kind in chosen:
        by_load = [plain[name][1] for name in index.tier([kind], ())]
        assert by_load == sorted(by_load), "the least busy one comes first"
