"""Attacks by the author of a suite, task folder, repository, archive or workflow action, who wants to run code on the
machine.
"""

import gzip
import io
import json
import re
import subprocess
import tarfile
import tracemalloc
import zipfile
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from etude.errors import ConfigError, DamagedError
from etude.ledger.records import encode_task
from etude.sandbox_spec import SCRATCH, EnvironmentSpec, Image
from etude.sandboxes.images.containers import add_image, add_services, reference_of
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.failures import SourceError
from etude.taskgen.harbor.export import export_task, folder_of
from etude.taskgen.history.records import RECORDS_FILE, HistoryRecord, read_records
from etude.taskgen.history.sources import Commits, open_history
from etude.taskgen.sources import fetch, read_texts
from etude.tasks.harbor.compose import parse_compose
from etude.tasks.harbor.settings import TaskFolderError, fill_variables
from etude.tasks.repositories.folder import PackageFolder, RepositoryTasks
from etude.types import AnswerChecks, ScriptChecks, Split, Task
from registries import what_is_missing, write_files, write_layout

RECORD = HistoryRecord(
    task_id="0123456789abcdef",
    source="pypi:humanize",
    package="humanize",
    before="4.13.0",
    after="4.14.0",
    day="",
    prompt="Do it.",
    template="humanize:x",
    path="humanize/x.py",
    name="x",
    lines=3,
    difficulty="easy",
    about=("tests/test_x.py::test_x",),
    others=(),
    timeout_s=30.0,
    digest="0" * 64,
)
OUTSIDE = ["../../etc/cron.d/x", "/etc/cron.d/x", "..", "", "a/b", "-rf", "a\0b", "~", ["x"], None]


@pytest.mark.parametrize("field", ["task_id", "package"])
@pytest.mark.parametrize("value", OUTSIDE)
def test_to_have_a_suite_write_outside_of_its_folder(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / RECORDS_FILE).write_text(json.dumps({**asdict(RECORD), field: value}))
    with pytest.raises(DamagedError, match="not a record of a task"):
        read_records(tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    "option", ["--output={}", "--remote=attacker.example:x", "--exec=touch {}", "-o{}", "HEAD:../x"]
)
def test_to_have_git_obey_the_name_of_a_commit(tmp_path: Path, repository: Path, option: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    with pytest.raises(SourceError, match="is no commit and no release"):
        Commits(str(repository)).tree(option.format(victim), tmp_path / "tree")
    assert victim.read_text() == "dear"
    assert not (tmp_path / "tree").exists()


FILTERED = """[filter "x"]
\tsmudge = touch {0}; cat
\tclean = touch {0}; cat
\tprocess = touch {0}
\trequired = true
"""
SIGNED = """[log]
\tshowSignature = true
[gpg]
\tprogram = {0}.sh
"""
FETCHED = """[core]
\trepositoryformatversion = 1
\tsshCommand = touch {0};
[extensions]
\tpartialClone = origin
[remote "origin"]
\turl = ssh://attacker.example/x
\tpromisor = true
\tuploadpack = touch {0};
"""
INCLUDED = """[include]
\tpath = {0}.config
[core]
\thooksPath = .
\tfsmonitor = touch {0}
\tpager = touch {0}
\talternateRefsCommand = touch {0};
"""
SIGNATURE = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n iQ==\n -----END PGP SIGNATURE-----\n"


@pytest.mark.parametrize(
    "settings", [FILTERED, SIGNED, FETCHED, INCLUDED], ids=["filter", "signature", "missing", "include"]
)
def test_to_have_a_program_run_that_a_repository_names_in_its_settings(
    tmp_path: Path, repository: Path, settings: str
) -> None:
    """The repository is an unpacked or shared folder with its own settings; a clone would not get them."""

    def git(*arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=repository, input=stdin, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    pwned = tmp_path / "pwned"
    program = Path(f"{pwned}.sh")
    program.write_text(f"#!/bin/sh\ntouch {pwned}\n")
    program.chmod(0o755)
    Path(f"{pwned}.config").write_text(FILTERED.format(pwned))
    (repository / ".gitattributes").write_text("* filter=x\n")
    git("add", ".")
    who = "a <a@b> 1700000000 +0000"
    text = (
        f"tree {git('write-tree')}\nparent {git('rev-parse', 'HEAD')}\nauthor {who}\ncommitter {who}\n{SIGNATURE}\nb\n"
    )
    git("update-ref", "HEAD", git("hash-object", "-t", "commit", "-w", "--stdin", stdin=text))
    blob = git("rev-parse", "HEAD:a.py")
    if settings is FETCHED:
        (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    (repository / ".git" / "config").write_text(settings.format(pwned))
    history = Commits(str(repository))
    (change,) = history.changes(5)
    with suppress(SourceError):
        history.tree(change.after, tmp_path / "tree")
    with suppress(SourceError):
        fetch(str(repository / ".git"), tmp_path / "bare")
    assert not pwned.exists()
    for tree in (tmp_path / "tree", tmp_path / "bare" / "tree"):
        assert (tree / "a.py").exists() == (settings is not FETCHED)


@pytest.mark.parametrize("version", ["../../secret", "{}", ".."])
def test_to_have_a_folder_of_this_machine_taken_for_a_release(tmp_path: Path, version: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.py").write_text("KEY = 1\n")
    history = open_history("pypi:humanize", tmp_path / "archives")
    with pytest.raises(SourceError, match="is no commit and no release"):
        history.tree(version.format(secret), tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


@pytest.mark.parametrize("name", ["../x", "--index-url=http://attacker.example", "x/../../y", "", "x @ file:///etc"])
def test_to_have_pip_obey_the_name_of_a_project(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError, match="names no project of an index"):
        open_history(f"pypi:{name}", tmp_path / "archives")


def _store_with(folder: Path, **settings: Any) -> str:
    """An image store from someone else, with one forged image; returns the image's digest."""
    ImageStore(folder)
    stored = {"base": "", "environment": {}, "workdir": "/work", "layers": [], **settings}
    digest = "a" * 64
    (folder / "images" / f"{digest}.json").write_bytes(orjson.dumps(stored))
    return digest


@pytest.mark.parametrize("layer", ["../../secret", "{}", "", ".", ["x"]])
def test_to_have_a_folder_of_this_machine_shown_as_a_layer(tmp_path: Path, layer: Any) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    name = layer.format(secret) if isinstance(layer, str) else layer
    digest = _store_with(tmp_path / "images", layers=[name])
    with pytest.raises(DamagedError, match="has a layer"):
        ImageStore(tmp_path / "images").open(digest)


def test_to_have_it_shown_by_a_link(tmp_path: Path) -> None:
    digest = _store_with(tmp_path / "images", layers=["b" * 64])
    (tmp_path / "images" / "layers" / ("b" * 64)).symlink_to("/etc")
    with pytest.raises(DamagedError, match="has a layer"):
        ImageStore(tmp_path / "images").open(digest)


def test_to_have_it_shown_as_a_base_system(tmp_path: Path) -> None:
    (tmp_path / "secret" / "root").mkdir(parents=True)
    digest = _store_with(tmp_path / "images", base="../../secret")
    with pytest.raises(ConfigError, match="base system"):
        ImageStore(tmp_path / "images").open(digest)


def test_to_have_another_file_read_as_an_image(tmp_path: Path) -> None:
    _store_with(tmp_path / "images")
    (tmp_path / "images" / "names" / "x").write_text("../../secret")
    with pytest.raises(DamagedError, match="is of no image"):
        ImageStore(tmp_path / "images").open("x")


UP = "/.." * 30
SERVICE = {"name": "x", "argv": ["x"], "environment": {}, "healthchecks": []}


@pytest.mark.parametrize(
    "stored",
    [
        *({"workdir": f"{UP}/etc"}, {"workdir": "etc"}, {"user": {"home": f"/srv{UP}/etc"}}),
        *({"services": [{**SERVICE, "name": "../../etc"}]}, {"user": {"uid": 0}}, {"user": {"uid": -1}}),
    ],
)
def test_to_have_a_stored_image_lead_out_of_its_sandbox(tmp_path: Path, stored: Any) -> None:
    """Providers make the folders of an image's user and services as root, and give the former away."""
    digest = _store_with(tmp_path / "images", **stored)
    with pytest.raises(DamagedError, match="is damaged"):
        ImageStore(tmp_path / "images").open(digest)


SHELL = {"bin/sh": "", "srv/x": ""}


@pytest.mark.heavy("skopeo, and root", missing=what_is_missing())
@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"WorkingDir": UP + "{0}"}, SHELL),
        ({"User": "app"}, {**SHELL, "etc/passwd": f"app:x:1234:77::/srv{UP}{{0}}:/bin/sh\n"}),
    ],
)
def test_to_have_a_folder_of_this_machine_given_away_while_an_image_is_unpacked(
    tmp_path: Path, config: dict[str, str], files: dict[str, str]
) -> None:
    victim = write_files(tmp_path / "victim", {"sudoers": "dear"})
    named = {name: text.format(victim) for name, text in files.items()}
    write_layout(
        tmp_path / "layout", [], files=named, config={key: text.format(victim) for key, text in config.items()}
    )
    with suppress(ConfigError):  # or it gets another home
        image = add_image(ImageStore(tmp_path / "store"), str(tmp_path / "layout"))
        assert image.user.home == "/home/agent"
    assert {path.stat().st_uid for path in (victim, victim / "sudoers")} == {0}


@pytest.mark.heavy("skopeo, and root", missing=what_is_missing())
@pytest.mark.parametrize("key", ["tmpfs", "working_dir"])
def test_to_have_a_service_make_a_folder_outside_of_its_root(tmp_path: Path, key: str) -> None:
    compose = f"services: {{main: {{}}, db: {{image: x, command: x, {key}: {UP}{tmp_path}/new}}}}"
    (order,) = parse_compose(compose, source=str(tmp_path / "docker-compose.yaml")).orders
    write_layout(tmp_path / "layout", [], files=SHELL)
    order = replace(order, source=f"oci:{tmp_path}/layout")
    with pytest.raises(ConfigError, match=r"without '\.\.'"):
        add_services(ImageStore(tmp_path / "store"), Image(base=SCRATCH), [order], timeout_s=60.0)
    assert not (tmp_path / "new").exists()


def test_to_have_the_builder_include_a_file_of_this_machine_in_a_dockerfile(tmp_path: Path) -> None:
    """Podman has the preprocessor of C read a Dockerfile whose name ends in .in."""
    compose = "services: {main: {}, db: {build: {context: ., dockerfile: Dockerfile.in}}}"
    with pytest.raises(TaskFolderError, match="preprocessor"):
        parse_compose(compose, source=str(tmp_path / "docker-compose.yaml"))


@pytest.mark.parametrize("place", ["127.0.0.1:6379", "169.254.169.254:80", "attacker.example:443"])
def test_to_have_a_task_open_the_network(tmp_path: Path, place: str) -> None:
    task = Task(
        task_id="t",
        family="repository",
        template="t",
        split=Split.TRAIN,
        prompt="Do it.",
        files={},
        checks=AnswerChecks(answer="x"),
        environment=EnvironmentSpec(allow=(place,)),
    )
    package = PackageFolder(tmp_path / "package")
    package.write("tasks/t.json", encode_task(task))
    with pytest.raises(ConfigError, match=r"environment\.allow"):
        RepositoryTasks(tmp_path)


@pytest.mark.parametrize("image", ["/etc", "containers-storage:x", "oci-archive:/root/private.tar", "dir:/root"])
def test_to_have_a_file_of_this_machine_taken_for_the_image_of_a_service(tmp_path: Path, image: str) -> None:
    compose = f"services: {{main: {{}}, db: {{image: '{image}'}}}}"
    (order,) = parse_compose(compose, source=str(tmp_path / "docker-compose.yaml")).orders
    assert order.source == f"docker://{image}"
    assert reference_of(order.source) == (f"docker://{image}", "")


@pytest.mark.parametrize(
    "service",
    [
        "image: x, volumes: ['./.git/a:/data']",
        "build: .git",
        "build: {context: ., dockerfile: .git/a}",
        "build: .git/b",
    ],
)
def test_to_have_a_service_see_a_folder_that_a_link_leads_to(tmp_path: Path, service: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "a").write_text("KEY")
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / ".git").symlink_to(tmp_path / "secret")
    source = str(tmp_path / "environment" / "docker-compose.yaml")
    with pytest.raises(TaskFolderError, match="leads out of"):
        parse_compose(f"services: {{main: {{}}, db: {{{service}}}}}", source=source)


def test_to_have_the_keys_of_this_machine_written_into_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_JUDGE_KEY", "SECRET")
    for text in ("${ETUDE_JUDGE_KEY}", "a${ETUDE_JUDGE_KEY}b"):
        with pytest.raises(TaskFolderError, match="not handed into sandboxes"):
            fill_variables({"X": text}, source="task.toml", key="verifier.env")


@pytest.mark.parametrize("name", ["../../evil", "{}/evil", "a/../../evil"])
def test_to_write_outside_of_the_folder_that_tasks_are_exported_to(tmp_path: Path, name: str) -> None:
    checks = ScriptChecks(files={"test.sh": "#!/bin/sh\n", name.format(tmp_path): "evil"})
    task = Task(
        task_id="t",
        family="harbor",
        template="t",
        split=Split.TRAIN,
        prompt="Do it.",
        files={},
        checks=checks,
        environment=EnvironmentSpec(),
    )
    with pytest.raises(TaskFolderError, match="does not lie below"):
        export_task(task, tmp_path / "out" / "t", images=None)
    with pytest.raises(TaskFolderError, match="does not lie below"):
        folder_of(replace(task, task_id=name.format(tmp_path)), tmp_path / "out")
    assert not list(tmp_path.rglob("evil"))


def _tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        for member, data in members:
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return path


def _member(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, b"" if "type" in fields else b"x = 1\n"


EVIL_MEMBERS = {
    "a path that leads out": _member("../evil.py"),
    "a link out": _member("p/link", type=tarfile.SYMTYPE, linkname="../../../../etc/passwd"),
    "a hard link out": _member("p/hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": _member("p/device", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "a pipe": _member("p/pipe", type=tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("what", EVIL_MEMBERS)
def test_to_have_an_archive_reach_out_of_its_folder(tmp_path: Path, what: str) -> None:
    archive = _tar(tmp_path / "p.tar.gz", _member("p/setup.py"), EVIL_MEMBERS[what])
    with pytest.raises(SourceError, match="cannot be unpacked"):
        fetch(str(archive), tmp_path / "in" / "folder")
    assert not list(tmp_path.rglob("evil*"))


def test_to_have_an_absolute_path_of_an_archive_taken_for_one_of_this_machine(tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    tree = fetch(str(_tar(tmp_path / "p.tar.gz", _member(str(outside)))), tmp_path / "folder")
    assert not outside.exists()
    assert tree.is_relative_to(tmp_path / "folder")


def test_to_have_a_link_inside_an_archive_read_a_file_of_this_machine(tmp_path: Path) -> None:
    link = _member("p/inner", type=tarfile.SYMTYPE, linkname="setup.py")
    tree = fetch(str(_tar(tmp_path / "p.tar.gz", _member("p/setup.py"), link)), tmp_path / "folder")
    (tree / "later").symlink_to("/etc/passwd")
    (tree / "PKG-INFO").symlink_to("/etc/passwd")
    assert read_texts(tree) == {"setup.py": "x = 1\n"}


def test_to_fill_the_disk_with_a_small_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.taskgen.sources.ARCHIVE_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("p/a", bytes(2 << 20))
    huge = tarfile.TarInfo("p/a")
    huge.size = 1 << 40  # by its header; nothing follows
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(huge.tobuf()))
    for name in ("bomb.zip", "bomb.tar.gz"):
        with pytest.raises(SourceError, match=r"unpacks to more than|cannot be unpacked"):
            fetch(str(tmp_path / name), tmp_path / f"folder-{name}")
        assert not list((tmp_path / f"folder-{name}" / "tree").iterdir())


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_to_fill_the_memory_with_a_long_name_in_a_small_archive(tmp_path: Path, kind: bytes) -> None:
    long, size_bytes = tarfile.TarInfo("long"), 32 << 20
    long.type = kind
    _tar(tmp_path / "bomb.tar.gz", _member("p/a"), (long, bytes(size_bytes)), _member("p/b"))
    tracemalloc.start()
    with pytest.raises(SourceError, match="cannot be unpacked"):
        fetch(str(tmp_path / "bomb.tar.gz"), tmp_path / "folder")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < size_bytes // 4


def test_to_use_up_the_file_system_with_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.taskgen.sources.ARCHIVE_MEMBERS", 100)
    members = [_member(f"p/{number}") for number in range(101)]
    with pytest.raises(SourceError, match="or 100 members"):
        fetch(str(_tar(tmp_path / "bomb.tar.gz", *members)), tmp_path / "folder")
    assert not list((tmp_path / "folder" / "tree").iterdir())


def test_to_have_a_moved_tag_of_an_action_publish_a_release() -> None:
    """Whoever may move a tag of an action would run code where releases are signed and the image is pushed."""
    workflows = [file.read_text() for file in Path(__file__).parents[2].glob(".github/workflows/*.yml")]
    actions = [action for text in workflows for action in re.findall(r"uses: *(.+)", text)]
    assert actions
    assert [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[0-9.]+", action)] == []
