"""Placement of sandboxes on hosts, compared with a plain rule that walks over all hosts.

A full host gets nothing, images return to their hosts, and the same facts give the same host.
"""

from collections import Counter
from collections.abc import Container, Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.sandbox_spec import Capability
from etude.sandboxes.remote.placement import (
    FAILURES,
    LOCAL_SHARE,
    NO_IMAGE_S,
    REST,
    SANDBOX_BYTES,
    HostReport,
    HostTable,
    host_hashes,
    image_weights,
)

NAMES = ("http://a", "http://b", "http://c", "http://d")
IMAGES = ("", "one", "other")
names = st.sampled_from(NAMES)


def report(
    free: int = 100, places: int = 100_000, *, sandboxes: int = 0, is_draining: bool = False, incarnation: str = "1"
) -> HostReport:
    """A report of a host with memory for ``free`` sandboxes."""
    return HostReport(
        incarnation=incarnation,
        free_bytes=free * SANDBOX_BYTES,
        places=places,
        sandboxes=sandboxes,
        is_draining=is_draining,
    )


def table(**free: int) -> HostTable:
    """A table of hosts with so much room."""
    hosts = HostTable(list(free))
    for name, room in free.items():
        hosts.record_report(name, report(room), 0.0)
    return hosts


def image_order(image: str, hosts: Sequence[str]) -> list[str]:
    """Hosts in the order in which an image prefers them."""
    weights = dict(zip(hosts, image_weights(image, host_hashes(hosts)).tolist(), strict=True))
    return sorted(hosts, key=weights.__getitem__, reverse=True)


class Model(RuleBasedStateMachine):
    """Compares the table with a model of each host's last report and the placements since."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twin = HostTable(NAMES), HostTable(NAMES[::-1])
        self.now = 0.0
        self.reports: dict[str, HostReport] = {}
        self.placed: Counter[str] = Counter()
        self.full: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.rests_until = dict.fromkeys(NAMES, 0.0)
        self.without: dict[tuple[str, str], float] = {}
        self.present = set(NAMES)

    @rule(present=st.sets(names))
    def follow(self, present: set[str]) -> None:
        self.table.follow(present)
        self.twin.follow(sorted(present, reverse=True))
        for gone in self.present - present:
            self.reports.pop(gone, None)
            self.placed[gone] = self.failures[gone] = 0
            self.rests_until[gone] = 0.0
            self.full.discard(gone)
            self.without = {key: until_s for key, until_s in self.without.items() if key[0] != gone}
        self.present = present

    @rule(seconds=st.sampled_from([0.5, 2.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=names, free=st.integers(0, 6), places=st.integers(0, 6), is_draining=st.booleans())
    def heard(self, name: str, free: int, places: int, is_draining: bool) -> None:
        if name not in self.present:
            return
        last = report(free, places, is_draining=is_draining)
        for each in (self.table, self.twin):
            each.record_report(name, last, self.now)
        self.reports[name] = last
        self.placed[name] = 0
        self.full.discard(name)

    @rule(name=names)
    def silent(self, name: str) -> None:
        if name not in self.present:
            return
        for each in (self.table, self.twin):
            each.record_silence(name, "no answer")
        self.reports.pop(name, None)

    @rule(name=names)
    def refused(self, name: str) -> None:
        for each in (self.table, self.twin):
            each.refused(name)
        if name in self.present:
            self.full.add(name)

    @rule(name=names, times=st.integers(1, FAILURES))
    def failed(self, name: str, times: int) -> None:
        for _ in range(times):
            for each in (self.table, self.twin):
                each.failed(name, self.now)
            if name in self.reports and self.now >= self.rests_until[name]:
                self.failures[name] += 1
                if self.failures[name] >= FAILURES:
                    self.rests_until[name] = self.now + REST.delay_s(self.failures[name] - FAILURES + 1)

    @rule(name=names)
    def made(self, name: str) -> None:
        for each in (self.table, self.twin):
            each.made(name)
        self.failures[name] = 0

    @rule(name=names, image=st.sampled_from(IMAGES[1:]))
    def has_no_image(self, name: str, image: str) -> None:
        for each in (self.table, self.twin):
            each.has_no_image(name, image, self.now)
        if name in self.present:
            self.without[name, image] = self.now + NO_IMAGE_S

    def free(self, name: str) -> int:
        return self.reports[name].free_bytes // SANDBOX_BYTES - self.placed[name]

    def able(self, image: str = "") -> list[str]:
        return [
            name
            for name in NAMES
            if (last := self.reports.get(name)) is not None
            and not last.is_draining
            and name not in self.full
            and self.free(name) >= 1
            and self.placed[name] < last.places
            and self.now >= self.rests_until[name]
            and self.now >= self.without.get((name, image), 0.0)
        ]

    def plain_rule(self, image: str, tried: Container[str] = ()) -> str | None:
        able = [name for name in self.able(image) if name not in tried]
        if not able:
            return None
        freest = max(able, key=self.free)
        if not image:
            return freest
        enough = LOCAL_SHARE * self.free(freest)
        return next(name for name in image_order(image, NAMES) if name in able and self.free(name) >= enough)

    @rule(image=st.sampled_from(IMAGES), tried=st.sets(names))
    def choose(self, image: str, tried: set[str]) -> None:
        expected = self.plain_rule(image, tried)
        name = self.table.choose(image, self.now, without=tried)
        assert name == expected
        assert name == self.twin.choose(image, self.now, without=tried), "the order of names decides nothing"
        if name is not None:
            self.placed[name] += 1

    @rule(image=st.sampled_from(IMAGES), count=st.integers(1, 30))
    def share(self, image: str, count: int) -> None:
        before = self.placed.copy()
        expected = Counter[str]()
        for _ in range(count):
            if (name := self.plain_rule(image)) is not None:
                expected[name] += 1
                self.placed[name] += 1
        self.placed = before
        assert self.table.share(image, count, self.now) == expected

    @invariant()
    def nowhere_is_said_of_an_image_that_no_host_has(self) -> None:
        for image in IMAGES[1:]:
            missing = [name for name in NAMES if self.now < self.without.get((name, image), 0.0)]
            assert self.table.is_nowhere(image, self.now) == (0 < len(self.present) == len(missing))

    @invariant()
    def room_is_what_each_host_could_take(self) -> None:
        able = self.able()
        rooms = [min(self.free(name), self.reports[name].places - self.placed[name]) for name in able]
        assert self.table.room(self.now) == sum(rooms)

    @precondition(lambda self: not self.able())
    @invariant()
    def explained(self) -> None:
        assert all(name in self.table.explain("", self.now) for name in self.present)


TestHosts = Model.TestCase


@given(image=st.text(min_size=1), gone=names)
def test_a_host_that_goes_moves_no_image_but_its_own(image: str, gone: str) -> None:
    first = image_order(image, NAMES)[0]
    left = image_order(image, tuple(name for name in NAMES if name != gone))[0]
    assert gone == first or left == first


def test_images_are_spread_over_hosts_and_come_back_to_theirs() -> None:
    hosts = table(a=10_000, b=10_000, c=10_000, d=10_000)
    homes = {image: {hosts.choose(image, 0.0) for _ in range(5)} for image in map(str, range(400))}
    assert all(len(chosen) == 1 for chosen in homes.values())
    counts = Counter(next(iter(chosen)) for chosen in homes.values())
    assert min(counts.values()) > 60, "each of four hosts is the first of about a hundred"


def test_an_image_leaves_its_host_when_others_have_far_more_room() -> None:
    first, second = image_order("image", ("a", "b"))
    hosts = table(**{first: 10, second: 100})
    assert hosts.choose("image", 0.0) == second
    hosts.record_report(first, report(60), 0.0)
    assert hosts.choose("image", 0.0) == first


def test_a_burst_between_two_reports_is_spread_by_room() -> None:
    hosts = table(a=30, b=10)
    assert Counter(hosts.choose("", 0.0) for _ in range(40)) == {"a": 30, "b": 10}
    assert hosts.choose("", 0.0) is None


def test_a_host_that_fails_again_and_again_is_left_alone_for_a_while() -> None:
    hosts = table(a=100, b=10)
    for _ in range(FAILURES - 1):
        hosts.failed("a", 0.0)
    assert hosts.choose("", 0.0) == "a"
    for _ in range(20):  # all of a burst
        hosts.failed("a", 0.0)
    assert hosts.choose("", 0.5) == "b"
    assert hosts.choose("", 1.0) == "a"
    hosts.failed("a", 1.0)
    assert hosts.choose("", 2.5) == "b", "longer each time"
    hosts.made("a")
    hosts.failed("a", 4.0)
    assert hosts.choose("", 4.0) == "a", "counted in a row"


def test_a_host_without_an_image_is_left_out_for_that_one_only() -> None:
    hosts = table(a=100, b=10)
    hosts.has_no_image("a", "image", 0.0)
    assert (hosts.choose("image", 1.0), hosts.choose("", 1.0)) == ("b", "a")
    assert not hosts.is_nowhere("image", 1.0)
    hosts.has_no_image("b", "image", 0.0)
    assert hosts.is_nowhere("image", 1.0)
    hosts.record_report("b", report(10, incarnation="2"), 1.0)
    assert not hosts.is_nowhere("image", 1.0), "it was started anew, and may have it now"


def test_a_host_that_can_do_less_than_was_promised_gets_nothing() -> None:
    hosts = table(a=100, b=10, c=10)
    both = frozenset({Capability.FORK, Capability.NETWORK_OFF})
    assert hosts.agree({"b": both, "c": both | {Capability.SNAPSHOT}}, 0.0) == both
    assert hosts.agree({"a": frozenset({Capability.FORK})}, 0.0) == both
    assert hosts.choose("", 0.0) == "b"
    assert "a: it lacks network_off" in hosts.explain("", 0.0)
    hosts.agree({"a": both}, 0.0)
    assert hosts.choose("", 0.0) == "a"


def test_hosts_that_stay_keep_their_state_when_others_join_and_leave() -> None:
    hosts = table(b=3, c=100)
    assert hosts.choose("image", 0.0, without=["c"]) == "b"
    hosts.refused("c")
    hosts.follow(["a", "b", "c"])
    assert hosts.obstacles("", 0.0) == {"a": "no report yet", "c": "it is full, with 0 sandboxes"}
    assert [hosts.choose("", 0.0) for _ in range(3)] == ["b", "b", None], "its third place is taken"
    hosts.record_report("a", report(1), 0.0)
    hosts.follow(["a"])
    assert [hosts.choose("image", 0.0, without=["b"]) for _ in range(2)] == ["a", None]
    hosts.follow([])
    assert (hosts.choose("", 0.0), hosts.room(0.0), hosts.is_nowhere("image", 0.0)) == (None, 0, False)
    assert hosts.explain("", 0.0) == "none is known yet"
