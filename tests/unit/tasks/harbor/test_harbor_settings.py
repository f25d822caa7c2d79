"""``task.toml``: supported keys are read, and keys that would change the task are refused by name."""

import pytest

from etude.sandbox_spec import SandboxLimits
from etude.tasks.harbor.settings import PROCESSES, TaskFolderError, fill_variables, parse_settings


def test_what_is_not_said_is_closed_and_small() -> None:
    settings = parse_settings("", source="task.toml")
    assert settings.environment.allow == ()
    assert settings.environment.limits == SandboxLimits(
        memory_bytes=2 << 30, disk_bytes=10 << 30, processes=PROCESSES, cpus=1.0
    )
    assert settings.verifier.timeout_sec == 600


def test_everything_that_is_held_to_is_read() -> None:
    settings = parse_settings(
        """
        version = "1.3"
        artifacts = ["a.txt", { source = "/app/b", destination = "elsewhere" }]
        [task]
        name = "org/name"
        authors = [{ name = "A", email = "a@b" }]
        [metadata]
        anything = { at = ["all"] }
        [verifier]
        timeout_sec = 9
        env = { A = "b" }
        environment_mode = "separate"
        [agent]
        timeout_sec = 7.5
        [environment]
        cpus = 2
        memory_mb = 128
        storage_mb = 64
        os = "Linux"
        network_mode = "allowlist"
        allowed_hosts = ["pypi.org"]
        """,
        source="task.toml",
    )
    assert [artifact.source for artifact in settings.artifacts] == ["a.txt", "/app/b"]
    assert settings.environment.allow == ("pypi.org:443", "pypi.org:80")
    assert (settings.environment.limits.memory_bytes, settings.environment.cpus) == (128 << 20, 2.0)
    assert settings.metadata == {"anything": {"at": ("all",)}}
    assert (settings.verifier.timeout_sec, settings.agent.timeout_sec) == (9.0, 7.5)


def test_old_names_of_keys_are_understood() -> None:
    settings = parse_settings('[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false', source="t")
    environment = settings.environment
    assert (environment.memory_mb, environment.storage_mb, environment.network_mode) == (2048, 512, "no-network")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[environment]\ncpus = 'two'", "environment.cpus = 'two'"),
        ("[environment]\ncpus = 0", "environment.cpus = 0"),
        ("[environment]\nmemory = '2 bananas'", "memory is the old name of memory_mb"),
        ("[environment]\nmemory = '2G'\nmemory_mb = 1", "keep one of them"),
        ("[environment]\ncolour = 1", "environment.colour = 1: Harbor has no such key"),
        ("colour = 1", "colour = 1: Harbor has no such key"),
        ("[environment]\ngpus = 1", "environment.gpus = 1: sandboxes have no GPU"),
        ("[[steps]]\nname = 'one'", "write a folder for each"),
        ("[[verifier.collect]]\ncommand = 'dump'", "declare files in artifacts"),
        ("[environment]\nos = 'windows'", "environment.os"),
        ("[environment]\nnetwork_mode = 'public'", "network_mode = 'public'"),
        ("[environment]\nallow_internet = true", "network_mode = 'public'"),
        ("[environment]\nnetwork_mode = 'allowlist'", "goes with"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.org']", "not plain host names"),
        ("[agent]\nuser = 'root'", "agent.user = 'root': agents are never root"),
        ("[verifier]\nuser = 'nobody'", "verifier.user = 'nobody'"),
        ("schema_version = '2.0'", "schema_version = '2.0'"),
        ("artifacts = [{ source = 'a', exclude = ['b'] }]", "artifacts.0.exclude"),
        ("artifacts = [{ source = 'a', service = 'db' }]", "artifacts.0.service"),
        ("[environment\n", "is not TOML"),
    ],
)
def test_what_would_change_the_task_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(TaskFolderError, match=r"FOLDER/task\.toml") as refused:
        parse_settings(text, source="FOLDER/task.toml")
    assert words in str(refused.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(TaskFolderError) as refused:
        parse_settings("colour = 1\n[environment]\ncpus = 'two'\ngpus = 3", source="t")
    assert len(str(refused.value).splitlines()) == 4


def test_keys_that_ask_for_nothing_are_fine() -> None:
    parse_settings("[environment]\ngpus = 0\nmcp_servers = []\n[verifier]\ncollect = []", source="t")


def test_a_public_network_can_be_declined() -> None:
    settings = parse_settings("[environment]\nnetwork_mode = 'public'", source="t", offline=True)
    assert settings.environment.allow == ()


def test_variables_come_from_the_task_never_from_the_machine() -> None:
    assert fill_variables({"A": "${HOME:-x}/${B:-}", "C": "$HOME"}, source="t", key="k") == {"A": "x/", "C": "$HOME"}
    with pytest.raises(TaskFolderError, match=r"k\.KEY = '\$\{SECRET\}'"):
        fill_variables({"KEY": "${SECRET}"}, source="t", key="k")
