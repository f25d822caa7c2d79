"""Services of a task folder: read from a compose file, refused by name, and run."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from etude.sandbox_spec import Capability, Healthcheck, Image
from etude.sandboxes.images.containers import ServiceOrder
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.services import sandbox_spec
from etude.tasks.harbor.compose import parse_compose, seconds
from etude.tasks.harbor.folder import read_task
from etude.tasks.harbor.images import plain_files
from etude.tasks.harbor.settings import TaskFolderError
from etude.types import Split
from harbor_folders import WHOLE, write_folder

SERVED = """
services:
  main:
    build: .
    command: sh -c 'sleep infinity'
    depends_on: {front: {condition: service_healthy}}
    environment: [API=http://front:8081/word]
    healthcheck: {test: [CMD, test, -e, notes/a.txt], interval: 1s}
  front:
    build: {context: .}
    command: python3 -m http.server --directory /tmp 8081
    depends_on: [back]
    ports: ["8081:8081"]
    healthcheck: {test: test -e /tmp/word, interval: 1s, retries: 30}
  back:
    build: .
    command: [sh, -c, "sleep 1; echo $$WORD >/tmp/word"]
    environment: {WORD: 42}
"""

LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}{name}: &{name} [{', '.join(['*' + before] * 8)}]\n" for before, name in pairwise("abcdefg")
)
"""Two million values in four hundred characters."""


def test_durations_are_those_of_compose() -> None:
    assert [seconds(text) for text in ("5s", "500ms", "1m30s", "1h", "1.5s")] == [5, 0.5, 90, 3600, 1.5]
    with pytest.raises(ValueError, match="'5' is not a duration"):
        seconds("5")


def test_aliases_are_read() -> None:
    text = "x: &same {image: busybox}\nservices: {main: {}, a: *same, b: {<<: *same}}"
    with pytest.raises(TaskFolderError) as caught:
        parse_compose(text, source="c")
    assert "YAML" not in str(caught.value)  # what it refuses is x


def test_a_task_without_other_services_waits_for_its_own_check_alone() -> None:
    services = parse_compose("services: {main: {healthcheck: {test: [CMD, 'true'], timeout: 2s}}}", source="c")
    assert (services.entrypoint, services.names) == ((), ())
    assert services.healthchecks == (Healthcheck(argv=("true",), timeout_s=2),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        ("[" * 65_000, "more than 100 brackets"),
        ("- " * 30_000, "nested more than 100 deep"),
        (LAUGHS, "more than 100000 values"),
        ("services: &all {main: *all}", "more than 100000 values"),
        ("services: {}", "services"),
        ("services: {api: {build: ., command: x}}", "no 'main'"),
        ("services: {main: {volumes: ['x:/x']}}", "services.main.volumes: it has the files of main"),
        ("services: {main: {image: x}}", "services.main.image: write it into task.toml"),
        ("services: {main: {privileged: true}}", "services.main.privileged = True: no command of a sandbox"),
        ("services: {main: {}, db: {image: x, restart: always}}", "services.db.restart = 'always': a service that"),
        ("services: {main: {}, 'a b': {image: x}}", "'a b' is not a valid service name"),
        ("services: {main: {}, db: {image: x, volumes: ['/etc:/etc']}}", "services.db.volumes has '/etc:/etc'"),
        ("services: {main: {}, db: {image: x, volumes: ['./../a:/etc']}}", "services.db.volumes has './../a:/etc'"),
        (
            "services: {main: {}, a: {image: x, volumes: ['v:/v']}, b: {image: x, volumes: ['v:/v']}}",
            "services.b.volumes has 'v', as a has",
        ),
        (
            "services: {main: {}, a: {build: ., command: x}, b: {image: x, depends_on: [a]}}",
            "services.b.depends_on = ['a']: those have the image of main",
        ),
        ("services: {main: {colour: red}}", "services.main.colour = 'red': it is not held to"),
        (
            "services: {main: {}, db: {build: ../db}}",
            "services.db.build.context = '../db': name a folder or file below",
        ),
        ("services: {main: {}, db: {command: x}}", "services.db needs an image, a build, or build: ."),
        ("services: {main: {command: ./serve}}", "services.main.command"),
        ("services: {main: {depends_on: [x]}}", "depends_on names ['x']"),
        ("services: {main: {depends_on: [a]}, a: {build: ., command: x, depends_on: [main]}}", "in a circle"),
        ("services: {main: {environment: [SECRET]}}", "services.main.environment.SECRET"),
        ("services: {main: {healthcheck: {test: x, interval: soon}}}", "'soon' is not a duration"),
    ],
)
def test_what_is_not_held_to_is_refused_by_its_name(text: str, words: str) -> None:
    with pytest.raises(TaskFolderError) as refused:
        parse_compose(text, source="docker-compose.yaml")
    assert words in str(refused.value)


def test_services_with_images_of_their_own_come_first_with_what_is_said_of_them() -> None:
    services = parse_compose(
        """
volumes: {data: }
services:
  main: {depends_on: [web, near]}
  near: {build: ., command: ./near}
  web: {build: {context: ./web, dockerfile: Web}, depends_on: [db], command: "serve 'a b'", hostname: www}
  db:
    image: ${DB:-redis:7}
    entrypoint: []
    command: [redis-server, "$$PORT"]
    user: 999
    working_dir: /data
    environment: [A=b=c]
    tmpfs: /run/x
    volumes: ["data:/data", "./conf:/etc/conf:ro", "/cache"]
    healthcheck: {test: redis-cli ping, interval: 1s}
""",
        source="/task/environment/docker-compose.yaml",
    )
    assert set(services.names) == {"db", "near", "web", "www"}
    database, web = services.orders
    assert database == ServiceOrder(
        name="db",
        source="docker://redis:7",
        entrypoint=(),
        command=("redis-server", "$PORT"),
        environment={"A": "b=c"},
        workdir="/data",
        user="999",
        healthchecks=(Healthcheck(argv=("sh", "-c", "redis-cli ping"), interval_s=1),),
        folders=("/run/x", "/data", "/cache"),
        files={"/etc/conf": Path("/task/environment/conf")},
        names=("main", *services.names),
    )
    assert (web.source, web.dockerfile, web.command) == ("/task/environment/web", "Web", ("serve", "a b"))
    assert "./near" in services.entrypoint[2]
    assert "redis" not in services.entrypoint[2]


def test_services_run_beside_the_agent_and_are_found_by_their_names(tmp_path: Path) -> None:
    own = "[environment.healthcheck]\ncommand = 'test -e notes/a.txt'\ninterval_sec = 1\n"
    changes = {"environment/docker-compose.yaml": SERVED, "task.toml": WHOLE["task.toml"] + own}
    source = read_task(write_folder(tmp_path / "task", changes))
    script = "import os, urllib.request; print(urllib.request.urlopen(os.environ['API']).read().decode())"

    async def act() -> str:
        sandboxes = NamespaceSandboxes()
        try:
            if Capability.CONFINED not in await sandboxes.capabilities():
                pytest.skip("no sandbox with namespaces can be made here")
            task = source.task(Split.TRAIN, image=Image(), files=plain_files(source))
            assert task.environment is not None
            assert task.environment.names == ("back", "front")
            assert [check.argv[-1] for check in task.environment.healthchecks[1:]] == [
                "notes/a.txt",
                "test -e notes/a.txt",
            ]
            sandbox = await sandboxes.create(task.files, sandbox_spec(task.environment))
            done = await sandbox.exec(["python3", "-c", script], timeout_s=30)
            assert done.exit_code == 0, done.stderr
            return done.stdout
        finally:
            await sandboxes.close()

    assert asyncio.run(act()).strip() == "42"
