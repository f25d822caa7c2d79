"""The host's end of the agent's language: answers, deadlines, machines that end or talk nonsense, tunnels."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from etude.errors import SandboxError
from etude.sandboxes.qemu.guest.frames import GuestMessage, Inbox, Outbox
from etude.sandboxes.qemu.guest.tunnels import WINDOW_BYTES
from etude.sandboxes.qemu.link import GuestLink
from etude.sandboxes.qemu.port_forwarder import PortForwarder
from waiting import WAIT_S

Scenario = Callable[[GuestLink, "Peer"], Awaitable[None]]


class Peer:
    """A guest agent with scripted messages."""

    def __init__(self, port: socket.socket) -> None:
        self.port = port
        port.setblocking(False)
        self._inbox = Inbox()
        self._received: list[GuestMessage] = []

    async def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        outbox = Outbox()
        outbox.add(GuestMessage(head, body))
        while outbox:
            await asyncio.get_running_loop().sock_sendall(self.port, outbox.next_frame())

    async def receive(self) -> GuestMessage:
        while not self._received:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.port, 1 << 16), WAIT_S)
            self._received += self._inbox.feed(data)
        return self._received.pop(0)


def play(scenario: Scenario, allow: tuple[str, ...] = ()) -> None:
    async def act() -> None:
        ours, theirs = socket.socketpair()
        link = GuestLink(next_id=7, allow=allow)
        link.open(ours)
        try:
            with theirs:
                await scenario(link, Peer(theirs))
        finally:
            await link.close()

    asyncio.run(act())


def test_answers_find_who_asked_whatever_their_order() -> None:
    async def scenario(link: GuestLink, peer: Peer) -> None:
        requests = [asyncio.create_task(link.ask("do", {"n": n}, timeout_s=60)) for n in range(3)]
        received = [await peer.receive() for _ in requests]
        assert [message.head["id"] for message in received] == [7, 8, 9]
        for message in reversed(received):
            await peer.send({"re": message.head["id"], "n": message.head["n"]}, b"body")
        assert [(await task).head["n"] for task in requests] == [0, 1, 2]
        await peer.send({"re": 7})  # it has no caller any more

    play(scenario)


def test_errors_keep_their_kind_and_silence_has_a_deadline() -> None:
    async def scenario(link: GuestLink, peer: Peer) -> None:
        for kind, error in (("value", ValueError), ("sandbox", SandboxError), ("other", SandboxError)):
            requests = asyncio.create_task(link.ask("do", {}, timeout_s=60))
            await peer.send({"re": (await peer.receive()).head["id"], "error": [kind, "words"]})
            with pytest.raises(error, match="words"):
                await requests
        with pytest.raises(SandboxError, match=r"did not answer 'slow' within 0.05 s"):
            await link.ask("slow", {}, timeout_s=0.05)

    play(scenario)


@pytest.mark.parametrize("noise", [b"", b"\xff" * 99], ids=["nothing", "nonsense"])
def test_everybody_learns_that_a_machine_is_gone(noise: bytes) -> None:
    async def scenario(link: GuestLink, peer: Peer) -> None:
        requests = [asyncio.create_task(link.ask("do", {}, timeout_s=60)) for _ in range(2)]
        await peer.receive()
        await asyncio.get_running_loop().sock_sendall(peer.port, noise)
        if not noise:
            peer.port.shutdown(socket.SHUT_RDWR)
        for task in requests:
            with pytest.raises(SandboxError, match=r"ended|nonsense"):
                await task
        with pytest.raises(SandboxError, match=r"ended|nonsense"):
            await link.ask("do", {}, timeout_s=60)

    play(scenario)


@pytest.mark.parametrize("tunnel", ["x", None, float("inf")], ids=str)
def test_a_tunnel_that_is_no_number_is_nonsense(tunnel: Any) -> None:
    async def scenario(link: GuestLink, peer: Peer) -> None:
        requests = asyncio.create_task(link.ask("do", {}, timeout_s=60))
        await peer.receive()
        await peer.send({"do": "open", "tunnel": tunnel, "place": "a:1"})
        with pytest.raises(SandboxError, match="talks nonsense"):
            await requests

    play(scenario)


def test_a_command_without_a_caller_is_killed() -> None:
    async def scenario(link: GuestLink, peer: Peer) -> None:
        requests = asyncio.create_task(link.ask("exec", {}, timeout_s=60))
        number = (await peer.receive()).head["id"]
        requests.cancel()
        assert (await peer.receive()).head == {"do": "kill", "id": 0, "command": number}

    play(scenario)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_caller_cancelled_while_hanging_up_is_cancelled(turns: int) -> None:
    async def act() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            link = GuestLink()
            link.open(ours)
            await asyncio.sleep(0)
            closing = asyncio.create_task(link.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            assert closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled()
            await link.close()

    asyncio.run(act())


def test_a_tunnel_carries_both_ways_and_closes() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    async def act() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ours, theirs = socket.socketpair()
        link = GuestLink(allow=(place,))
        link.open(ours)
        try:
            with theirs:
                peer = Peer(theirs)
                await peer.send({"do": "open", "tunnel": 1, "place": place})
                await peer.send({"do": "data", "tunnel": 1}, b"hello")
                await peer.send({"do": "end", "tunnel": 1})
                received = [await peer.receive() for _ in range(3)]
                assert [(message.head["do"], message.body) for message in received] == [
                    ("ack", b""), ("data", b"HELLO"), ("end", b"")
                ]  # fmt: skip
                await peer.send({"do": "ack", "tunnel": 1, "bytes": 5})
                assert (await peer.receive()).head["do"] == "shut"
        finally:
            await link.close()
            server.close()
            await server.wait_closed()

    asyncio.run(act())


@pytest.mark.parametrize("place", ["127.0.0.1:1", "169.254.169.254:80", "nonsense"])
def test_a_tunnel_to_any_other_place_is_refused(place: str) -> None:
    async def scenario(link: GuestLink, peer: Peer) -> None:
        await peer.send({"do": "open", "tunnel": 1, "place": place})
        assert (await peer.receive()).head == {"do": "shut", "tunnel": 1}

    play(scenario, allow=("127.0.0.1:2",))


def test_a_connection_whose_peer_does_not_read_is_cut() -> None:
    async def act() -> None:
        output: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            place = f"127.0.0.1:{server.getsockname()[1]}"
            forwarders = PortForwarder((place,), lambda head, body: output.append(head["do"]))
            forwarders.receive({"do": "open", "tunnel": 1, "place": place}, b"")
            peer, _ = await asyncio.get_running_loop().sock_accept(server)
            with peer:
                sent = 0
                while output.count("ack") == sent:
                    forwarders.receive({"do": "data", "tunnel": 1}, bytes(WINDOW_BYTES))
                    sent += 1
                    await asyncio.sleep(0.02)
                async with asyncio.timeout(5):
                    await forwarders.close()
        assert output[-1] == "shut"

    asyncio.run(act())
