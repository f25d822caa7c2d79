"""The arithmetic of emulated links: rate, delay, loss and queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sync.links import Link, LinkShape, Traffic


def shape(*, delay_s: float = 0.04, bits_per_s: float = 8e6, loss: float = 0.0, queue_bytes: int = 10_000) -> LinkShape:
    return LinkShape(delay_s=delay_s, bits_per_s=bits_per_s, loss=loss, queue_bytes=queue_bytes)


def test_a_packet_takes_its_transmission_and_the_delay() -> None:
    assert Link(shape(), "a").send(1000, 5.0) == pytest.approx(5.0 + 0.001 + 0.04)


def test_packets_wait_for_those_before_them() -> None:
    link = Link(shape(), "a")
    assert [link.send(1000, 0.0) for _ in range(3)] == pytest.approx([0.041, 0.042, 0.043])
    assert link.send(1000, 1.0) == pytest.approx(1.041)


def test_what_the_queue_cannot_hold_is_dropped() -> None:
    link = Link(shape(queue_bytes=2500), "a")
    arrivals = [link.send(1000, 0.0) for _ in range(4)]
    assert arrivals[2:] == [None, None]
    assert link.traffic == Traffic(packets=4, size_bytes=4000, lost=0, dropped=2)
    assert link.send(1000, 0.001) is not None  # one of them has left


def test_a_cut_link_carries_nothing_until_it_is_healed() -> None:
    link = Link(shape(), "a")
    assert link.send(1000, 0.0) is not None
    link.cut()
    assert link.send(1000, 0.1) is None
    link.heal()
    assert link.send(1000, 0.2) is not None
    assert link.traffic == Traffic(packets=2, size_bytes=2000, cut=1)


def test_losses_have_the_right_share_and_follow_the_seed() -> None:
    def lost(seed: str) -> list[bool]:
        link = Link(shape(loss=0.1, queue_bytes=1 << 30), seed)
        return [link.send(100, float(at)) is None for at in range(5000)]

    assert 400 < sum(lost("a")) < 600
    assert lost("a") == lost("a")
    assert lost("a") != lost("b")


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=60),
    pauses=st.lists(st.floats(0, 0.01), min_size=60, max_size=60),
)
def test_arrivals_keep_order_and_never_exceed_the_rate(sizes: list[int], pauses: list[float]) -> None:
    link = Link(shape(queue_bytes=20_000), "a")
    now_s, arrived = 0.0, []
    for size, pause_s in zip(sizes, pauses, strict=False):
        now_s += pause_s
        arrival_s = link.send(size, now_s)
        if arrival_s is not None:
            assert arrival_s >= now_s + 0.04
            arrived.append((arrival_s, size))
    times = [at for at, _ in arrived]
    assert times == sorted(times)
    carried_bits = 8 * sum(size for _, size in arrived[1:])
    assert carried_bits <= (times[-1] - times[0]) * 8e6 + 1e-3


@pytest.mark.parametrize("wrong", [{"loss": 1.0}, {"bits_per_s": 0.0}, {"delay_s": -1.0}, {"queue_bytes": 0}])
def test_links_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not negative"):
        shape(**wrong)  # type: ignore[arg-type]  # ints among floats
