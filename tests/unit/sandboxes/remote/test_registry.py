"""The registry of leased sandboxes: counted, renewed and expired correctly, for events in any order."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.errors import SandboxError, SandboxesBusy
from etude.sandbox_spec import SandboxLimits
from etude.sandboxes.remote.principals import Quota, RegisteredSandbox, SandboxRegistry

LEASE_S, LIMIT, TTL_S = 10.0, 3, 35.0
EACH = SandboxLimits(memory_bytes=5, disk_bytes=5, processes=5, cpus=5.0)
TOTAL = SandboxLimits(memory_bytes=9, disk_bytes=15, processes=15, cpus=15.0)
QUOTA = Quota(sandboxes=LIMIT, each=EACH, total=TOTAL)
helds = st.builds(RegisteredSandbox, st.sampled_from(["a", "b"]), st.sampled_from(["1", "2", "3", "4"]))


class Model(RuleBasedStateMachine):
    """Compares the registry with a dictionary of the time of each sandbox's last request."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = SandboxRegistry(lease_s=LEASE_S, quotas={"a": QUOTA, "b": QUOTA})
        self.now = 0.0
        self.born: dict[RegisteredSandbox, float] = {}
        self.memory: dict[RegisteredSandbox, int] = {}
        self.asked_for: dict[RegisteredSandbox, float] = {}
        self.requests: dict[RegisteredSandbox, int] = {}

    @rule(needed=st.lists(helds, max_size=3, unique=True), memory=st.integers(1, 5))
    def take(self, needed: list[RegisteredSandbox], memory: int) -> None:
        limits = SandboxLimits(memory_bytes=memory, disk_bytes=1, processes=1, cpus=1.0)
        if any(registered in self.born for registered in needed):
            with pytest.raises(ValueError, match="is there already"):
                self.registry.take(needed, limits, TTL_S, self.now)
            return
        fits = all(
            self.count(holder) + sum(registered.holder == holder for registered in needed) <= LIMIT for holder in "ab"
        )
        if not fits:
            with pytest.raises(SandboxError, match=r"of 3 sandboxes|of 9"):
                self.registry.take(needed, limits, TTL_S, self.now)
            return
        used = {
            holder: sum(self.memory[registered] for registered in self.born if registered.holder == holder)
            for holder in "ab"
        }
        if any(
            used[each.holder] + memory * sum(registered.holder == each.holder for registered in needed) > 9
            for each in needed
        ):
            with pytest.raises(SandboxError, match=r"memory_bytes=\d of 9"):
                self.registry.take(needed, limits, TTL_S, self.now)
            return
        self.registry.take(needed, limits, TTL_S, self.now)
        for registered in needed:
            self.memory[registered] = memory
            self.born[registered] = self.asked_for[registered] = self.now
            self.requests[registered] = 0

    @rule(registered=helds)
    def begin(self, registered: RegisteredSandbox) -> None:
        assert self.registry.begin(registered, self.now) == (registered in self.born)
        if registered in self.born:
            self.requests[registered] += 1
            self.asked_for[registered] = self.now

    @rule(registered=helds)
    def end(self, registered: RegisteredSandbox) -> None:
        if self.requests.get(registered):
            self.registry.end(registered, self.now)
            self.requests[registered] -= 1
            self.asked_for[registered] = self.now

    @rule(needed=st.lists(helds, max_size=4, unique=True))
    def renew(self, needed: list[RegisteredSandbox]) -> None:
        assert self.registry.renew(needed, self.now) == [
            registered for registered in needed if registered not in self.born
        ]
        self.asked_for.update({registered: self.now for registered in needed if registered in self.born})

    @rule(registered=helds)
    def drop(self, registered: RegisteredSandbox) -> None:
        self.registry.drop(registered)
        for facts in (self.born, self.memory, self.asked_for, self.requests):
            facts.pop(registered, None)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds_what_it_should(self) -> None:
        assert len(self.registry) == len(self.born)
        assert all(registered in self.registry for registered in self.born)
        due = {registered for registered in self.born if self.now >= self.born[registered] + TTL_S}
        due |= {
            registered
            for registered in self.born
            if not self.requests[registered] and self.now >= self.asked_for[registered] + LEASE_S
        }
        assert set(self.registry.due(self.now)) == due

    def count(self, holder: str) -> int:
        return sum(registered.holder == holder for registered in self.born)


TestHoldings = Model.TestCase


def test_what_all_holders_have_may_be_bounded() -> None:
    registry = SandboxRegistry(lease_s=LEASE_S, quotas={"a": QUOTA, "b": QUOTA}, most=4)
    one = SandboxLimits(memory_bytes=1, disk_bytes=1, processes=1, cpus=1.0)
    registry.take([RegisteredSandbox("a", name) for name in "123"], one, TTL_S, 0.0)
    assert (registry.places("a"), registry.places("b")) == (0, 1)
    with pytest.raises(SandboxesBusy, match="3 of 4 sandboxes of this server"):
        registry.take([RegisteredSandbox("b", name) for name in "12"], one, TTL_S, 0.0)
    registry.drop(RegisteredSandbox("a", "1"))
    assert (registry.places("a"), registry.places("b")) == (1, 2)
