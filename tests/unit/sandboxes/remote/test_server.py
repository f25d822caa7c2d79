"""The sandbox server: no access without a key, a lost client's sandboxes are removed, unknown messages are refused."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar
from uuid import uuid4

import pytest
from aiohttp import ClientSession, web

from etude.errors import ConfigError, SandboxError, Unsupported
from etude.protocols import SandboxProvider
from etude.rollouts.fake import FakeSandbox, FakeSandboxes
from etude.run.serving import listening
from etude.sandbox_spec import SandboxLimits, SandboxSpec
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.remote import wire
from etude.sandboxes.remote.client import RemoteSandboxes
from etude.sandboxes.remote.principals import EACH, TOTAL, Permissions, Quota, SandboxClient
from etude.sandboxes.remote.server import SandboxServer, ServerLimits
from waiting import until

T = TypeVar("T")
KEY, OTHER_KEY = "a client's key", "another client's key"
DIGESTS = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in (("one", KEY), ("other", OTHER_KEY))}
SPEC = SandboxSpec()
NOTHING, USUAL = Permissions(), Quota()


def serve(
    scenario: Callable[[SandboxServer, str], Awaitable[T]],
    limits: ServerLimits | None = None,
    make: Callable[[], SandboxProvider] = lambda: LocalSandboxes(1),
    *,
    permissions: Permissions = NOTHING,
    quota: Quota = USUAL,
) -> T:
    """Act out a scenario with a server over the sandboxes of a provider, and its URL."""
    clients = {
        name: SandboxClient(digest=digest, permissions=permissions, quota=quota) for name, digest in DIGESTS.items()
    }

    async def act() -> T:
        provider = make()
        server = SandboxServer(provider, clients, limits=limits)
        try:
            async with listening(server.app(), 0) as port:
                return await scenario(server, f"http://127.0.0.1:{port}")
        finally:
            assert len(server) == 0
            await provider.close()

    return asyncio.run(act())


async def ask(
    url: str, method: str, path: str, body: bytes = b"", *, key: str = KEY, kind: str = "application/json"
) -> tuple[int, Mapping[str, object]]:
    async with ClientSession() as http:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
        async with http.request(method, f"{url}/v{wire.VERSION}/{path}", data=body, headers=headers) as response:
            return response.status, await response.json()


def creation(files: Mapping[str, str] | None = None, spec: SandboxSpec = SPEC) -> bytes:
    return wire.write_message(wire.CreateRequest(files=dict(files or {}), spec=spec))


def test_prometheus_gets_figures_with_a_key() -> None:
    async def read(server: SandboxServer, url: str) -> None:
        async with ClientSession() as http:
            async with http.get(f"{url}/metrics", headers={"Authorization": "Bearer wrong"}) as answer:
                assert answer.status != 200
            async with http.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}) as answer:
                assert "\netude_host_sandboxes 0.0\n" in await answer.text()

    serve(read)


@pytest.mark.parametrize("key", ["", "wrong", DIGESTS["one"]])
def test_a_stranger_is_told_so_and_nothing_else(key: str) -> None:
    async def knock(server: SandboxServer, url: str) -> None:
        client = RemoteSandboxes(url, key or "x")
        try:
            with pytest.raises(ConfigError, match="not known here"):
                await client.create({})
        finally:
            await client.close()
        status, reply = await ask(url, "GET", "capabilities", key=key)
        assert (status, reply["fault"]) == (401, "key")

    serve(knock)


def test_a_server_without_keys_is_not_made() -> None:
    with pytest.raises(ConfigError, match="no client"):
        SandboxServer(LocalSandboxes(1), {})


def test_asking_again_for_a_sandbox_gives_the_same_one() -> None:
    async def twice(server: SandboxServer, url: str) -> int:
        path = f"sandboxes/{uuid4().hex}"
        body = creation({"a": "b"})
        answers = await asyncio.gather(*(ask(url, "PUT", path, body) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        await ask(url, "POST", f"{path}/write", wire.write_message(wire.FileText(path="a", text="kept")))
        await ask(url, "PUT", path, body)
        _, file = await ask(url, "POST", f"{path}/read", wire.write_message(wire.PathOnly(path="a")))
        assert file["text"] == "kept"
        count = len(server)
        for _ in range(2):
            assert (await ask(url, "DELETE", path))[0] == 200
        return count

    assert serve(twice) == 1


def test_keys_do_not_reach_each_others_sandboxes() -> None:
    async def reach(server: SandboxServer, url: str) -> None:
        path = f"sandboxes/{uuid4().hex}"
        await ask(url, "PUT", path, creation({"a": "secret"}))
        body = wire.write_message(wire.PathOnly(path="a"))
        status, reply = await ask(url, "POST", f"{path}/read", body, key=OTHER_KEY)
        assert (status, reply["fault"]) == (503, "sandbox")
        await ask(url, "DELETE", path, key=OTHER_KEY)
        assert (await ask(url, "POST", f"{path}/read", body))[1]["text"] == "secret"

    serve(reach)


def test_a_lost_client_frees_its_sandboxes() -> None:
    async def lose(server: SandboxServer, url: str) -> None:
        path = f"sandboxes/{uuid4().hex}"
        assert (await ask(url, "PUT", path, creation()))[0] == 200
        await until(lambda: not len(server))
        status, reply = await ask(url, "POST", f"{path}/stats")
        assert (status, reply["fault"]) == (503, "sandbox")
        assert "lease" in str(reply["message"])

    serve(lose, ServerLimits(lease_s=2.0), FakeSandboxes)


def test_a_client_that_is_there_keeps_its_sandboxes() -> None:
    def reply_body(lease_s: float) -> bool:
        async def keep(server: SandboxServer, url: str) -> bool:
            client = RemoteSandboxes(url, KEY)
            try:
                sandbox = await client.create({"a": "b"})
                await asyncio.sleep(1.5 * lease_s)
                return await sandbox.read_file("a") == "b"
            except SandboxError:
                return False
            finally:
                await client.close()

        return serve(keep, ServerLimits(lease_s=lease_s), FakeSandboxes)

    assert reply_body(2.0) or reply_body(20.0)  # this process may stand still for as long as the shorter lease


class Slow(FakeSandboxes):
    """Creates no sandbox until it may ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        await self.go_on.wait()
        return await super().create(files, spec)


def test_who_waits_for_a_sandbox_for_longer_than_a_lease_gets_it() -> None:
    provider = Slow()

    async def wait(server: SandboxServer, url: str) -> None:
        asked_for = asyncio.ensure_future(ask(url, "PUT", f"sandboxes/{uuid4().hex}", creation()))
        await until(lambda: len(server) == 1)
        await asyncio.sleep(0.5)
        registered = len(server)
        provider.go_on.set()
        assert (registered, (await asked_for)[0]) == (1, 200)

    serve(wait, ServerLimits(lease_s=0.1), lambda: provider)


def test_time_to_live_ends_what_is_renewed_for_ever() -> None:
    async def outlive(server: SandboxServer, url: str) -> None:
        client = RemoteSandboxes(url, KEY)
        try:
            await client.create({}, SandboxSpec(ttl_s=0.5))
            await until(lambda: not len(server))
        finally:
            await client.close()

    serve(outlive, ServerLimits(lease_s=0.6), FakeSandboxes)


def test_limits_are_kept_and_named() -> None:
    async def exceed(server: SandboxServer, url: str) -> None:
        client = RemoteSandboxes(url, KEY)
        try:
            first = await client.create({})
            await client.create({})
            with pytest.raises(SandboxError, match="2 of 2 sandboxes of key 'one'"):
                await client.create({})
            with pytest.raises(SandboxError, match="2 of 2"):
                await first.fork()
            with pytest.raises(ValueError, match="ttl_s=100000"):
                await client.create({}, SandboxSpec(ttl_s=100_000))
            with pytest.raises(ValueError, match="too large"):
                await first.load(bytes(wire.JSON_LIMIT_BYTES + (2 << 20)))
            await first.close()
            await (await client.create({})).close()
        finally:
            await client.close()

    serve(exceed, ServerLimits(tar_bytes=1 << 20), quota=Quota(sandboxes=2))


# --- Forks --------------------------------------------------------------------------------------------------------


def naming(names: Iterable[str]) -> bytes:
    return wire.write_message(wire.SandboxNames(names=list(names)))


def new_names(count: int) -> list[str]:
    return [uuid4().hex for _ in range(count)]


def test_forks_beyond_the_limit_are_not_made() -> None:
    provider = FakeSandboxes()

    async def exceed(server: SandboxServer, url: str) -> None:
        path = f"sandboxes/{uuid4().hex}"
        await ask(url, "PUT", path, creation())
        for _ in range(3):
            status, reply = await ask(url, "POST", f"{path}/fork", naming(new_names(2)))
            assert (status, reply["fault"]) == (503, "busy")
        await asyncio.sleep(0)
        assert len(server) == len(provider) == 1

    serve(exceed, make=lambda: provider, quota=Quota(sandboxes=2))


def test_asking_again_for_forks_gives_the_same_ones() -> None:
    provider = FakeSandboxes()

    async def twice(server: SandboxServer, url: str) -> None:
        path, names = f"sandboxes/{uuid4().hex}", new_names(2)
        await ask(url, "PUT", path, creation())
        answers = await asyncio.gather(*(ask(url, "POST", f"{path}/fork", naming(names)) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        assert len(server) == len(provider) == 3

    serve(twice, make=lambda: provider)


def test_a_fork_never_takes_the_name_of_a_sandbox_that_is_there() -> None:
    provider = FakeSandboxes()

    async def overwrite(server: SandboxServer, url: str) -> None:
        origin, other = new_names(2)
        for name in (origin, other):
            await ask(url, "PUT", f"sandboxes/{name}", creation({"a": name}))
        status, reply = await ask(url, "POST", f"sandboxes/{origin}/fork", naming([other, *new_names(1)]))
        assert (status, reply["fault"]) == (400, "value")
        assert other in str(reply["message"])
        body = wire.write_message(wire.PathOnly(path="a"))
        assert (await ask(url, "POST", f"sandboxes/{other}/read", body))[1]["text"] == other
        assert len(server) == len(provider) == 2

    serve(overwrite, make=lambda: provider)


class Unforkable(FakeSandboxes):
    """Its sandboxes cannot be copied."""

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> FakeSandbox:
        def refuse(copy: FakeSandbox) -> None:
            raise SandboxError("no room")

        return FakeSandbox(files, lambda sandbox: None, refuse)


def test_forks_that_could_not_be_made_are_not_held() -> None:
    async def fail(server: SandboxServer, url: str) -> None:
        path = f"sandboxes/{uuid4().hex}"
        await ask(url, "PUT", path, creation())
        for _ in range(2):
            status, reply = await ask(url, "POST", f"{path}/fork", naming(new_names(2)))
            assert (status, reply["message"]) == (503, "no room")
            assert len(server) == 1

    serve(fail, make=Unforkable, quota=Quota(sandboxes=3))


# --- What is said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("exec", b'{"argv": ["true"], "stdin": "", "timeout_s": 1, "environment": {}, "shell": true}'),
        ("exec", b'{"argv": "true", "stdin": "", "timeout_s": 1, "environment": {}}'),
        ("exec", b'{"argv": ["true"], "stdin": "", "timeout_s": "1", "environment": {}}'),
        ("exec", b'{"argv": ["true"]}'),
        ("read", b"[]"),
        ("read", b"\xff"),
        ("fork", b'{"names": ["../../x"]}'),
        ("fork", b'{"names": []}'),
    ],
)
def test_what_the_server_does_not_know_is_refused(path: str, body: bytes) -> None:
    async def send(server: SandboxServer, url: str) -> None:
        sandbox = f"sandboxes/{uuid4().hex}"
        await ask(url, "PUT", sandbox, creation())
        status, reply = await ask(url, "POST", f"{sandbox}/{path}", body)
        assert (status, reply["fault"]) == (400, "value")

    serve(send)


# --- What a client may have ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    ["127.0.0.1:22", "localhost:22", "0.0.0.0:22", "169.254.169.254:80", "10.0.0.1:443", "pypi.org:443", "ok:80"],
)
def test_a_client_reaches_no_place_that_the_operator_did_not_name(place: str) -> None:
    async def reach(server: SandboxServer, url: str) -> None:
        client = RemoteSandboxes(url, KEY)
        try:
            await (await client.create({}, SandboxSpec(allow=("ok:443",)))).close()
            with pytest.raises(Unsupported, match=f"{place!r}: .* operator"):
                await client.create({}, SandboxSpec(allow=("ok:443", place)))
            assert len(server) == 0
        finally:
            await client.close()

    serve(reach, make=FakeSandboxes, permissions=Permissions(allow={"ok:443"}))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (SandboxLimits(memory_bytes=10**12), f"memory_bytes={10**12}: .* 'one' may have {EACH.memory_bytes} "),
        (SandboxLimits(disk_bytes=10**12), f"disk_bytes={10**12}: .* 'one' may have {EACH.disk_bytes} "),
        (SandboxLimits(processes=10**6), f"processes={10**6}: .* 'one' may have {EACH.processes} "),
        (SandboxLimits(cpus=4.5), "cpus=4.5: .* 'one' may have 4.0 "),
    ],
)
def test_a_client_has_no_sandbox_beyond_its_caps(limits: SandboxLimits, words: str) -> None:
    async def ask_for_much(server: SandboxServer, url: str) -> None:
        client = RemoteSandboxes(url, KEY)
        try:
            with pytest.raises(Unsupported, match=words):
                await client.create({}, SandboxSpec(limits=limits))
            assert len(server) == 0
        finally:
            await client.close()

    serve(ask_for_much, make=FakeSandboxes)


def test_the_sandboxes_of_a_key_are_counted_and_forks_with_them() -> None:
    quota = Quota(each=SandboxLimits(), total=replace(TOTAL, memory_bytes=3 << 30))  # three usual ones

    async def fill(server: SandboxServer, url: str) -> None:
        client, other = RemoteSandboxes(url, KEY), RemoteSandboxes(url, OTHER_KEY)
        try:
            sandbox = await client.create({})
            forks = await sandbox.fork(2)
            for more in (lambda: client.create({}), sandbox.fork):
                with pytest.raises(
                    SandboxError, match=f"'one' have memory_bytes={3 << 30} of {3 << 30}, {1 << 30} more"
                ):
                    await more()
            await (await other.create({})).close()
            await forks[0].close()
            await client.create({})
        finally:
            await client.close()
            await other.close()

    serve(fill, make=FakeSandboxes, quota=quota)


# --- A server that cannot be trusted ------------------------------------------------------------------------------


def against(answer: Callable[[web.Request], Awaitable[web.Response]], path: str) -> None:
    """Create and use a sandbox of a server that gives its own answer for one path."""

    async def lie(request: web.Request) -> web.Response:
        if request.path.endswith(path):
            return await answer(request)
        body: wire.WireMessage = wire.LeaseReply(lease_s=60) if request.method == "PUT" else wire.Done()
        return web.Response(body=wire.write_message(body))

    async def act() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", lie)
        async with listening(app, 0) as port:
            client = RemoteSandboxes(f"http://127.0.0.1:{port}", KEY)
            try:
                sandbox = await client.create({})
                await sandbox.export(["a"], limit_bytes=1000)
            finally:
                await client.close()

    asyncio.run(act())


async def flood(request: web.Request) -> web.Response:
    return web.Response(body=bytes(3 << 20))


async def nonsense(request: web.Request) -> web.Response:
    return web.Response(body=b"no tar")


async def elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/")


async def failure(request: web.Request) -> web.Response:
    return web.Response(status=500, text="<html>")


@pytest.mark.parametrize(
    ("answer", "says"),
    [(flood, "more than"), (nonsense, "no archive"), (elsewhere, "302"), (failure, "500")],
    ids=["flood", "nonsense", "elsewhere", "failure"],
)
def test_a_server_that_lies_is_an_error_of_the_sandbox(
    answer: Callable[[web.Request], Awaitable[web.Response]], says: str
) -> None:
    with pytest.raises(SandboxError, match=says):
        against(answer, "/export")


def test_a_server_that_is_not_there_is_an_error_of_the_sandbox() -> None:
    async def act() -> None:
        client = RemoteSandboxes("http://127.0.0.1:1", KEY)
        try:
            with pytest.raises(SandboxError, match="cannot be reached"):
                await client.capabilities()
        finally:
            await client.close()

    asyncio.run(act())


@pytest.mark.parametrize(("url", "key"), [("ftp://x", "k"), ("x:80", "k"), ("http://x", "")])
def test_an_address_that_is_none_is_refused(url: str, key: str) -> None:
    with pytest.raises(ConfigError, match="expected an http"):
        RemoteSandboxes(url, key)
