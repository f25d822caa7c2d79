"""The command line: every mistake of a person is one line on stderr and exit status 2, never a traceback."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.core import TyperGroup

from etude.cli.actions.start_run import start, status_of
from etude.cli.main import COMMANDS, load, main
from etude.cli.options import own_name
from etude.config.loading import load_recipe
from etude.errors import PortInUseError
from etude.run.folder import RunFolder
from etude.run.resolve import resolve_device
from etude.tasks.harbor.family import read_tasks
from etude.telemetry.events import ProcessStarted
from etude.telemetry.log import EventReader
from harbor_folders import write_folder
from smalldisk import fill, small_disk

RECIPES = Path(__file__).parents[3] / "recipes"
QUICKSTART = RECIPES / "quickstart"
AGENT = (
    "harness.kind=command",
    "harness.options.command=['a', '{prompt}', '{temperature}']",
    "harness.options.timeout_s=60.0",
)


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail because of a user's mistake; returns the message."""
    assert main([str(argument) for argument in arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("etude: ")
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.iterdir()))
def test_a_shipped_recipe_resolves(recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(RECIPES / recipe), "--seed", "7", "--dry-run"]) == 0
    resolved = tmp_path / "run.toml"
    resolved.write_text(capsys.readouterr().out)
    assert load_recipe(resolved) == load_recipe(RECIPES / recipe, ["seed=7"])


def test_the_keys_of_a_recipe_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert "[gateway]         The HTTP API between harnesses and engines.\n" in capsys.readouterr().out
    assert main(["config", "engine.max_running"]) == 0
    text = capsys.readouterr().out
    assert "engine.max_running = 96\n    a whole number, ≥ 1\n    Most sequences that are decoded at a time.\n" in text
    assert "engine.port" not in text
    assert "'nonsense'" in fail(capsys, "config", "nonsense")


def test_a_dry_run_says_what_the_reward_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(RECIPES / "tab"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "# reward: from -1.32 to 1" in text
    assert "#   rejected: -0.5 to 0, -0.5 × grader.wrong, version 1" in text
    assert main(["run", str(QUICKSTART), "--dry-run"]) == 0
    assert "# reward" not in capsys.readouterr().out


def test_a_behaviour_of_another_version_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe = (RECIPES / "tab" / "run.toml").read_text()
    old = 'source = "behaviour.sampled_tokens"\nversion = 1'
    assert old in recipe
    (tmp_path / "run.toml").write_text(recipe.replace(old, old.replace("= 1", "= 7")))
    text = fail(capsys, "run", tmp_path, "--out", tmp_path / "out")
    assert "'tokens' was written for version 7 of 'behaviour.sampled_tokens', which is 1 here" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_judge_that_is_not_to_be_trusted_is_refused_before_anything_runs(
    way: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    strict = ("--set", "judge.min_agreement=0.99")
    text = fail(capsys, "run", RECIPES / "summaries", *strict, *way, "--out", tmp_path / "out")
    assert "the judge of 'style' cannot be trusted" in text or "the judge of 'factuality' cannot" in text
    assert not (tmp_path / "out").exists()


def test_a_missing_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'recipes/nowhere'" in fail(capsys, "run", "recipes/nowhere")


def test_no_recipe_at_all_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipes/quickstart" in fail(capsys, "run")


def test_an_unknown_key_names_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    text = fail(capsys, "run", QUICKSTART, "--set", "trainer.lerning_rate=1")
    assert "trainer.lerning_rate" in text
    assert "trainer.learning_rate" in text


def test_a_wrong_type_is_named_with_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    text = fail(capsys, "run", QUICKSTART, "--set", "trainer.steps=many")
    assert "trainer.steps" in text
    assert "'many'" in text


def test_an_option_without_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no effect" in fail(capsys, "run", QUICKSTART, "--set", "rollouts.concurrency=1000")
    assert "seed" in fail(capsys, "run", "--resume", "somewhere", "--seed", "1")


def test_a_folder_without_a_run_cannot_be_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path) in fail(capsys, "run", "--resume", tmp_path)


def test_a_run_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", load_recipe(QUICKSTART))
    assert "--resume" in fail(capsys, "run", QUICKSTART, "--out", tmp_path / "run")


def test_an_unwritable_folder_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file/run" in fail(capsys, "run", QUICKSTART, "--out", tmp_path / "file" / "run")


def test_a_full_disk_is_a_failure_with_a_fix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = RunFolder.create(disk / "run", load_recipe(QUICKSTART), ledger=str(tmp_path / "ledger.db"))
        fill(disk)
        assert main(["run", "--resume", str(folder.path)]) == 4
    text = capsys.readouterr().err
    assert f"No space left on device; {folder.path} has " in text
    assert "make room" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("process", ["engine", "gateway"])
def test_a_port_in_use_is_named(process: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = fail(capsys, "run", QUICKSTART, "--out", tmp_path / "run", "--set", f"{process}.port={port}")
    assert f"{process}.port = {port}: that port of 127.0.0.1 is in use" in text
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_leaves_its_place_free(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = load_recipe(QUICKSTART, [f"engine.port={taken.getsockname()[1]}"])
        folder = RunFolder.create(tmp_path / "run", config)
        with pytest.raises(PortInUseError):
            start(folder)
        assert not folder.path.exists()
        folder = RunFolder.create(tmp_path / "run", config)
        (Path(folder.store) / "000000").write_text("a weight version")
        with pytest.raises(PortInUseError):
            start(folder)
        assert folder.path.exists(), "there is something to go on from"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model.checkpoint=nowhere", "midtrain.tokens=0"), "model.checkpoint = 'nowhere': no Hugging Face checkpoint"),
        ((*AGENT, "harness.options.mounts=['nowhere']"), "harness.options.mounts: there is no folder 'nowhere'"),
        ((*AGENT, "harness.options.mounts=['.venv-harness']"), "`make harness` makes it"),
        (("tasks.family=repository", "tasks.folder=nowhere"), "tasks.folder: nowhere has no tasks: make some with"),
        (("tasks.family=harbor", "tasks.folder=nowhere"), "tasks.folder: "),
    ],
)
def test_a_folder_that_is_not_here_is_named_before_there_is_a_run(
    settings: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[sandboxes]\nkind = 'ns'\n")
    text = fail(capsys, "run", tmp_path, "--out", tmp_path / "run", *(f"--set={setting}" for setting in settings))
    assert words in text
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(resolve_device("auto") == "cuda", reason="this machine has one")
@pytest.mark.parametrize("section", ["trainer", "engine"])
def test_a_device_that_is_not_here_is_named(section: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = fail(capsys, "run", QUICKSTART, "--out", tmp_path / "run", "--set", f"{section}.device=cuda")
    assert f"{section}.device = 'cuda', but torch " in text
    assert not (tmp_path / "run").exists()


def test_output_that_no_one_reads_on_or_can_show_is_no_fault() -> None:
    command = [sys.executable, "-m", "etude", "tasks", "ls", str(QUICKSTART), "--count", "2000"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "train task 0" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--k", "1,5", "--passes", "2"), "--k 1,5: pass@5 takes as many tries of a task, raise --passes"),
        (("--tasks", "0"), "--tasks 0: expected 1 or more"),
        ((), "run has no weights yet"),
    ],
)
def test_an_evaluation_that_cannot_be_had_is_refused_at_once(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "run", load_recipe(QUICKSTART))
    assert words in fail(capsys, "eval", folder.path, *options)


def test_a_run_that_learnt_nothing_does_not_end_as_if_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of({"learning": {"nothing_learnt": None}}) == 0
    assert status_of({"learning": {"nothing_learnt": "nothing was learnt: why"}}) == 3
    assert capsys.readouterr().err == "etude: nothing was learnt: why\n"


def test_a_process_outside_a_run_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "run.toml" in fail(capsys, "train", "--run", tmp_path)


def test_an_empty_store_has_nothing_to_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", load_recipe(QUICKSTART))
    assert "no weight version" in fail(capsys, "weights", "export", tmp_path / "run", tmp_path / "out")


def test_tasks_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "ls", str(QUICKSTART), "--split", "heldout", "--count", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("── heldout task") == 2
    assert text.endswith("\nno end of training tasks, no end of held-out tasks\n")


def test_the_doctor_compares_engine_and_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("model.shape.layers=1", "model.shape.hidden_size=32", "numerics.arithmetic=invariant")
    tiny = [word for setting in settings for word in ("--set", setting)]
    assert main(["doctor", "--parity", *tiny]) == 0
    assert "agree to the last bit" in capsys.readouterr().out
    strict = ["--set", "numerics.arithmetic=fast", "--set", "numerics.warn_k3=1e-30", "--set", "numerics.stop_k3=1e-30"]
    assert main(["doctor", "--parity", *tiny, *strict]) == 2
    assert "disagree" in capsys.readouterr().out


def test_the_doctor_says_which_options_would_do_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--model, --set would have no effect" in fail(capsys, "doctor", "--model", tmp_path, "--set", "seed=1")
    assert "run.toml" in fail(capsys, "doctor", "--parity", "--run", tmp_path)
    assert "tokenizer.json is missing" in fail(capsys, "doctor", "--parity", "--model", tmp_path)  # no run starts so


def test_help_imports_no_command_and_neither_torch_nor_rich() -> None:
    program = (
        "import sys; from etude.cli.main import main; main([]);"
        "print([name for name in sys.modules if name in ('torch', 'rich') or name.startswith('etude.cli.commands')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("[]\n")
    words = " ".join(shown.split())
    assert all(f" {name} {line} " in f"{words} " for name, (_, line) in COMMANDS.items())


def test_every_command_opens_with_its_line_of_the_help() -> None:
    for name, (_, line) in COMMANDS.items():
        command = load(name)
        assert isinstance(command, TyperGroup) or (command.help or "").startswith(line)


def test_an_unknown_command_is_met_with_its_neighbour(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'weights'?" in fail(capsys, "weigths")
    assert "No such option" in fail(capsys, "run", "--sed", "1")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"etude {version('etude')}\n"


def test_a_shell_gets_completions() -> None:
    question = os.environ | {"_ETUDE_COMPLETE": "complete_bash", "COMP_WORDS": "etude wei", "COMP_CWORD": "1"}
    answer = subprocess.run([sys.executable, "-m", "etude"], env=question, capture_output=True, text=True, check=False)
    assert answer.stdout.split() == ["weights"]


def test_tasks_of_a_folder_are_listed_with_their_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, side in (("a", "train"), ("b", "heldout"), ("c", "train")):
        write_folder(tmp_path / name, {"task.toml": f"[task]\nname = '{name}'\n[metadata.etude]\nsplit = '{side}'"})
    listed = {}
    for side in ("train", "heldout"):
        assert main(["tasks", "ls", str(tmp_path), "--split", side, "--count", "9"]) == 0
        listed[side] = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in listed["train"][:-1]] == ["train a", "train c"]
    assert [line.partition(":")[0] for line in listed["heldout"][:-1]] == ["heldout b"]
    assert listed["train"][-1] == "2 training tasks, 1 held-out tasks, with tasks.heldout_every = 6"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tasks", "check"], "check what?"),
        (["tasks", "build", "x", "--installer", "http://a"], "--installer and --model go together"),
        (["tasks", "check", "x", "--sandbox", "remote"], "--sandbox remote and --sandbox-url go together"),
        (["sandboxes", "serve", "--clients", "x", "--sandboxes", "9"], "--clients FILE sets the rights of each client"),
        (["sandboxes", "serve", "--replica", "1"], "--replica and --region would have no effect without --announce"),
        (["sandboxes", "drain", "http://127.0.0.1:1"], "set ETUDE_SANDBOXES_KEY"),
        (["tasks", "ls", "no-such-folder"], "no-such-folder"),
    ],
)
def test_commands_with_wrong_options_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_environment_is_compared_with_what_another_one_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if main(["sandboxes", "probe"]) != 0:
        pytest.skip("this machine grants no sandboxes with namespaces")
    answers = json.loads(capsys.readouterr().out)
    text = tmp_path / "said.json"
    text.write_text(json.dumps(answers))
    assert main(["sandboxes", "probe", "--against", str(text)]) == 0
    text.write_text(json.dumps({**answers, "hostname": "production-7"}))
    assert main(["sandboxes", "probe", "--against", str(text)]) == 2
    assert "production-7" in capsys.readouterr().out
    text.write_text("nothing")
    assert "said.json" in fail(capsys, "sandboxes", "probe", "--against", text)


def test_tasks_of_a_recipe_are_written_in_harbors_format(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["tasks", "export", str(QUICKSTART), str(out), "--count", "2"]) == 0
    reading = read_tasks(out)
    assert (len(reading.tasks), reading.refused) == (2, {})
    assert "2 tasks" in capsys.readouterr().err
    assert main(["tasks", "export", str(QUICKSTART), str(out), "--count", "2"]) == 2
    assert "is there already" in capsys.readouterr().err


def started(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "etude", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ | variables)


def test_a_run_that_is_terminated_stops_its_processes_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started("run", QUICKSTART, "--out", folder) as run:
        pids: list[int] = []
        while not pids:
            assert run.poll() is None
            pids = [
                one.event.pid for one in EventReader(folder / "events").new() if isinstance(one.event, ProcessStarted)
            ]
            time.sleep(0.02)
        run.terminate()
        _, text = run.communicate(timeout=90)
    assert run.returncode == 143
    assert f"run --resume {folder}" in text
    assert "Traceback" not in text
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_command_that_is_terminated_while_it_waits_ends_by_its_own_ways_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with started("chat", "--url", url, OPENAI_API_KEY="k") as chat:
            assert chat.stdin is not None
            chat.stdin.close()
            connection, _ = server.accept()
            chat.terminate()
            assert chat.wait(60) == 143
            assert chat.stderr is not None
            assert chat.stderr.read() == ""
            connection.close()


def test_a_program_that_is_not_on_the_path_is_called_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "etude"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [str(program), "run"])
    assert own_name() == str(program)
    monkeypatch.setattr(sys, "argv", ["/somewhere/etude/__main__.py", "run"])
    assert own_name() == f"{sys.executable} -m etude"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_name() == "etude"
