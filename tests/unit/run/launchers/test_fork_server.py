"""Processes that are forked from one that has imported their code."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from etude.errors import InfrastructureError
from etude.run.launchers.fork_server import ForkedProcess, ForkOrder, ForkServer, fork_server
from waiting import WAIT_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux allows forks after imports")

LAUNCHER = textwrap.dedent("""
    import os, sys, time
    from etude.run.launchers.fork_server import ForkOrder, ForkServer

    folder = sys.argv[1]
    order = ForkOrder(arguments=("ui", folder), environment=dict(os.environ), folder=folder, log=f"{folder}/log")
    print(ForkServer().fork(order).pid, flush=True)
    time.sleep(600)
""")
"""A program that starts a page's server and waits."""


@pytest.fixture
def server() -> ForkServer:
    """The server of all tests in this process, since its imports take seconds."""
    server = fork_server()
    assert server is not None
    return server


def order(folder: Path, *arguments: str, **environment: str) -> ForkOrder:
    """A command of étude, with its log in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "log").touch()
    variables = {**os.environ, **environment}
    return ForkOrder(arguments=arguments, environment=variables, folder=str(folder), log=str(folder / "log"))


def serving(server: ForkServer, folder: Path) -> ForkedProcess:
    """A command that runs until it is stopped, and is ready."""
    process = server.fork(order(folder, "ui", str(folder)))
    wait_until(lambda: "http://" in (folder / "log").read_text(encoding="utf-8"))
    return process


def test_a_forked_command_has_its_output_folder_and_exit_status(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n", encoding="utf-8")
    done = server.fork(order(tmp_path, "--version"))
    assert done.wait(WAIT_S) == 0
    missing = server.fork(order(tmp_path, "show", "runs/nothing"))
    assert missing.wait(WAIT_S) == 2
    first, version, message = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert (first, version.split()[0]) == ("before", "etude")
    assert "runs/nothing" in message


def test_a_relative_path_is_one_of_the_ordered_folder(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[trainer]\nsteps = true\n", encoding="utf-8")
    assert server.fork(order(tmp_path, "run", "recipe.toml", "--dry-run")).wait(WAIT_S) == 2
    assert "trainer.steps" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_environment_is_the_ordered_one(server: ForkServer, tmp_path: Path) -> None:
    for columns in (60, 100):
        assert server.fork(order(tmp_path / str(columns), "keys", "--help", COLUMNS=str(columns))).wait(WAIT_S) == 0
        lines = (tmp_path / str(columns) / "log").read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) == columns


def test_a_process_is_stopped_and_has_its_own_session_and_name(server: ForkServer, tmp_path: Path) -> None:
    process = serving(server, tmp_path)
    assert process.poll() is None
    assert os.getsid(process.pid) == process.pid
    assert f"-m etude ui {tmp_path}" in Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    process.terminate()
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    process.terminate()  # it has ended: nothing happens


def test_a_killed_process_has_the_signal_as_its_status(server: ForkServer, tmp_path: Path) -> None:
    process, other = serving(server, tmp_path / "killed"), serving(server, tmp_path / "other")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert other.poll() is None
    other.terminate()
    assert other.wait(WAIT_S) == 128 + signal.SIGTERM


def test_processes_end_with_their_launcher(tmp_path: Path) -> None:
    launcher = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(launcher, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        process = int(program.stdout.readline())
        program.kill()
    wait_until(lambda: not Path(f"/proc/{process}").exists())


def test_processes_end_with_their_server(tmp_path: Path) -> None:
    with ForkServer() as server:
        process = serving(server, tmp_path)
        os.kill(parent_of(process.pid), signal.SIGKILL)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        assert server.has_ended
        with pytest.raises(InfrastructureError, match="cannot start `etude show`"):
            server.fork(order(tmp_path, "show"))


def test_the_server_has_one_thread(server: ForkServer, tmp_path: Path) -> None:
    process = serving(server, tmp_path)  # all is imported
    assert len(list(Path(f"/proc/{parent_of(process.pid)}/task").iterdir())) == 1
    process.terminate()
    process.wait(WAIT_S)


def test_an_environment_beyond_the_limit_is_an_error(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="too long"):
        server.fork(order(tmp_path, "--version", LARGE="x" * 2_000_000))
    assert server.fork(order(tmp_path, "--version")).wait(WAIT_S) == 0


def parent_of(process: int) -> int:
    """The id of the process that started one."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
