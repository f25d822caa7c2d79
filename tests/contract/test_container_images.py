"""Container images: every way to add one, their settings in every provider, and task folders that use them."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from etude.errors import ConfigError, EtudeError, SandboxError
from etude.protocols import SandboxProvider
from etude.rewards.graders.script import ScriptGrader
from etude.sandbox_spec import Healthcheck, Image, ImageUser, SandboxSpec
from etude.sandboxes.images.containers import add_image
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.sandboxes.oci.provider import OciSandboxes
from etude.sandboxes.oci.runtimes import CRUN
from etude.sandboxes.qemu.provider import QemuSandboxes
from etude.sandboxes.services import ServicedSandboxes, sandbox_spec
from etude.taskgen.harbor.soundness import SoundnessCheck
from etude.tasks.harbor.folder import read_task
from etude.tasks.harbor.images import Builds, build_images
from etude.types import Split
from providers import no_virtual_machines
from registries import PASSWORD, USER, Registry, running_registry, what_is_missing, write_files, write_layout

pytestmark = pytest.mark.heavy("podman, skopeo, docker-registry, busybox-static, and root", missing=what_is_missing())

STAGES = {
    "Dockerfile": """FROM localhost/base AS tools
RUN mkdir -p /out && echo built >/out/tool
FROM localhost/base
RUN echo 'app:x:1234:77:the app:/srv/app:/bin/sh' >>/etc/passwd && echo 'us:x:77:' >>/etc/group \\
    && mkdir -p /srv/app /app /opt/gone /opt/again && chown 1234:77 /srv/app && touch /opt/again/old /opt/lost
COPY --from=tools /out/tool /opt/tool
COPY entry.sh /entry.sh
RUN rm -rf /opt/gone /opt/lost /opt/again && mkdir /opt/again && echo y >/opt/again/new && echo 1 >/app/given \\
    && echo secret >/opt/secret && chmod 600 /opt/secret && touch /opt/other && chown 5:6 /opt/other
WORKDIR /app
ENV COLOUR=green
USER app
ENTRYPOINT ["/entry.sh"]
HEALTHCHECK --interval=1s --timeout=9s --retries=60 CMD test -e /tmp/ready
""",
    "entry.sh": '#!/bin/sh\n(sleep 1; id -u >/tmp/ready) &\nexec "$@"\n',
}
"""Several stages, a user, files removed by a layer above, an entry point and a health check."""
LOOK = """id -u; id -g; id -un; pwd; echo $HOME $COLOUR; ls /opt /opt/again; cat /opt/tool /tmp/ready given
stat -c '%u:%g' /app /app/given /srv/app /opt/other /opt/again; cat /opt/secret 2>&1
touch mine /srv/app/mine && echo fine"""
SEEN = """1234
77
app
/app
/srv/app green
/opt:
again
other
secret
tool

/opt/again:
new
built
1234
1
1234:77
1234:77
1234:77
5:6
0:0
cat: can't open '/opt/secret': Permission denied
fine
"""

PROVIDERS: Mapping[str, Callable[[ImageStore], SandboxProvider]] = {
    "ns": lambda store: NamespaceSandboxes(store=store),
    "crun": lambda store: OciSandboxes(CRUN, store=store),
    "gvisor": lambda store: OciSandboxes(store=store),
    "qemu": lambda store: QemuSandboxes(),
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def staged(registry: Registry, store: ImageStore, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return add_image(store, str(write_files(tmp_path_factory.mktemp("staged"), STAGES)), name="staged")


def pinned(reference: str) -> str:
    """A reference by the digest that its tag has now."""
    inspected = subprocess.run(["skopeo", "inspect", f"docker://{reference}"], capture_output=True, check=True)
    return f"{reference.rpartition(':')[0]}@{json.loads(inspected.stdout)['Digest']}"


def output(provider: SandboxProvider, image: Image, script: str) -> str:
    """Output of a shell script in a fresh sandbox."""

    async def act() -> str:
        try:
            sandbox = await provider.create({}, SandboxSpec(image=image))
            done = await sandbox.exec(["sh", "-c", script], timeout_s=60)
            return done.stdout + done.stderr
        finally:
            await provider.close()

    return asyncio.run(act())


def test_a_dockerfile_is_built_with_all_its_config_says(staged: Image) -> None:
    assert (staged.workdir, staged.environment) == ("/app", {"COLOUR": "green"})
    assert staged.user == ImageUser(uid=1234, gid=77, home="/srv/app")
    assert staged.entrypoint == ("/entry.sh",)
    argv = ("/bin/sh", "-c", "test -e /tmp/ready")
    assert staged.healthchecks == (Healthcheck(argv=argv, interval_s=1, timeout_s=9, retries=60),)


@pytest.mark.parametrize("name", PROVIDERS)
def test_an_image_is_the_same_in_every_provider(name: str, staged: Image, store: ImageStore) -> None:
    if name == "qemu" and (missing := no_virtual_machines()):
        pytest.skip(missing)
    assert output(PROVIDERS[name](store), staged, LOOK) == SEEN


def test_a_virtual_machine_has_images_of_more_layers_than_places_for_disks(
    registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    if missing := no_virtual_machines():
        pytest.skip(missing)
    lines = [f"RUN echo {number} >/opt-{number}; rm -f /opt-{number - 2}" for number in range(14)]
    folder = write_files(tmp_path, {"Dockerfile": "\n".join(["FROM localhost/base", "WORKDIR /app", *lines, ""])})
    image = add_image(store, str(folder))
    assert len(image.layers) > 14
    assert output(PROVIDERS["qemu"](store), image, "ls -d /opt*") == "/opt-12\n/opt-13\n"


def test_every_way_to_an_image_leads_to_the_same_layers(
    registry: Registry, store: ImageStore, staged: Image, tmp_path: Path
) -> None:
    reference = registry.build(tmp_path / "staged", STAGES, "tests/staged:1")
    archive, layout, docker = tmp_path / "image.tar", tmp_path / "layout", tmp_path / "docker.tar"
    registry.podman("push", reference, f"oci-archive:{archive}")
    registry.podman("push", reference, f"oci:{layout}")
    registry.podman("save", "--format=docker-archive", "-o", str(docker), reference)
    before = {layer.name for layer in (store.folder / "layers").iterdir()}
    tagged = add_image(store, reference, name="tagged")
    by_digest = add_image(store, pinned(reference))
    others = [add_image(store, str(path)) for path in (archive, layout, docker)]
    assert tagged == by_digest == staged
    assert [image.layers for image in others] == [staged.layers] * 3
    assert {layer.name for layer in (store.folder / "layers").iterdir()} == before
    store.verify(staged)
    with pytest.raises(SandboxError, match="has the image sha256:"):
        add_image(store, f"{archive}@sha256:{'0' * 64}")


def test_a_private_registry_is_opened_by_the_kept_credentials_and_nothing_repeats_them(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    with running_registry(tmp_path / "registry", private=True) as private:
        login = ["login", "--username", USER, "--password-stdin", private.address]
        private.podman(*login, stdin=PASSWORD.encode())
        credentials = Path(os.environ["REGISTRY_AUTH_FILE"]).read_text(encoding="utf-8")
        reference = private.build(tmp_path / "image", {"Dockerfile": "FROM localhost/base\nWORKDIR /app\n"}, "a:1")
        image = add_image(store, reference)
        private.podman("logout", private.address)
        with pytest.raises(SandboxError) as refused:
            add_image(store, reference)
    assert image.workdir == "/app"
    (secret,) = (entry["auth"] for entry in json.loads(credentials)["auths"].values())
    texts = [str(refused.value), *(file.read_text() for file in (store.folder / "images").iterdir())]
    assert "auth" in texts[0]
    assert not any(word in text for text in texts for word in (PASSWORD, secret))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("USER nobody-here", "USER nobody-here"),
        ("USER 65534", "user 65534 is none of 1 to 65533"),
        ("RUN exit 7", "exit code 7|status 7"),
        ("RUN rm /bin/sh", "no /bin/sh"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_starts(
    lines: str, words: str, registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    folder = write_files(tmp_path, {"Dockerfile": f"FROM localhost/base\n{lines}\n"})
    with pytest.raises(EtudeError, match=words):
        add_image(store, str(folder))


def test_a_layer_of_an_enemy_reaches_nothing_outside_of_its_folder(store: ImageStore, tmp_path: Path) -> None:
    """A hand-made layout whose layer would write outside of its folder, by links, names and whiteouts, is refused."""
    outside = write_files(tmp_path / "outside", {"file": "text"})
    for members in ([("link", str(outside)), ("link/file", "")], [("../outside/file", "")], [("a/.wh...", "")]):
        layout = tmp_path / f"layout-{len(list(tmp_path.iterdir()))}"
        write_layout(layout, members)
        with pytest.raises(EtudeError):
            add_image(store, str(layout))
        assert {file.name: file.read_text() for file in outside.iterdir()} == {"file": "text"}


def test_a_folder_that_is_nothing_and_a_program_that_is_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageStore(tmp_path / "store")
    with pytest.raises(ConfigError, match="neither a Dockerfile nor a file oci-layout"):
        add_image(store, str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="apt-get install skopeo"):
        add_image(store, "debian:12")
    write_files(tmp_path, {"Dockerfile": "FROM scratch\n"})
    with pytest.raises(ConfigError, match="apt-get install podman"):
        add_image(store, str(tmp_path))


@pytest.mark.parametrize("name", ["ns", "crun"])
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('ENTRYPOINT ["sh", "-c", "echo too bad; exit 3"]', "ENTRYPOINT.*too bad"),
        ("HEALTHCHECK --interval=1s --retries=1 CMD echo not yet; false", "HEALTHCHECK.*not yet"),
    ],
)
def test_a_sandbox_that_does_not_come_up_is_an_error_with_its_log(
    name: str, lines: str, words: str, registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    folder = write_files(tmp_path, {"Dockerfile": f"FROM localhost/base\nWORKDIR /app\n{lines}\n"})
    with pytest.raises(SandboxError, match=words):
        output(PROVIDERS[name](store), add_image(store, str(folder)), "")


def test_a_task_may_name_another_user_than_its_image_does(
    registry: Registry, store: ImageStore, staged: Image, tmp_path: Path
) -> None:
    folder = write_files(tmp_path, STAGES)
    (named, numbered, unknown) = (add_image(store, str(folder), user=user) for user in ("root", "app:root", "agent"))
    assert (named.user, numbered.user.gid, unknown.user) == (ImageUser(), 0, ImageUser())
    assert staged.user == add_image(store, str(folder)).user


# --- Task folders -------------------------------------------------------------------------------------------------

INSTRUCTION = "Make it so.\n"
TERMINAL_BENCH: Mapping[str, str] = {
    "task.toml": 'schema_version = "1.1"\n[environment]\nmemory_mb = 1024\nstorage_mb = 1024\n'
    '[environment.env]\nLEVEL = "7"\n[metadata.etude]\nprocesses = 128\n',
    "instruction.md": INSTRUCTION,
    "environment/.dockerignore": "ignored\n",
    "environment/ignored": "",
    "environment/Dockerfile": STAGES["Dockerfile"].replace("COPY entry.sh", "COPY . /context\nCOPY entry.sh"),
    "environment/entry.sh": STAGES["entry.sh"],
    "tests/test.sh": "#!/bin/bash\nset -e\ncp answer /tmp/seen || true\n"
    '[ "$(cat answer)" = "green 7 1234 built" ] && [ ! -e /context/ignored ] && test -e /context/entry.sh \\\n'
    "    && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n",
    "solution/solve.sh": '#!/bin/bash\necho "$COLOUR $LEVEL $(id -u) $(cat /opt/tool)" >answer\n',
}
"""As terminal-bench's: several stages, a user, an entry point that is waited for."""
COMPOSED: Mapping[str, str] = {
    **TERMINAL_BENCH,
    "environment/docker-compose.yaml": """services:
  main:
    build: .
    depends_on: [web]
    environment: {WEB: "http://web:8080/word"}
  web:
    build: .
    command: echo $WORD >/tmp/word && exec httpd -f -p 8080 -h /tmp
    environment: {WORD: served}
    expose: [8080]
    healthcheck: {test: "wget -q -O- http://web:8080/word", interval: 1s, retries: 60}
""",
    "tests/test.sh": "#!/bin/bash\n"
    'if [ "$(cat answer)" = "$(wget -q -O- $WEB)" ] && [ -e /tmp/ready ]; then echo 1; else echo 0; fi '
    ">/logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\nwget -q -O answer $WEB\n",
}
"""The same with a service beside it, which the verifier asks, too."""
OWN_IMAGES: Mapping[str, str] = {
    **{name: text for name, text in TERMINAL_BENCH.items() if not name.startswith("environment/")},
    "task.toml": "",
    "environment/Dockerfile": "FROM localhost/base\nRUN mkdir /srv && echo main >/srv/word\nWORKDIR /app\n",
    "environment/word": "word of a file\n",
    "environment/one/Dockerfile": """FROM localhost/base
RUN mkdir /srv /data && echo one >/srv/word && echo 'one:x:77:78::/srv:/bin/sh' >>/etc/passwd && chown 77:78 /data
ENV PORT=8001
WORKDIR /srv
COPY start.sh /start.sh
USER one
ENTRYPOINT ["/start.sh"]
CMD ["from", "cmd"]
HEALTHCHECK --interval=1s --retries=60 CMD wget -q -O- http://127.0.0.1:$PORT/srv/word
""",
    "environment/one/start.sh": "#!/bin/sh\n"
    'echo "$@ $(id -u):$(id -g) $(pwd) $HOME" >/data/said && cp /data/said /tmp/said\n'
    "cat /etc/conf/word >/data/given; ls /proc/self/fd >/dev/null && exec httpd -f -p $PORT -h /\n",
    "environment/two/Dockerfile": 'FROM localhost/base\nRUN mkdir /srv && echo two >/srv/word\nCMD ["false"]\n',
    "environment/docker-compose.yaml": """services:
  main: {depends_on: [two]}
  one: {build: ./one, volumes: ["./word:/etc/conf/word", "kept:/data"]}
  two:
    build: {context: two}
    command: sh -c 'wget -q -O /tmp/of-one http://one:8001/srv/word; exec httpd -f -p 8002 -h /'
    depends_on: {one: {condition: service_healthy}}
    healthcheck: {test: [CMD, test, -e, /tmp/of-one], interval: 1s, retries: 60}
""",
    "tests/test.sh": "#!/bin/bash\n"
    'if [ "$(cat answer)" = "one two one main" ] && wget -q -O- http://two:8002/tmp/of-one | grep -q one; then echo 1\n'
    "else echo 0; fi >/logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\nget() { wget -q -O- http://$1; }\n"
    "echo $(get one:8001/srv/word) $(get two:8002/srv/word) $(get two:8002/tmp/of-one) $(cat /srv/word) >answer\n",
}
"""With services of other images, which have other files at the same places."""
BUG = """from calc import add


def test_add():
    assert add(2, 3) == 5
"""
SWE_BENCH_IMAGE: Mapping[str, str] = {
    "Dockerfile": """FROM docker.io/library/debian:12 AS source
COPY calc.py test_calc.py /testbed/
RUN cd /testbed && git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm base
FROM docker.io/library/debian:12
RUN useradd --create-home nonroot
COPY --from=source --chown=nonroot /testbed /testbed
USER nonroot
WORKDIR /testbed
""",
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": BUG,
}
PATCH = """--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
SWE_BENCH: Mapping[str, str] = {
    "task.toml": '[environment]\ndocker_image = "{image}"\nworkdir = "/testbed"\nmemory_mb = 1024\n'
    "[verifier]\ntimeout_sec = 60.0\n[metadata.etude]\nprocesses = 128\n",
    "instruction.md": INSTRUCTION,
    "tests/test.sh": "#!/bin/bash\ngit diff --stat\npython3 -c 'import test_calc; test_calc.test_add()'\n"
    'if [ $? = 0 ]; then echo 1; else echo 0; fi >"/logs/verifier/reward.txt"\n',
    "solution/solve.sh": '#!/bin/bash\nset -e\ngit status --short\ngit apply "$(dirname "$0")/gold.patch"\n',
    "solution/gold.patch": PATCH,
}
"""As SWE-bench's: an image of a registry, by digest, a repository that is not root's, and a patch."""


def assert_sound(name: str, folder: Path, store: ImageStore) -> None:
    """The empty answer fails and the solution passes, twice each."""
    source = read_task(folder)

    async def act() -> None:
        sandboxes = ServicedSandboxes(PROVIDERS[name](store))
        try:
            builds: Builds = await build_images([source], store)
            assert not builds.refused
            grader = ScriptGrader(sandboxes, store)
            (report,) = await SoundnessCheck(sandboxes, grader, repeats=2).check_all([source], builds)
            assert (report.untouched, report.solved) == ((0.0, 0.0), (1.0, 1.0)), report.log
        finally:
            await sandboxes.close()

    asyncio.run(act())


@pytest.mark.parametrize("name", ["ns", "crun", "qemu"])
def test_a_task_with_services_by_compose_is_sound(
    name: str, registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    if name == "qemu" and (missing := no_virtual_machines()):
        pytest.skip(missing)
    assert_sound(name, write_files(tmp_path / "task", COMPOSED), store)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_task_with_services_of_other_images_is_sound(
    name: str, registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    if name == "qemu" and (missing := no_virtual_machines()):
        pytest.skip(missing)
    assert_sound(name, write_files(tmp_path / "task", OWN_IMAGES), store)


SPY = """get() { wget -q -O- http://$1 2>&1; }
get one:8001/data/said; get one:8001/data/given; ls /.services 2>&1
echo $(get two:8002/srv/word) $(cat /srv/word); rm -f /tmp/of-one; get two:8002/tmp/of-one"""
SPIED = """from cmd 77:78 /srv /srv
word of a file
ls: can't open '/.services': Permission denied
two main
one
"""


@pytest.mark.parametrize("name", PROVIDERS)
def test_services_keep_what_their_images_say_and_a_fork_has_them(
    name: str, registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    if name == "qemu" and (missing := no_virtual_machines()):
        pytest.skip(missing)
    source = read_task(write_files(tmp_path / "task", OWN_IMAGES))

    async def act() -> list[str]:
        provider = PROVIDERS[name](store)
        try:
            builds = await build_images([source], store)
            task = source.task(Split.TRAIN, image=builds.images[source.name])
            assert task.environment is not None
            spec = sandbox_spec(task.environment, builds.images[source.name])
            sandbox = await provider.create({}, spec)
            (fork,) = await sandbox.fork()
            done = [await each.exec(["sh", "-c", SPY], timeout_s=60) for each in (sandbox, fork)]
            return [each.stdout + each.stderr for each in done]
        finally:
            await provider.close()

    assert asyncio.run(act()) == [SPIED, SPIED]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("command: sh -c 'echo too bad; exit 3'", "service two ended: too bad"),
        ("command: sh -c 'echo its log; sleep 99'", "service two: HEALTHCHECK.*1 times: (?s:.*)its log"),
    ],
)
def test_a_service_that_does_not_come_up_is_an_error_with_its_log(
    lines: str, words: str, registry: Registry, store: ImageStore, tmp_path: Path
) -> None:
    compose = f"services:\n  main: {{}}\n  two:\n    build: two\n    {lines}\n    healthcheck: "
    compose += "{test: 'false', interval: 1s, retries: 1}\n"
    files = {**OWN_IMAGES, "environment/docker-compose.yaml": compose}
    (image,) = asyncio.run(build_images([read_task(write_files(tmp_path / "task", files))], store)).images.values()
    with pytest.raises(SandboxError, match=words):
        output(PROVIDERS["ns"](store), image, "")


@pytest.mark.parametrize("name", ["ns", "crun"])
def test_a_task_like_terminal_benchs_is_sound(name: str, registry: Registry, store: ImageStore, tmp_path: Path) -> None:
    assert_sound(name, write_files(tmp_path / "task", TERMINAL_BENCH), store)


@pytest.fixture(scope="module")
def swe_bench(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference of an image, by digest, over the Debian base system that was built here."""
    debian = ImageStore().bases.get("debian")
    if debian is None:
        pytest.skip("no base system: etude images build debian")
    archive = tmp_path_factory.mktemp("debian") / "debian.tar"
    subprocess.run(["tar", "-cf", str(archive), "-C", str(debian), "."], check=True)
    registry.podman("import", str(archive), "docker.io/library/debian:12")
    reference = registry.build(tmp_path_factory.mktemp("swe"), SWE_BENCH_IMAGE, "swe/calc:1")
    return pinned(reference)


@pytest.mark.parametrize("name", ["ns", "crun"])
def test_a_task_like_swe_benchs_is_sound(name: str, swe_bench: str, store: ImageStore, tmp_path: Path) -> None:
    files = {**SWE_BENCH, "task.toml": SWE_BENCH["task.toml"].format(image=swe_bench)}
    assert_sound(name, write_files(tmp_path / "task", files), store)
