"""Distant sites on one machine: the effect of links on real packets, and that nothing is left behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.sync.link_probe import measure_link
from bench.sync.links import Traffic
from bench.sync.wan import Wan, WanShape
from etude.errors import UserError
from waiting import wait_until

FAST = WanShape(rtt_s=0.02, loss=0.0, bits_per_s=40e6)
SLEEP = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


@pytest.fixture(scope="module")
def _permitted() -> None:
    try:
        with Wan(("a",)):
            pass
    except UserError as error:
        pytest.skip(str(error))


pytestmark = pytest.mark.usefixtures("_permitted")


@pytest.fixture
def wan() -> Iterator[Wan]:
    with Wan(("a", "b", "c"), FAST) as made:
        yield made


def run(wan: Wan, site: str, code: str) -> str:
    process = wan.popen(site, [sys.executable, "-c", code], stdout=subprocess.PIPE)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return printed.decode().strip()


def gone(pid: int) -> bool:
    """Return true if a process, not a child of ours, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def carried(wan: Wan, packets: int) -> Traffic:
    """Traffic from a to b, once it has at least ``packets`` packets."""
    wait_until(lambda: wan.traffic("a", "b").packets >= packets, fault=lambda: str(wan.traffic("a", "b")))
    return wan.traffic("a", "b")


def test_links_have_their_delay_and_their_rate(wan: Wan) -> None:
    for _ in range(5):  # a busy machine may be late, but not for ever
        measured = measure_link(wan, "a", "b", connections=4, seconds=1.0)
        assert measured.rtt_s >= 0.02
        if measured.rtt_s < 0.04 and 0.5 * FAST.bits_per_s < measured.bits_per_s < 1.15 * FAST.bits_per_s:
            break
    else:
        pytest.fail(f"{measured} is not {FAST}")


def test_bytes_are_counted_on_the_way_they_took(wan: Wan) -> None:
    before = wan.traffic("a", "b")
    run(
        wan,
        "a",
        "import socket; door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        f"door.sendto(bytes(1000), ({wan.address('b')!r}, 9))",
    )
    sent = carried(wan, before.packets + 1).since(before)
    assert (sent.packets, sent.size_bytes) == (1, 1028)
    assert wan.traffic("a", "c").packets == 0


def test_a_site_sees_itself_and_nothing_of_the_machine(wan: Wan) -> None:
    program = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
    names = run(wan, "a", program)
    assert "lo" in names
    assert "wan" in names
    assert "eth0" not in names
    before = wan.traffic("a", "b")
    code = f"""
import socket
server = socket.create_server(({wan.address("a")!r}, 0))
client = socket.create_connection(server.getsockname())
server.accept()[0].sendall(b"x")
print(client.recv(1))"""
    assert run(wan, "a", code) == "b'x'"
    assert wan.traffic("a", "b") == before


def test_packets_are_lost_as_the_link_says() -> None:
    with Wan(("a", "b"), WanShape(rtt_s=0.0, loss=0.5, bits_per_s=1e9, seed=3)) as wan:
        code = f"""
import socket
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(400): door.sendto(b"x", ({wan.address("b")!r}, 9))"""
        run(wan, "a", code)
        traffic = carried(wan, 400)
        assert traffic.packets == 400
        assert 150 < traffic.lost < 250


def round_trip_s(wan: Wan, target: str) -> float:
    return float(run(wan, "a", f"from bench.sync.link_probe import round_trip_s; print(round_trip_s({target!r}))"))


def test_a_pair_of_sites_may_have_a_shape_of_its_own() -> None:
    far = WanShape(rtt_s=0.1, loss=0.0, bits_per_s=40e6)
    with Wan(("a", "b", "c"), FAST, {("c", "a"): far}) as wan:
        for site in ("b", "c"):
            wan.popen(site, [sys.executable, "-m", "bench.sync.link_probe", "serve", wan.address(site)])
        near_s, far_s = round_trip_s(wan, wan.address("b")), round_trip_s(wan, wan.address("c"))
        assert near_s < 0.1 <= far_s


def test_a_site_that_is_cut_off_is_reached_again_once_it_is_healed(wan: Wan) -> None:
    wan.popen("b", [sys.executable, "-m", "bench.sync.link_probe", "serve", wan.address("b")])
    assert round_trip_s(wan, wan.address("b")) < 1.0
    reach = f"""
import socket
try:
    socket.create_connection(({wan.address("b")!r}, 7077), timeout=1.0)
except TimeoutError:
    print("silence")
"""
    wan.cut("b")
    assert run(wan, "a", reach) == "silence"
    assert wan.traffic("a", "b").cut > 0
    wan.heal("b")
    assert run(wan, "a", reach) == ""
    with pytest.raises(ValueError, match="nowhere"):
        wan.cut("nowhere")


def test_pairs_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="must be two of the sites"):
        Wan(("a", "b"), pairs={("a", "z"): FAST})
    with pytest.raises(ValueError, match="the mtu"):
        Wan(("a", "b"), pairs={("a", "b"): WanShape(mtu=1500)})


def test_leaving_after_an_error_ends_everything() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), Wan(("a", "b"), FAST) as wan:
        process = wan.popen("a", SLEEP, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == b"up\n"
        open_before_leaving = len(list(Path("/proc/self/fd").iterdir()))
        raise RuntimeError("on purpose")
    assert process.returncode == -signal.SIGKILL
    assert len(list(Path("/proc/self/fd").iterdir())) < open_before_leaving


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_process_that_is_killed(number: signal.Signals) -> None:
    code = f"""
import subprocess, sys, time
from bench.sync.wan import Wan
with Wan(("a", "b")) as wan:
    process = wan.popen("a", {list(SLEEP)!r}, stdout=subprocess.PIPE)
    process.stdout.readline()
    print(process.pid, wan._router.pid, flush=True)
    time.sleep(600)"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.send_signal(number)
        try:
            owner.wait(60)
        finally:
            owner.kill()
    wait_until(lambda: all(map(gone, pids)))


def test_a_site_needs_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        Wan(("a", "a"))
