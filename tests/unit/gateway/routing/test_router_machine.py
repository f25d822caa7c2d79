"""Whatever is reported in whatever order: no call goes to wrong or dead weights, and sessions stay where they may."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.gateway.routing.router import EngineEntry, EngineState, HealthLimits, Reason, Router
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
        self.now = 0.0

    @rule(name=NAMES, region=st.sampled_from(["", "eu"]))
    def add(self, name: str, region: str) -> None:
        if name not in self.sent:
            self.router.add(EngineEntry(name=name, url=name, region=region), self.now)
            self.sent[name] = None

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
        sent = EngineHealth(version=version, digest=digest, running=running, waiting=0)
        self.router.report(name, sent, self.now)
        if name in self.sent:
            self.sent[name] = sent

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

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sent)))
        self.router.began(name)
        self.router.ended(name)

    @rule(
        session=st.sampled_from(["", "s", "t", "u"]),
        min_version=st.none() | st.integers(0, 6),
        region=st.none() | st.sampled_from(["", "eu"]),
        avoid=st.sets(NAMES),
    )
    def choose(self, session: str, min_version: int | None, region: str | None, avoid: set[str]) -> None:
        choice = self.router.choose(session, min_version=min_version, region=region, avoid=avoid)
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
