"""Whatever comes and goes: a line is in order, and an agenda knows what comes next."""

from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox_spec import SandboxSpec
from etude.sandboxes.pool.lease_requests import Agenda, Claim, Line, Want
from etude.sandboxes.pool.slots import Key, PoolLimits, Slots


def key(name: str) -> Key:
    return Key(digest=name, spec=SandboxSpec())


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1.0, 2.0, 3.0]), st.booleans()), max_size=300))
def test_the_agenda_tells_the_latest_time_of_each(entries: list[tuple[int, float, bool]]) -> None:
    agenda, claims = Agenda(), [Claim(number=n, want=Want(key=key("k")), asked_at=0.0) for n in range(6)]
    times: dict[Claim, float] = {}
    for number, time, keep in entries:
        if keep:
            agenda.set(claims[number], time)
            times[claims[number]] = time
        else:
            agenda.clear(claims[number])
            times.pop(claims[number], None)
        assert agenda.next_time() == min(times.values(), default=None)
    assert set(agenda.pop_due(2.0)) == {claim for claim, time in times.items() if time <= 2.0}
    assert agenda.next_time() in (None, 3.0)


@given(st.lists(st.tuples(st.integers(-1, 1), st.sampled_from("ab")), max_size=20), st.data())
def test_a_line_is_in_order_for_each_key_and_in_all(asked: list[tuple[int, str]], data: st.DataObject) -> None:
    line = Line(99)
    claims = [
        Claim(number=number, want=Want(key=key(name), priority=priority), asked_at=0.0)
        for number, (priority, name) in enumerate(asked)
    ]
    for claim in claims:
        line.add(claim)
    for claim in data.draw(st.sets(st.sampled_from(claims)) if claims else st.just(set())):
        line.remove(claim)
        claims.remove(claim)
    in_order = sorted(claims, key=lambda claim: claim.order)
    assert list(line.uncovered(Slots(PoolLimits()))) == in_order
    for name in "ab":
        assert list(line.of(key(name))) == [claim for claim in in_order if claim.want.key == key(name)]
    assert line.length(urgent=True) == sum(claim.want.urgent for claim in claims)
