"""What is held is counted, renewed and in the end given up, whatever order things happen in."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.errors import SandboxError
from etude.sandbox_spec import SandboxLimits
from etude.sandboxes.remote.holdings import Held, Holdings, Quota

LEASE_S, LIMIT, TTL_S = 10.0, 3, 35.0
EACH = SandboxLimits(memory_bytes=5, disk_bytes=5, processes=5, cpus=5.0)
TOTAL = SandboxLimits(memory_bytes=9, disk_bytes=15, processes=15, cpus=15.0)
QUOTA = Quota(sandboxes=LIMIT, each=EACH, total=TOTAL)
helds = st.builds(Held, st.sampled_from(["a", "b"]), st.sampled_from(["1", "2", "3", "4"]))


class Model(RuleBasedStateMachine):
    """The same, told by a dictionary of when each was last asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.holdings = Holdings(lease_s=LEASE_S, quotas={"a": QUOTA, "b": QUOTA})
        self.now = 0.0
        self.born: dict[Held, float] = {}
        self.memory: dict[Held, int] = {}
        self.asked: dict[Held, float] = {}
        self.requests: dict[Held, int] = {}

    @rule(wanted=st.lists(helds, max_size=3, unique=True), memory=st.integers(1, 5))
    def take(self, wanted: list[Held], memory: int) -> None:
        limits = SandboxLimits(memory_bytes=memory, disk_bytes=1, processes=1, cpus=1.0)
        if any(held in self.born for held in wanted):
            with pytest.raises(ValueError, match="is there already"):
                self.holdings.take(wanted, limits, TTL_S, self.now)
            return
        fits = all(self.count(holder) + sum(held.holder == holder for held in wanted) <= LIMIT for holder in "ab")
        if not fits:
            with pytest.raises(SandboxError, match="of 3 sandboxes"):
                self.holdings.take(wanted, limits, TTL_S, self.now)
            return
        used = {holder: sum(self.memory[held] for held in self.born if held.holder == holder) for holder in "ab"}
        if any(used[each.holder] + memory * sum(held.holder == each.holder for held in wanted) > 9 for each in wanted):
            with pytest.raises(SandboxError, match=r"memory_bytes=\d of 9"):
                self.holdings.take(wanted, limits, TTL_S, self.now)
            return
        self.holdings.take(wanted, limits, TTL_S, self.now)
        for held in wanted:
            self.memory[held] = memory
            self.born[held] = self.asked[held] = self.now
            self.requests[held] = 0

    @rule(held=helds)
    def begin(self, held: Held) -> None:
        assert self.holdings.begin(held, self.now) == (held in self.born)
        if held in self.born:
            self.requests[held] += 1
            self.asked[held] = self.now

    @rule(held=helds)
    def end(self, held: Held) -> None:
        if self.requests.get(held):
            self.holdings.end(held, self.now)
            self.requests[held] -= 1
            self.asked[held] = self.now

    @rule(wanted=st.lists(helds, max_size=4, unique=True))
    def renew(self, wanted: list[Held]) -> None:
        assert self.holdings.renew(wanted, self.now) == [held for held in wanted if held not in self.born]
        self.asked.update({held: self.now for held in wanted if held in self.born})

    @rule(held=helds)
    def drop(self, held: Held) -> None:
        self.holdings.drop(held)
        for facts in (self.born, self.memory, self.asked, self.requests):
            facts.pop(held, None)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds_what_it_should(self) -> None:
        assert len(self.holdings) == len(self.born)
        assert all(held in self.holdings for held in self.born)
        due = {held for held in self.born if self.now >= self.born[held] + TTL_S}
        due |= {held for held in self.born if not self.requests[held] and self.now >= self.asked[held] + LEASE_S}
        assert set(self.holdings.due(self.now)) == due

    def count(self, holder: str) -> int:
        return sum(held.holder == holder for held in self.born)


TestHoldings = Model.TestCase
