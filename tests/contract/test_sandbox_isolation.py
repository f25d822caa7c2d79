"""Contract of a provider that claims to confine, to limit or to cut off the network; and the specs that it refuses."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from etude.errors import SandboxError, Unsupported
from etude.protocols import Sandbox
from etude.sandbox_spec import Capability, Image, SandboxLimits, SandboxSpec
from etude.sandboxes.capabilities import WALLED
from providers import SECRET, TIGHT, Stage, output, python

# --- What is not claimed is refused -------------------------------------------------------------------------------

REQUESTS: Mapping[Capability, SandboxSpec] = {
    Capability.ALLOW_LIST: SandboxSpec(allow=("127.0.0.1:9",)),
    Capability.MEMORY_LIMIT: SandboxSpec(limits=SandboxLimits(memory_bytes=TIGHT.memory_bytes)),
    Capability.PROCESS_LIMIT: SandboxSpec(limits=SandboxLimits(processes=TIGHT.processes)),
    Capability.DISK_LIMIT: SandboxSpec(limits=SandboxLimits(disk_bytes=TIGHT.disk_bytes)),
    Capability.IMAGES: SandboxSpec(image=Image(layers=(Path("/usr/share"),))),
}
"""A specification that cannot be kept without a capability. The others are not asked for: they are looked up."""


@pytest.mark.parametrize("capability", REQUESTS)
def test_a_specification_that_cannot_be_kept_is_refused(stage: Stage, capability: Capability) -> None:
    async def nothing(sandbox: Sandbox) -> None:
        return

    walled = capability in WALLED and Capability.LIMIT_WALL in stage.claims
    if walled or capability in stage.claims:
        return  # what is claimed is proved below, in test_sandbox_images or in test_sandbox_limits
    with pytest.raises(Unsupported, match=r"use \w+"):
        stage.play(nothing, spec=REQUESTS[capability])


def test_snapshots_and_forks_that_are_not_claimed_are_refused(stage: Stage) -> None:
    async def ask(sandbox: Sandbox) -> None:
        if Capability.SNAPSHOT not in stage.claims:
            with pytest.raises(Unsupported, match=r"use \w+"):
                await sandbox.snapshot()
        if not {Capability.FORK, Capability.LIVE_FORK} & stage.claims:
            with pytest.raises(Unsupported, match=r"use \w+"):
                await sandbox.fork()

    stage.play(ask)


def test_root_is_given_or_refused(stage: Stage) -> None:
    build = (
        "import os\nopen('/usr/local/made', 'w').write('x')\nopen('/etc/made', 'w')\n"
        "print(os.getuid(), os.path.exists('/usr/local/made'))"
    )
    spec = SandboxSpec(user="root")
    if Capability.IMAGES in stage.claims:
        assert stage.python(build, spec=spec).stdout == "0 True\n"
    else:
        with pytest.raises(Unsupported):
            stage.python(build, spec=spec)


# --- Confined -----------------------------------------------------------------------------------------------------


LOOK = """
import os
for path in ({secret!r}, {test!r}, {scratch!r}, '/etc/shadow', '/proc/kcore', '/dev/mem', '/dev/kmsg'):
    try:
        found = os.listdir(path) if os.path.isdir(path) else len(open(path, 'rb').read(99))
    except OSError:
        continue
    if found:
        print(path, found)
print(os.listdir('/tmp'), os.listdir('/home'), os.listdir('/home/agent'))
"""


def test_no_file_of_the_machine_is_seen(stage: Stage) -> None:
    stage.need(Capability.CONFINED)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        secret = Path(folder, "secret")
        secret.write_text(SECRET)
        secret.chmod(0o644)
        secret.parent.chmod(0o755)
        result = stage.python(LOOK.format(secret=str(secret), test=__file__, scratch=str(stage.scratch)))
    assert result.stdout == "[] ['agent'] []\n"


PRY = """
import os
mine = [str(os.getpid()), 'self', 'thread-self']
for process in os.listdir('/proc') if os.path.isdir('/proc') else []:
    for name in ('environ', 'cmdline', 'maps', 'cgroup', 'cwd', 'exe', 'root', 'fd/0', 'fd/1'):
        path = f'/proc/{{process}}/{{name}}'
        try:
            text = os.readlink(path) if name in ('cwd', 'exe', 'root') or '/' in name else open(path, 'rb').read()
        except OSError:
            continue
        text = text if isinstance(text, str) else text.decode('utf-8', 'replace')
        for word in {words!r}:
            if word in text and not (process in mine and name == 'cmdline'):
                print(path, word)
"""


def test_no_process_tells_of_the_machine(stage: Stage) -> None:
    stage.need(Capability.CONFINED)
    words = [SECRET, str(Path(__file__).parents[2]), str(stage.scratch), "ETUDE_TEST", "PYTEST_CURRENT_TEST"]
    result = stage.python(PRY.format(words=words))
    assert (result.stdout, result.stderr) == ("", "")


PROD = """
import os
before = 'nothing'
for path in ('/proc/sys/kernel/panic', '/proc/sys/vm/drop_caches', '/proc/sys/kernel/core_pattern',
             '/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/proc/self/oom_score_adj', '/proc/1/oom_score_adj',
             '/sys/kernel/mm/ksm/run', '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/memory/cgroup.procs'):
    try:
        with open(path, 'w') as file:
            file.write('-1000' if 'oom' in path else '1')
        print('wrote', path)
    except OSError:
        pass
for path in ('/x', '/usr/x', '/etc/x', '/usr/bin/python3', '/etc/passwd', '/bin/sh', '/lib/x', '/proc/x', '/sys/x'):
    try:
        open(path, 'ab').close()
        print('opened', path)
    except OSError:
        pass
for mode in (0o600 | 0o020000, 0o600 | 0o060000):
    try:
        os.mknod('device', mode, os.makedev(1, 1))
        open('device', 'rb').read(1)
        print('read a device')
    except OSError:
        pass
for step in ("os.chroot('.')", "os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.nice(-5)"):
    try:
        eval(step)
        print(step)
    except OSError:
        pass
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
os.mkdir('mnt')
for kind in (b'tmpfs', b'proc', b'sysfs', b'overlay'):
    if libc.mount(b'none', b'mnt', kind, 0, None) == 0:
        print('mounted', kind)
if libc.mount(b'/', b'mnt', None, 4096, None) == 0:
    print('bound')
for name, arguments in (('reboot', (0x89abcdef,)), ('settimeofday', (bytes(16), None)),
                        ('sethostname', (b'x', 1)), ('swapon', (b'x', 0))):
    if getattr(libc, name)(*arguments) == 0:
        print(name)
print(os.getuid() != 0, os.geteuid() != 0)
"""


def test_a_command_has_no_powers(stage: Stage) -> None:
    stage.need(Capability.CONFINED)
    panic = Path("/proc/sys/kernel/panic").read_text(encoding="utf-8")
    result = stage.python(PROD)
    assert Path("/proc/sys/kernel/panic").read_text(encoding="utf-8") == panic
    lines = result.stdout.splitlines()
    if Capability.OWN_KERNEL in stage.claims:  # what only that kernel hears is nobody else's business
        lines = [line for line in lines if "oom_score_adj" not in line and "nice" not in line]
    assert (lines, result.stderr) == (["True True"], "")


NAMESPACES = """
import os
if os.fork() == 0:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) != 0:
        os._exit(0)
    os._exit(0 if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) else 1)
print(os.wait()[1])
"""


def test_no_power_is_gained_in_a_user_namespace(stage: Stage) -> None:
    stage.need(Capability.CONFINED)
    if Capability.OWN_KERNEL in stage.claims:
        pytest.skip("namespaces of another kernel are no business of the machine's")
    assert stage.python(NAMESPACES).stdout == "0\n"


def test_mounts_are_shown_read_only_or_refused(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "file").write_text("shown")
    (tmp_path / "alone").write_text("alone")
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    look = (
        "import os\nprint(open('/tool/file').read(), open('/opt/alone').read())\n"
        "for path in ('/tool/new', '/tool/file', '/opt/alone'):\n"
        "    try:\n        open(path, 'w')\n        print('wrote', path)\n    except OSError:\n        pass\n"
    )
    spec = SandboxSpec(mounts={"/tool": tmp_path / "tool", "/opt/alone": Path("alone")})
    try:
        result = stage.python(look, spec=spec)
    except Unsupported:
        assert Capability.IMAGES not in stage.claims
        return
    assert (result.stdout, result.stderr) == ("shown alone\n", "")


def test_a_mount_of_what_is_not_there_is_an_error_of_the_sandbox(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(SandboxError):
        stage.python("", spec=SandboxSpec(mounts={"/tool": tmp_path / "nowhere"}))


def test_home_and_tmp_are_the_agents(stage: Stage) -> None:
    stage.need(Capability.CONFINED)
    use = (
        "import os\n"
        "for folder in ('.', '/tmp', os.environ['HOME'], '/home/agent'):\n"
        "    with open(folder + '/x', 'w') as file:\n        file.write(folder)\n"
        "    os.unlink(folder + '/x')\n"
        "print(os.environ['HOME'], os.stat('.').st_uid == os.getuid())"
    )
    assert stage.python(use).stdout == "/home/agent True\n"


# --- Processes apart ----------------------------------------------------------------------------------------------


def test_no_other_process_is_within_reach(stage: Stage) -> None:
    stage.need(Capability.PROCESSES_APART)
    hit = (
        f"import os, signal\nfor process in {sorted({os.getpid(), os.getppid()} - {1})}:\n"  # 1 is the sandbox's own
        "    try:\n        os.kill(process, 0)\n        print('reached', process)\n    except OSError:\n        pass\n"
        "try:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass\n"
    )

    async def attack(sandbox: Sandbox) -> list[str]:
        other = await stage.provider.create({})
        try:
            first = await python(sandbox, hit)
            return [first.stdout, await output(sandbox, "print('still')"), await output(other, "print('there')")]
        finally:
            await other.close()

    assert stage.play(attack) == ["", "still\n", "there\n"]


def test_process_1_cannot_be_ended(stage: Stage) -> None:
    stage.need(Capability.PROCESSES_APART)
    hit = (
        "import os\nfor number in (1, 2, 9, 11, 15, 19):\n"
        "    try:\n        os.kill(1, number)\n    except OSError:\n        pass\nprint('alive')"
    )

    async def attack(sandbox: Sandbox) -> list[str]:
        return [await output(sandbox, hit), await output(sandbox, "print('next')")]

    if Capability.BACKGROUND in stage.claims:
        assert stage.play(attack) == ["alive\n", "next\n"]


# --- Network ------------------------------------------------------------------------------------------------------


@contextmanager
def listening() -> Iterator[int]:
    """A server on this machine that answers ``yes`` to everybody; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"yes")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


REACH = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def reach(family, address):
    s = libc.socket(family, 1, 0)
    if s < 0:
        return b'no socket'
    class Time(ctypes.Structure):
        _fields_ = [('s', ctypes.c_long), ('us', ctypes.c_long)]
    for option in (20, 21):
        libc.setsockopt(s, 1, option, ctypes.byref(Time(3, 0)), ctypes.sizeof(Time))
    try:
        return b'unreached' if libc.connect(s, address, len(address)) else os.read(s, 9)
    except OSError:
        return b'unreached'
    finally:
        os.close(s)
def inet(host, port):
    return bytes([2, 0, port >> 8, port & 255, *map(int, host.split('.'))]) + bytes(8)
"""
"""Sockets without the module, which not every sandbox has."""


def test_nothing_can_be_reached(stage: Stage) -> None:
    stage.need(Capability.NETWORK_OFF)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(b"\0etude-contract")
    abstract.listen()
    with abstract, listening() as port:
        code = REACH + (
            f"for host in ('127.0.0.1', '10.0.2.2', '169.254.169.254', '192.0.2.1'):\n"
            f"    for port in ({port}, 80, 53):\n"
            "        if (found := reach(2, inet(host, port))) == b'yes':\n"
            "            print(host, port, found)\n"
            "print(reach(1, bytes([1, 0]) + b'\\0etude-contract'))"
        )
        result = stage.python(code)
    assert result.stdout in ("b'unreached'\n", "b'no socket'\n")


def test_what_is_allowed_can_be_reached_and_nothing_else(stage: Stage) -> None:
    stage.need(Capability.ALLOW_LIST)
    with listening() as allowed, listening() as other:
        code = REACH + f"print(reach(2, inet('127.0.0.1', {allowed})), reach(2, inet('127.0.0.1', {other})))"
        result = stage.python(code, spec=SandboxSpec(allow=(f"127.0.0.1:{allowed}",)))
    assert result.stdout == "b'yes' b'unreached'\n"


def test_a_place_that_is_allowed_by_name_is_found_by_its_name(stage: Stage) -> None:
    stage.need(Capability.ALLOW_LIST)
    with listening() as allowed:
        code = (
            f"import socket\nwith socket.create_connection(('localhost', {allowed}), timeout=10) as server:\n"
            "    print(server.recv(9))"
        )
        result = stage.python(code, spec=SandboxSpec(allow=(f"localhost:{allowed}",)))
    assert (result.stdout, result.stderr) == ("b'yes'\n", "")


# --- The kernel ---------------------------------------------------------------------------------------------------


def test_an_own_kernel_is_another_one(stage: Stage) -> None:
    stage.need(Capability.OWN_KERNEL)
    theirs = stage.python("import os\nprint(open('/proc/version').read(), os.uname().release)").stdout
    assert theirs
    assert os.uname().release not in theirs
