"""Contract of a provider that claims images, snapshots and forks."""

import asyncio
import io
import shutil
import stat
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from etude.errors import EtudeError, SandboxError, Unsupported
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, Healthcheck, Image, ImageService, SandboxSpec
from etude.sandboxes.images.store import ImageStore
from providers import TIMEOUT_S, WAIT_S, Stage, output, python
from registries import BUSYBOX

T = TypeVar("T")

LIST = "import os\nfor name in ('low', 'both', 'new', 'gone'):\n    if os.path.exists('/opt/' + name):\n"
LIST += "        print(name, open('/opt/' + name).read())\n"


TOOL = "#!/bin/sh\necho tool $FROM\n"
LAYERS = {
    "lower": {"opt/low": "1", "opt/both": "1", "opt/gone": "1", "work/given": "given", "opt/bin/tool": TOOL},
    "upper": {"opt/both": "2", "usr/local/lib/added": "3"},
}


@pytest.fixture
def image(stage: Stage, tmp_path: Path) -> Image:
    """Two layers, where there are images."""
    stage.need(Capability.IMAGES)
    for layer, files in LAYERS.items():
        for name, text in files.items():
            path = tmp_path / layer / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if "bin/" in name else 0o644)
        for folder in (tmp_path / layer, *(tmp_path / layer).rglob("*")):
            if folder.is_dir():
                folder.chmod(0o755)
    (tmp_path / "lower/opt/link").symlink_to("/opt/low")
    store = ImageStore(tmp_path / "store")
    layers = [store.add_layer(tmp_path / layer) for layer in LAYERS]
    variables = {"PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin", "FROM": "image"}
    return replace(store.add(layers, environment=variables), digest="")  # known by its paths alone


def test_a_sandbox_starts_from_its_image(stage: Stage, image: Image) -> None:
    async def look(sandbox: Sandbox) -> list[str | None]:
        tool = await sandbox.exec(["tool"], timeout_s=TIMEOUT_S)
        read = "print(open('/opt/link').read(), open('/usr/local/lib/added').read(), open('given').read())"
        return [await output(sandbox, LIST), tool.stdout, await output(sandbox, read), await sandbox.read_file("given")]

    expected = ["low 1\nboth 2\ngone 1\n", "tool image\n", "1 3 given\n", "given"]
    assert stage.play(look, spec=SandboxSpec(image=image)) == expected


def test_no_user_of_the_machine_can_run_what_an_image_has_of_its_root(stage: Stage) -> None:
    """A set-user-ID program of root in an image gives root's rights inside the sandbox only, never on the machine."""
    stage.need(Capability.SNAPSHOT)

    async def keep(sandbox: Sandbox) -> list[Path]:
        await output(sandbox, "import os, shutil\nshutil.copy('/bin/sh', '/opt/lends')\nos.chmod('/opt/lends', 0o6755)")
        await sandbox.snapshot()
        return [path for path in stage.scratch.rglob("opt/lends") if path.stat().st_mode & stat.S_ISUID]

    programs = stage.play(keep, spec=SandboxSpec(user="root"))
    assert programs
    for program in programs:
        above = program.parents[: len(program.relative_to(stage.scratch).parts) - 1]
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in above), program


def test_what_a_sandbox_writes_is_not_written_into_its_image(stage: Stage, image: Image) -> None:
    async def write(sandbox: Sandbox) -> None:
        await output(
            sandbox, "import os\nos.unlink('/opt/gone')\nopen('/opt/low', 'w').write('x')\nopen('/work/given', 'w')"
        )

    spec = SandboxSpec(image=image, user="root")
    stage.play(write, spec=spec)
    assert stage.play(lambda sandbox: output(sandbox, LIST), spec=spec) == "low 1\nboth 2\ngone 1\n"
    assert (image.layers[0] / "opt/low").read_text(encoding="utf-8") == "1"


def test_an_agent_owns_what_the_image_has_in_its_working_folder_alone(stage: Stage, image: Image) -> None:
    write = (
        "open('/work/new', 'w')\nopen('/work/given', 'a').write('!')\nprint(open('/work/given').read())\n"
        "try:\n    open('/opt/low', 'a')\n    print('wrote')\nexcept OSError:\n    print('refused')\n"
    )
    assert stage.python(write, spec=SandboxSpec(image=image)).stdout == "given!\nrefused\n"


def test_an_image_that_is_not_there_is_an_error(stage: Stage, image: Image, tmp_path: Path) -> None:
    for wrong in (Image(layers=(tmp_path / "nowhere",)), Image(base="no-such-base")):
        with pytest.raises(EtudeError, match=r"nowhere|no-such-base"):
            stage.python("", spec=SandboxSpec(image=wrong))


# --- What runs and is found beside the commands -------------------------------------------------------------------

ENTRY = ("sh", "-c", 'echo "$(id -u) up" >/tmp/up; exec "$@"', "entry")


SERVE = """echo shared >/dev/shm/word && exec >/tmp/said 2>/dev/null
echo $(id -u) $WORD $(cat word) $(ls /) $(cat /dev/shm/word) >/dev/stdout; exec httpd -f -p 8000 -h /tmp"""
ASK = r"""import os, socket
asked = socket.create_connection(('box', 8000)).makefile('rwb')
asked.write(b'GET /said HTTP/1.0\r\n\r\n')
asked.flush()
print(asked.read().split(b'\r\n')[-1].decode(), end='')
print(os.access('/.services', os.X_OK), os.path.exists('/srv/word'))
"""


def test_a_service_of_an_image_runs_in_a_root_of_its_own_and_in_forks(stage: Stage, tmp_path: Path) -> None:
    stage.need(Capability.IMAGE_SERVICES)
    if not BUSYBOX.exists():
        pytest.skip("busybox-static is not installed")
    service = ImageService(
        name="box",
        argv=("sh", "-c", SERVE),
        environment={"PATH": "/bin", "WORD": "hello"},
        workdir="/srv",
        healthchecks=(
            Healthcheck(argv=("wget", "-q", "-O-", "http://127.0.0.1:8000/said"), interval_s=0.1, retries=600),
        ),
    )
    layer = tmp_path / "layer"
    root = layer / service.root.lstrip("/")
    for name in ("bin", "srv", "tmp", "proc", "dev"):
        (root / name).mkdir(parents=True)
    root.parent.chmod(0o700)
    (root / "srv/word").write_text("world", encoding="utf-8")
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for name in ("sh", "mktemp", "cat", "id", "ls", "httpd", "wget", "sleep", "tail"):
        (root / "bin" / name).symlink_to("busybox")

    async def act(sandbox: Sandbox) -> list[str]:
        (fork,) = await sandbox.fork()
        try:
            return [await output(each, ASK) for each in (sandbox, fork)]
        finally:
            await fork.close()

    spec = SandboxSpec(image=Image(layers=(layer,), services=(service,)), names=("box",))
    assert stage.play(act, spec=spec) == ["0 hello world bin dev proc srv tmp shared\nFalse False\n"] * 2


def test_an_entry_point_runs_and_is_waited_for_before_the_first_command(stage: Stage) -> None:
    check = Healthcheck(argv=("test", "-e", "/tmp/up"), interval_s=0.2)
    spec = SandboxSpec(image=Image(entrypoint=ENTRY, healthchecks=(check,)))
    if Capability.BACKGROUND not in stage.claims:
        with pytest.raises(Unsupported, match="HEALTHCHECK"):
            stage.python("", spec=spec)
        return
    assert stage.python("import os; print(os.getuid(), open('/tmp/up').read())", spec=spec).stdout == "1000 1000 up\n\n"


def test_an_entry_point_that_ends_is_an_error_with_its_log(stage: Stage) -> None:
    stage.need(Capability.BACKGROUND)
    with pytest.raises(SandboxError, match="too bad"):
        stage.python("", spec=SandboxSpec(image=Image(entrypoint=("sh", "-c", "echo too bad; exit 3"))))


def test_names_of_its_own_lead_to_its_loopback(stage: Stage) -> None:
    spec = SandboxSpec(names=("web", "data-base"))
    if Capability.BACKGROUND not in stage.claims:
        with pytest.raises(Unsupported, match="names"):
            stage.python("", spec=spec)
        return
    look = "import socket; print(*(socket.gethostbyname(name) for name in ('web', 'data-base', 'localhost')))"
    assert stage.python(look, spec=spec).stdout == "127.0.0.1 127.0.0.1 127.0.0.1\n"


# --- Snapshots ----------------------------------------------------------------------------------------------------


def test_a_snapshot_keeps_what_was_written_and_what_was_deleted(stage: Stage, image: Image) -> None:
    stage.need(Capability.SNAPSHOT)
    change = (
        "import os, shutil\nos.unlink('/opt/gone')\n"
        "open('/opt/new', 'w').write('4')\nopen('/opt/both', 'w').write('5')\n"
        "shutil.rmtree('/opt/bin')\nos.mkdir('/opt/bin')\nopen('/opt/bin/other', 'w')\nopen('made', 'w').write('made')"
    )

    async def keep(sandbox: Sandbox) -> Image:
        await output(sandbox, change)
        return await sandbox.snapshot()

    async def look(sandbox: Sandbox) -> list[str | None]:
        listed = await output(sandbox, LIST + "print(os.listdir('/opt/bin'), os.environ['FROM'])")
        return [listed, await sandbox.read_file("made"), await sandbox.read_file("given")]

    first = stage.play(keep, spec=SandboxSpec(image=image, user="root"))
    spec = SandboxSpec(image=first)
    expected = ["low 1\nboth 5\nnew 4\n['other'] image\n", "made", "given"]
    assert stage.play(look, spec=spec) == expected
    assert stage.play(look, spec=spec) == expected

    async def again(sandbox: Sandbox) -> Image:
        await sandbox.write_file("made", "again")
        return await sandbox.snapshot()

    second = stage.play(again, spec=spec)
    assert stage.play(look, spec=SandboxSpec(image=second)) == [expected[0], "again", "given"]


def test_a_sandbox_goes_on_after_its_snapshot(stage: Stage) -> None:
    stage.need(Capability.SNAPSHOT)

    async def go_on(sandbox: Sandbox) -> list[str | None]:
        await sandbox.write_file("a", "before")
        image = await sandbox.snapshot()
        await sandbox.write_file("a", "after")
        holder = await stage.provider.create({}, SandboxSpec(image=image))
        try:
            return [await holder.read_file("a"), await sandbox.read_file("a"), await output(holder, "open('a', 'a')")]
        finally:
            await holder.close()

    assert stage.play(go_on) == ["before", "after", ""]


# --- Forks --------------------------------------------------------------------------------------------------------


def with_forks(
    stage: Stage, scenario: Callable[[Sandbox, Sequence[Sandbox]], Awaitable[T]], count: int, begin: str
) -> T:
    """Act out a scenario with a sandbox and its forks."""
    stage.need(Capability.FORK, Capability.LIVE_FORK)

    async def act(sandbox: Sandbox) -> T:
        await output(sandbox, begin)
        forks = await sandbox.fork(count)
        try:
            return await scenario(sandbox, forks)
        finally:
            for fork in forks:
                await fork.close()

    return stage.play(act, spec=SandboxSpec(environment={"OF": "spec"}))


BEGIN = "import os\nopen('a', 'w').write('1')\nos.symlink('a', 'link')\n"
BEGIN += "os.mkdir('d')\nopen('d/tool', 'w')\nos.chmod('d/tool', 0o755)"


def test_forks_have_the_same_files_and_are_independent(stage: Stage) -> None:
    look = "import os\nprint(open('link').read(), oct(os.stat('d/tool').st_mode)[-3:], os.environ['OF'])"

    async def change(sandbox: Sandbox, forks: Sequence[Sandbox]) -> list[str | None]:
        seen: list[str | None] = [await output(fork, look) for fork in forks]
        for number, fork in enumerate(forks):
            await output(fork, f"open('a', 'w').write('fork {number}')")
        await sandbox.write_file("a", "first")
        return [*seen, *[await each.read_file("a") for each in (*forks, sandbox)]]

    same = "1 755 spec\n"
    assert with_forks(stage, change, 2, BEGIN) == [same, same, "fork 0", "fork 1", "first"]


def test_a_sandbox_is_forked_again_and_again_as_it_goes_on(stage: Stage) -> None:
    async def go_on(sandbox: Sandbox, forks: Sequence[Sandbox]) -> list[str]:
        seen = [await output(forks[0], "print(open('a').read())")]
        for number in range(3):
            await output(sandbox, f"open('a', 'w').write('{number}')")
            (fork,) = await sandbox.fork()
            try:
                seen.append(await output(fork, "print(open('a').read())"))
            finally:
                await fork.close()
        return seen

    assert with_forks(stage, go_on, 1, "open('a', 'w').write('begin')") == ["begin\n", "0\n", "1\n", "2\n"]


def test_a_fork_outlives_its_original_and_can_be_forked(stage: Stage) -> None:
    async def outlive(sandbox: Sandbox, forks: Sequence[Sandbox]) -> str | None:
        await sandbox.close()
        await forks[0].write_file("b", "2")
        (again,) = await forks[0].fork()
        try:
            await forks[0].close()
            return await output(again, "print(open('a').read(), open('b').read())")
        finally:
            await again.close()

    assert with_forks(stage, outlive, 1, BEGIN) == "1 2\n"


def test_no_fork_is_the_callers_error(stage: Stage) -> None:
    async def none(sandbox: Sandbox, forks: Sequence[Sandbox]) -> None:
        with pytest.raises(ValueError, match="0"):
            await sandbox.fork(0)
        await forks[0].close()
        with pytest.raises(SandboxError):
            await forks[0].fork()

    with_forks(stage, none, 1, "")


COUNT = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    count = 0
    while True:
        count += 1
        with open('count.new', 'w') as file:
            file.write(f'{os.getpid()} {count}')
        os.rename('count.new', 'count')
        time.sleep(0.02)
while not os.path.exists('count'):
    time.sleep(0.01)
"""
"""What only the memory of a running process knows; it is a proper daemon, since no outputs must be held for it."""


async def progress(sandbox: Sandbox) -> tuple[str, int, int]:
    """The counting process and two successive counts; raises ``TimeoutError`` if it makes no progress."""
    first = second = (await sandbox.read_file("count") or "").split()
    async with asyncio.timeout(WAIT_S):
        while second == first:
            await asyncio.sleep(0.05)
            second = (await sandbox.read_file("count") or "").split()
    return second[0], int(first[1]), int(second[1])


def test_a_live_fork_goes_on_where_its_original_was(stage: Stage) -> None:
    stage.need(Capability.LIVE_FORK)

    async def compare(sandbox: Sandbox, forks: Sequence[Sandbox]) -> list[tuple[str, int, int]]:
        return [await progress(each) for each in (sandbox, *forks)]

    seen = with_forks(stage, compare, 2, COUNT)
    assert len({process for process, _, _ in seen}) == 1
    assert all(0 < first < second for _, first, second in seen)


def test_a_fork_that_is_not_live_runs_nothing(stage: Stage) -> None:
    if Capability.LIVE_FORK in stage.claims:
        pytest.skip(f"{stage.name} claims live forks")

    async def compare(sandbox: Sandbox, forks: Sequence[Sandbox]) -> tuple[str | None, str | None]:
        before = await forks[0].read_file("count")
        await asyncio.sleep(0.3)
        return before, await forks[0].read_file("count")

    before, after = with_forks(stage, compare, 1, COUNT)
    assert before == after


def test_an_export_of_a_fork_is_that_of_its_original(stage: Stage) -> None:
    def lease(tar: bytes) -> list[tuple[str, int, str]]:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            return sorted((member.name, member.mode, member.linkname) for member in archive)

    async def compare(sandbox: Sandbox, forks: Sequence[Sandbox]) -> None:
        assert lease(await sandbox.export(["a", "d", "link"])) == lease(await forks[0].export(["a", "d", "link"]))
        assert (await python(forks[0], "")).exit_code == 0

    with_forks(stage, compare, 1, BEGIN)
