"""The router after any reports in any order, compared with a plain rule that walks over all engines.

No call goes to wrong weights or a dead engine, sessions stay on their engine where they may, and both choices agree.
"""

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.gateway.routing.hash_ring import HashRing
from etude.gateway.routing.router import (
    FRESH_CALLS,
    FRESH_FACTOR,
    STICKY_CALLS,
    STICKY_FACTOR,
    Choice,
    EngineEntry,
    EngineState,
    EngineView,
    HealthLimits,
    Reason,
    Router,
)
from etude.protocols import EngineHealth

HEALTHY, SUSPECT = EngineState.HEALTHY, EngineState.SUSPECT
MAX_LAG = 2
LIMITS = HealthLimits(dead_s=5.0, max_lag=MAX_LAG, grace_s=4.0)


class RouterMachine(RuleBasedStateMachine):
    """Facts in random order; after each, no choice is one that must not be."""

    NAMES = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(LIMITS, max_sessions=6)
        self.sent: dict[str, EngineHealth | None] = {}  # engine → its last report
        self.announced: dict[int, str] = {}
        self.calls = Counter[str]()  # ours, also at engines that were removed
        self.others = Counter[str]()  # of other gateways
        self.homes: dict[str, str] = {}  # session → engine
        self.now = 0.0

    @rule(name=NAMES, region=st.sampled_from(["", "eu"]))
    def add(self, name: str, region: str) -> None:
        if name not in self.sent:
            self.router.add(EngineEntry(name=name, url=name, region=region), self.now)
            self.sent[name] = None
            self.others[name] = 0

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.sent:
            del self.sent[name]
            self.router.remove(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.router.due(self.now)
        assert set(due) <= set(self.sent)
        for name in due:
            self.router.failed(name, "poll", self.now, in_call=False)

    @rule(name=NAMES, version=st.integers(0, 6), wrong=st.booleans(), running=st.integers(0, 9))
    def report(self, name: str, version: int, wrong: bool, running: int) -> None:
        digest = "wrong" if wrong else f"digest {version}"
        sent = EngineHealth(version=version, digest=digest, running=running // 2, waiting=running - running // 2)
        self.router.report(name, sent, self.now)
        if name in self.sent:
            self.sent[name] = sent
            self.others[name] = max(0, running - self.calls[name])

    @rule(name=NAMES)
    def answer(self, name: str) -> None:
        self.router.answered(name, self.now, version=0)

    @rule(name=NAMES)
    def fail(self, name: str) -> None:
        self.router.failed(name, "call", self.now, in_call=True)

    @rule(version=st.integers(0, 6))
    def announce(self, version: int) -> None:
        self.router.announce(version, f"digest {version}", self.now)
        self.announced[version] = f"digest {version}"

    @rule(name=NAMES, count=st.integers(1, 12))
    def begin(self, name: str, count: int) -> None:
        if name in self.sent:
            self.calls[name] += count
            for _ in range(count):
                self.router.began(name)

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        if self.calls[name]:
            self.calls[name] -= 1
            self.router.ended(name)

    @rule(session=st.sampled_from(["s", "t", "u"]))
    def end_session(self, session: str) -> None:
        self.router.forget(session)
        self.homes.pop(session, None)

    def load(self, view: EngineView) -> int:
        return self.others[view.entry.name] + self.calls[view.entry.name]

    def plain_rule(
        self, session: str, min_version: int | None, region: str | None, avoid: set[str], digests: Sequence[str] | None
    ) -> Choice:
        """The choice of the plain rule, which looks at every engine."""
        able = [view for view in self.router.engines() if view.state in (HEALTHY, SUSPECT)]
        if digests is not None:
            holding = ([view for view in able if view.health and view.health.digest == digest] for digest in digests)
            able = next((holders for holders in holding if {view.entry.name for view in holders} - avoid), [])
        if min_version is not None:
            versions = [view.health.version for view in able if view.health]
            able = [view for view in able if view.health and view.health.version >= min_version]
            if versions and not able:
                return Choice(name=None, reason=Reason.VERSION, newest=max(versions))
        able = [view for view in able if view.entry.name not in avoid]
        if not able:
            return Choice(name=None, reason=Reason.UNAVAILABLE)

        def rank(view: EngineView) -> tuple[bool, bool]:
            return view.state is not HEALTHY, region is not None and view.entry.region != region

        best = min(map(rank, able))
        loads = {view.entry.name: self.load(view) for view in able if rank(view) == best}
        least, last = min(loads.values()), self.homes.get(session)
        if last in loads and loads[last] <= STICKY_FACTOR * least + STICKY_CALLS:
            return Choice(name=last, reason=Reason.LAST_RESORT if best[0] else Reason.AFFINITY)
        ring, calm = HashRing(), [name for name, load in loads.items() if load <= FRESH_FACTOR * least + FRESH_CALLS]
        for name in calm:
            ring.add(name)
        return Choice(name=ring.nearest(session, calm), reason=Reason.LAST_RESORT if best[0] else Reason.FRESH)

    @rule(
        session=st.sampled_from(["", "s", "t", "u"]),
        min_version=st.none() | st.integers(0, 6),
        region=st.none() | st.sampled_from(["", "eu"]),
        avoid=st.sets(NAMES),
        digests=st.none() | st.lists(st.sampled_from(["wrong", *map("digest {}".format, range(7))]), max_size=2),
    )
    def choose(
        self, session: str, min_version: int | None, region: str | None, avoid: set[str], digests: list[str] | None
    ) -> None:
        expected = self.plain_rule(session, min_version, region, avoid, digests)
        choice = self.router.choose(session, min_version=min_version, region=region, avoid=avoid, digests=digests)
        assert choice == expected
        if session and choice.reason is Reason.FRESH and choice.name:
            self.homes[session] = choice.name
        if digests is None:
            self.check(choice, session, min_version, region, avoid)

    def check(self, choice: Choice, session: str, min_version: int | None, region: str | None, avoid: set[str]) -> None:
        """Check the properties that every choice must have."""
        views = {view.entry.name: view for view in self.router.engines()}
        able = [
            view
            for name, view in views.items()
            if name not in avoid
            and view.state in (HEALTHY, SUSPECT)
            and (min_version is None or (view.health is not None and view.health.version >= min_version))
        ]
        if choice.name is None:
            assert not able
            assert (choice.reason is Reason.VERSION) == (choice.newest is not None)
            return
        chosen = views[choice.name]
        assert chosen in able
        if any(view.state is HEALTHY for view in able):
            assert chosen.state is HEALTHY
            assert choice.reason in (Reason.AFFINITY, Reason.FRESH)
            near = [view for view in able if view.state is HEALTHY and view.entry.region == region]
            assert not near or chosen.entry.region == region
        if session and chosen.state is HEALTHY:
            assert self.router.choose(session, min_version=min_version, region=region, avoid=avoid).name == choice.name

    @invariant()
    def queues_of_engines_that_serve_are_counted(self) -> None:
        views = [view for view in self.router.engines() if view.state in (HEALTHY, SUSPECT)]
        assert self.router.waiting() == sum(view.health.waiting for view in views if view.health)

    @invariant()
    def nothing_wrong_is_served(self) -> None:
        newest = max(self.announced, default=None)
        for view in self.router.engines():
            truth = self.sent[view.entry.name]
            assert view.reason
            assert view.health == truth
            if view.state not in (HEALTHY, SUSPECT):
                continue
            if truth is not None and newest is not None:
                assert self.announced.get(truth.version, truth.digest) == truth.digest
                assert truth.version >= newest - MAX_LAG
            assert view.state is SUSPECT or truth is not None


RouterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRouter = RouterMachine.TestCase
