"""Contract of every provider of sandboxes: commands, and the life cycle of a sandbox."""

import asyncio
import math
import time
from contextlib import suppress

import pytest

from etude.errors import AgentFault, SandboxError
from etude.protocols import ExecResult, Sandbox
from etude.sandbox_spec import Capability, Image, SandboxSpec
from providers import TIMEOUT_S, WAIT_S, Stage, output, python

FOREVER = "import time\nprint('started', flush=True)\nwhile True: time.sleep(0.05)"
PROMPT_S = 10.0
"""For what happens at once, on a busy machine."""
TTL_S = 3.0


# --- A command and its result -------------------------------------------------------------------------------------


def test_a_program_reads_stdin_and_its_arguments(stage: Stage) -> None:
    files = {"echo.py": "import sys\nprint(sys.argv, __name__, input())"}
    result = stage.play(
        lambda sandbox: sandbox.exec(["python3", "echo.py", "a"], stdin="hello\n", timeout_s=TIMEOUT_S), files
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "['echo.py', 'a'] __main__ hello\n", "")
    assert not result.timed_out
    assert not result.truncated
    assert 0 < result.seconds < TIMEOUT_S


ENDINGS = [
    ("raise SystemExit(3)", 3, ""),
    ("raise SystemExit", 0, ""),
    ("raise SystemExit('bye')", 1, "bye\n"),
    ("import os; os._exit(7)", 7, ""),
    ("import os; os.kill(os.getpid(), 9)", 137, ""),
    ("import os; os.abort()", 134, ""),
    ("import sys; print('oops', file=sys.stderr)", 0, "oops\n"),
]


def test_exit_codes_are_those_of_a_shell(stage: Stage) -> None:
    async def end(sandbox: Sandbox) -> list[tuple[str, int, str]]:
        return [(code, (result := await python(sandbox, code)).exit_code, result.stderr) for code, _, _ in ENDINGS]

    assert stage.play(end) == ENDINGS


def test_an_exception_leaves_a_traceback_of_the_program_alone(stage: Stage) -> None:
    files = {"bad.py": "def f():\n    return 1 / 0\n\nf()\n"}
    result = stage.play(lambda sandbox: sandbox.exec(["python3", "bad.py"], timeout_s=TIMEOUT_S), files)
    assert result.exit_code == 1
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert result.stderr.count("File ") == 2
    assert "return 1 / 0" in result.stderr


def test_modules_of_the_sandbox_can_be_imported(stage: Stage) -> None:
    files = {"pkg/part.py": "value = 42", "main.py": "from pkg.part import value\nprint(value)"}
    run = ["python3", "main.py"]
    assert stage.play(lambda sandbox: sandbox.exec(run, timeout_s=TIMEOUT_S), files).stdout == "42\n"


@pytest.mark.parametrize(("argv", "exit_code"), [(["no-such-program"], 127), (["python3", "no-such-file.py"], 2)])
def test_a_missing_program_is_a_result(stage: Stage, argv: list[str], exit_code: int) -> None:
    result = stage.play(lambda sandbox: sandbox.exec(argv, timeout_s=TIMEOUT_S))
    assert result.exit_code == exit_code
    assert argv[-1] in result.stderr


def test_a_command_line_that_does_not_fit_is_a_result(stage: Stage) -> None:
    result = stage.python("#" * 200_000)
    assert result.exit_code != 0
    assert "long" in result.stderr


def test_what_is_no_command_is_the_callers_error(stage: Stage) -> None:
    async def ask(sandbox: Sandbox) -> None:
        for argv, timeout_s in ((list[str](), 1.0), (["true"], 0.0), (["true"], math.nan), (["tr\0ue"], 1.0)):
            with pytest.raises(ValueError, match=r"."):
                await sandbox.exec(argv, timeout_s=timeout_s)

    stage.play(ask)


def test_variables_are_the_images_the_specifications_and_the_calls(stage: Stage) -> None:
    image = Image(environment={"A": "image", "B": "image", "C": "image", "D": "é ' \" $x\n"})
    look = "import os\nprint([os.environ.get(name) for name in 'ABCD'])"

    async def ask(sandbox: Sandbox) -> list[str]:
        added = await sandbox.exec(["python3", "-c", look], environment={"C": "call"}, timeout_s=TIMEOUT_S)
        return [added.stdout, await output(sandbox, look)]

    printed = stage.play(ask, spec=SandboxSpec(image=image, environment={"B": "spec", "C": "spec"}))
    last = image.environment["D"]
    assert printed == [f"{['image', 'spec', 'call', last]}\n", f"{['image', 'spec', 'spec', last]}\n"]


def test_commands_find_nothing_of_the_providers_variables(stage: Stage) -> None:
    result = stage.python("import os\nprint(*os.environ)")
    assert {"PATH", "HOME"} <= set(result.stdout.split())
    assert not [name for name in result.stdout.split() if "ETUDE" in name or "PYTEST" in name]


def test_commands_run_in_the_images_working_folder(stage: Stage) -> None:
    spec = SandboxSpec(image=Image(workdir="/srv/app"))

    async def look(sandbox: Sandbox) -> list[str | None]:
        await output(sandbox, "open('made', 'w').write('x')")
        return [
            await output(sandbox, "import os\nprint(os.getcwd(), os.listdir('.'))"),
            await sandbox.read_file("made"),
        ]

    cwd, made = stage.play(look, spec=spec)
    assert cwd is not None
    assert cwd.endswith("/srv/app ['made']\n")
    assert made == "x"


# --- Input and output ---------------------------------------------------------------------------------------------


def test_text_of_any_language_passes(stage: Stage) -> None:
    text = "naïve – 漢字 🦉"
    files = {"naïve 漢字.py": f"# {text}\nimport sys\nprint(sys.argv[1], input(), open(__file__).read().count('漢字'))"}
    run = ["python3", "naïve 漢字.py", text]
    result = stage.play(lambda sandbox: sandbox.exec(run, stdin=text, timeout_s=TIMEOUT_S), files)
    assert (result.stdout, result.stderr) == (f"{text} {text} 2\n", "")


def test_bytes_that_are_no_text_are_shown_as_such(stage: Stage) -> None:
    result = stage.python("import os\nos.write(1, bytes(range(256)))\nos.write(2, b'\\xff\\xfe')")
    assert result.stdout == bytes(range(256)).decode("utf-8", "replace")
    assert result.stderr == "\ufffd\ufffd"


def test_ten_megabytes_of_input_arrive(stage: Stage) -> None:
    text = "0123456789" * 1_000_000
    result = stage.python("import sys\ntext = sys.stdin.read()\nprint(len(text), text[-3:])", stdin=text)
    assert result.stdout == "10000000 789\n"


def test_input_that_no_command_reads_holds_nothing_up(stage: Stage) -> None:
    result = stage.python("print('done')", stdin="x" * 2_000_000)
    assert (result.exit_code, result.stdout) == (0, "done\n")


def test_a_flood_of_output_is_cut(stage: Stage) -> None:
    result = stage.python("for _ in range(1000): print('x' * 9999)")
    assert (result.exit_code, result.truncated) == (0, True)
    assert 60_000 < len(result.stdout) < 5_000_000
    assert set(result.stdout) == {"x", "\n"}


def test_a_flood_without_end_still_meets_its_deadline(stage: Stage) -> None:
    result = stage.python("while True: print('x' * 99_999)", timeout_s=3.0)
    assert (result.timed_out, result.truncated) == (True, True)


# --- Time ---------------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, time
for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
os.fork()
print('started', flush=True)
while True: pass
"""


def test_what_ignores_every_signal_is_killed_at_its_deadline(stage: Stage) -> None:
    result = stage.python(STUBBORN, timeout_s=5.0)
    assert result.timed_out
    assert (result.exit_code, set(result.stdout.split())) == (137, {"started"})
    assert 5.0 <= result.seconds < 5.0 + PROMPT_S


LEFTOVER = """
import os, signal, time
open("alive", "w").close()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        with open("alive", "a") as file:
            file.write("x")
        time.sleep(0.01)
while not os.path.getsize("alive"):
    time.sleep(0.01)
"""
"""A daemon that still has the outputs of its command open."""


async def seen_alive(sandbox: Sandbox, wait_s: float) -> tuple[ExecResult, bool]:
    """Result of the command that leaves a daemon, and true if the daemon is still alive."""
    start = time.monotonic()
    result = await python(sandbox, LEFTOVER)
    assert result.exit_code == 0
    assert time.monotonic() - start < PROMPT_S
    before = await sandbox.read_file("alive")
    assert before
    deadline_s, lives = time.monotonic() + wait_s, False
    while not lives and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
        lives = len(await sandbox.read_file("alive") or "") > len(before)
    return result, lives


def test_what_a_command_left_running_is_there_for_the_next_one_or_gone(stage: Stage) -> None:
    expected = Capability.BACKGROUND in stage.claims
    result, lives = stage.play(lambda sandbox: seen_alive(sandbox, WAIT_S if expected else 0.3))
    assert not result.timed_out
    assert lives == expected


def test_giving_up_a_command_kills_it(stage: Stage) -> None:
    async def cancel(sandbox: Sandbox) -> str:
        beat = "import time\nwhile True:\n    open('beat', 'a').write('x')\n    time.sleep(0.01)"
        running = asyncio.ensure_future(python(sandbox, beat))
        while not await sandbox.read_file("beat"):
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with asyncio.timeout(WAIT_S):  # over HTTP, who hangs up does not wait for the end
            before, now = None, await sandbox.read_file("beat")
            while before != now:
                await asyncio.sleep(0.2)
                before, now = now, await sandbox.read_file("beat")
        return await output(sandbox, "print('next')")

    assert stage.play(cancel) == "next\n"


def test_twenty_commands_at_a_time(stage: Stage) -> None:
    async def crowd(sandbox: Sandbox) -> list[str]:
        codes = [f"import time\ntime.sleep(0.01)\nprint({number})" for number in range(20)]
        return [result.stdout for result in await asyncio.gather(*(python(sandbox, code) for code in codes))]

    assert stage.play(crowd) == [f"{number}\n" for number in range(20)]


MULTIPLIES = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while True:
            open("beat", "a").write("x")
            if os.fork():
                os._exit(0)
            os.setsid()
while not os.path.exists("beat"):
    time.sleep(0.01)
"""
"""Processes that leave every session, and are others a moment later."""
KILLS_ALL = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stopping = False
    while True:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in (1, os.getpid()):
                try:
                    os.kill(int(name), signal.SIGSTOP if stopping else signal.SIGKILL)
                except OSError:
                    pass
        stopping = not stopping
        open("kills", "w").close()
while not os.path.exists("kills"):
    time.sleep(0.01)
"""


def test_what_was_left_running_is_killed_however_it_multiplies(stage: Stage) -> None:
    async def kill(sandbox: Sandbox) -> str:
        await python(sandbox, MULTIPLIES)
        await sandbox.kill_processes()
        before = await sandbox.read_file("beat")
        await asyncio.sleep(0.2)
        assert await sandbox.read_file("beat") == before
        await sandbox.kill_processes()  # also where nothing runs
        return await output(sandbox, "print('goes on')")

    assert stage.play(kill, spec=stage.tight) == "goes on\n"


def test_what_runs_inside_cannot_make_the_machine_fail(stage: Stage) -> None:
    """A program kills and stops every process that it sees; étude's calls succeed, or fail as the agent's fault."""

    async def disturb(sandbox: Sandbox) -> None:
        await python(sandbox, "import os\nos.mkdir('many')\nfor n in range(500): open(f'many/{n}', 'w').close()")
        await python(sandbox, KILLS_ALL)
        with suppress(AgentFault):
            assert await sandbox.export(["many"])
            await sandbox.write_file("one", "1")
            assert await sandbox.read_file("one") == "1"
        await sandbox.kill_processes()
        assert await sandbox.export(["many"])

    stage.need(Capability.BACKGROUND)
    stage.play(disturb)


def test_a_disk_that_is_full_is_the_agents_fault(stage: Stage) -> None:
    stage.need(Capability.DISK_LIMIT)

    async def fill(sandbox: Sandbox) -> None:
        await python(sandbox, "file = open('big', 'wb')\nwhile True: file.write(bytes(1 << 20))")
        with pytest.raises(AgentFault):
            await sandbox.write_file("more", "x" * (1 << 20))
        assert await sandbox.read_file("small") == "kept"

    stage.play(fill, {"small": "kept"}, spec=stage.tight)


# --- The life of a sandbox ----------------------------------------------------------------------------------------


async def assert_closed(sandbox: Sandbox) -> None:
    for use in (
        sandbox.exec(["python3", "-c", ""]),
        sandbox.read_file("a"),
        sandbox.write_file("a", ""),
        sandbox.export(["a"]),
        sandbox.load(b""),
        sandbox.stats(),
        sandbox.kill_processes(),
        sandbox.snapshot(),
        sandbox.fork(),
    ):
        with pytest.raises(SandboxError):
            await use


def test_a_closed_sandbox_says_so(stage: Stage) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.close()
        await sandbox.close()
        await assert_closed(sandbox)

    stage.play(use, {"a": "b"})


def test_closing_ends_the_commands_that_run(stage: Stage) -> None:
    async def close(sandbox: Sandbox) -> float:
        running = asyncio.ensure_future(python(sandbox, FOREVER))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        await sandbox.close()
        with pytest.raises(SandboxError):
            await running
        return time.monotonic() - start

    assert stage.play(close) < PROMPT_S


def test_a_sandbox_that_is_being_closed_says_so(stage: Stage) -> None:
    async def use(sandbox: Sandbox) -> None:
        await sandbox.write_file("a", "kept")
        closing = asyncio.ensure_future(sandbox.close())
        await asyncio.sleep(0)
        with pytest.raises(SandboxError):
            await sandbox.export(["a"])  # and not what is left of it
        await assert_closed(sandbox)
        await closing

    stage.play(use)


def test_a_sandbox_ends_by_itself(stage: Stage) -> None:
    began_s = time.monotonic()

    async def wait(sandbox: Sandbox) -> None:
        try:
            assert (await python(sandbox, "")).exit_code == 0
        except SandboxError:  # a machine may be too busy to start a command in that time; the end is never early
            assert time.monotonic() - began_s >= TTL_S
        with pytest.raises(SandboxError):
            await python(sandbox, FOREVER)
        await assert_closed(sandbox)
        await sandbox.close()

    stage.play(wait, spec=SandboxSpec(ttl_s=TTL_S))


def test_sandboxes_do_not_see_each_other(stage: Stage) -> None:
    async def look(sandbox: Sandbox) -> str:
        other = await stage.provider.create({"secret": "theirs"})
        try:
            find = "import os\nprint([folder for folder, _, names in os.walk('/work') if 'secret' in names])"
            return await output(sandbox, find if Capability.CONFINED in stage.claims else "print([])")
        finally:
            await other.close()

    assert stage.play(look) == "[]\n"


def test_what_is_used_is_counted(stage: Stage) -> None:
    async def use(sandbox: Sandbox) -> None:
        before = await sandbox.stats()
        await output(sandbox, "open('big', 'wb').write(bytes(range(256)) * 20_000)")
        after = await sandbox.stats()
        assert 0 < before.age_s < after.age_s < 60
        for stats in (before, after):
            for used in (stats.memory_bytes, stats.processes, stats.cpu_s, stats.disk_bytes):
                assert math.isnan(used) or 0 <= used < 1 << 40
        assert math.isnan(after.disk_bytes) or after.disk_bytes - before.disk_bytes > 4_000_000
        assert math.isnan(after.cpu_s) or after.cpu_s > before.cpu_s

    stage.play(use)
