"""The table of gateways, after any reports and any opened sessions.

Sessions go, evenly, to gateways that can answer. The version that admission counts is one that every gateway which may
get a session serves.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.errors import EngineUnavailable
from etude.rollouts.gateway_table import UNHEARD, GatewayTable

URLS = ("http://a", "http://b", "http://c")
GATEWAYS = st.sampled_from(URLS)


class Table(RuleBasedStateMachine):
    """Compares the table with plain sets of the reports that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.table = GatewayTable(URLS)
        self.versions: dict[str, int] = {}
        """Of gateways that answer."""
        self.open: list[str] = []

    @rule(url=GATEWAYS, version=st.integers(0, 9))
    def hear(self, url: str, version: int) -> None:
        self.versions[url] = version
        self.table.record_answer(url, version)

    @rule(url=GATEWAYS)
    def fall_silent(self, url: str) -> None:
        self.versions.pop(url, None)
        self.table.record_silence(url)

    @rule(avoid=st.sets(GATEWAYS))
    def open_session(self, avoid: set[str]) -> None:
        url = self.table.choose(avoid)
        best = set(self.versions) - avoid or set(URLS) - avoid or set(self.versions) or set(URLS)
        assert url in best
        assert self.open.count(url) == min(map(self.open.count, best))
        self.open.append(url)
        self.table.opened(url)

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        if self.open:
            url = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.table.closed(url)

    @invariant()
    def admission_counts_what_all_serve(self) -> None:
        if self.versions:
            assert self.table.version == min(self.versions.values())


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=25)


def test_equal_gateways_take_turns_also_without_sessions_of_ours() -> None:
    table = GatewayTable(URLS)
    for url in URLS:
        table.record_answer(url, 0)
    assert [table.choose() for _ in range(6)] == [*URLS, *URLS]


def test_while_none_answers_the_last_version_stands() -> None:
    table = GatewayTable(URLS[:2])
    assert table.version == UNHEARD
    table.record_answer("http://a", 5)
    table.record_answer("http://b", 7)
    assert table.version == 5
    table.record_silence("http://a")
    assert table.version == 7  # nothing is sent to the one at 5, until it is heard again
    table.record_silence("http://b")
    assert table.version == 7


def test_gateways_come_and_go_and_one_that_stays_keeps_what_is_known() -> None:
    table = GatewayTable([])
    with pytest.raises(EngineUnavailable, match="no gateway is known"):
        table.choose()
    table.follow(["http://a", "http://b"])
    table.record_answer("http://a", 3)
    table.opened("http://b")
    table.follow(["http://a", "http://c/"])
    table.closed("http://b")  # a session of one that is gone
    table.record_answer("http://b", 1)
    assert (table.urls, table.version, table.choose()) == (("http://a", "http://c"), 3, "http://a")
