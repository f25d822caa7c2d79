"""Images of containers: built by podman, fetched by skopeo, unpacked once into layers of the store.

    Dockerfile ────────────────podman build, push──▶┐
    registry, archive, layout folder ──skopeo copy──┴▶ manifest, config, blobs ──tar──▶ layers ──▶ Image

Both programs read the user's own settings: registries.conf, storage.conf, and the credentials that `podman login`
stores in ``REGISTRY_AUTH_FILE``; étude never reads, prints or stores these. A blob is unpacked once, even if several
images share it. Owners are preserved, which needs root; extended attributes and devices are dropped. If an image's user
is root, it nevertheless runs as the user ``agent``, which is added to its ``/etc/passwd``; the working folder and the
home belong to the user. ``CMD`` is not run: the harness decides which commands run.

A service has its own image, and its root is a folder of the sandbox (``Image.services``): its blobs are unpacked below
that folder, into ordinary layers, so that each provider shows, limits, copies and forks them like all files. For
services, ``CMD`` is run and root stays root.
"""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from etude.errors import ConfigError, SandboxError
from etude.sandbox_spec import SCRATCH, Healthcheck, Image, ImageService, ImageUser, is_place
from etude.sandboxes.images.layers import digest_tree, first_link, give_away, paths_below, places_in, remove_tree
from etude.sandboxes.images.machine_base import SEARCH_FOLDERS
from etude.sandboxes.images.store import ImageStore, settle
from etude.sandboxes.ns.root import HOSTNAME, hosts_text

TRANSPORTS = ("docker:", "docker-archive:", "oci:", "oci-archive:", "containers-storage:")
"""Prefixes of references that are passed to skopeo unchanged."""
FETCH_TIMEOUT_S = 3600.0
"""Timeout of podman or skopeo."""
UNPACK_TIMEOUT_S = 1800.0
"""Timeout for one blob."""
LOG_CHARACTERS = 2000
"""Maximum length of a failed program's log in the error."""
USERS = range(1, 65534)
"""Valid user numbers: a sandbox has 65,536, the last two of which are reserved."""
WHITEOUT, OPAQUE, IGNORED = ".wh.", ".wh..wh..opq", ".wh..wh."
"""Names in a blob that mark removed files of lower layers. Source: https://github.com/opencontainers/image-spec."""
SYSTEM = ("usr", "bin", "sbin", "lib", "etc", "dev", "proc", "sys", "root")
"""Folders that are homes of Debian's system users; they never become a user's home."""
SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOrder:
    """A service to add to an image, and the settings that override its own image's."""

    name: str
    source: str
    """The image, in the form of :func:`add_image`."""
    dockerfile: str = "Dockerfile"
    """Name of the Dockerfile in a folder to build."""
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Overrides the image's variables."""
    workdir: str = ""
    user: str = ""
    healthchecks: tuple[Healthcheck, ...] = ()
    folders: tuple[str, ...] = ()
    """Folders to create in its root if missing."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Path in its root → file or folder to copy there."""
    names: tuple[str, ...] = ()
    """Names that resolve to the sandbox's loopback."""


@dataclass(frozen=True, slots=True)
class _Fetched:
    """An image in a folder, in the format of skopeo's transport ``dir``."""

    folder: Path

    @property
    def digest(self) -> str:
        """The digest of its manifest, which identifies it in registries."""
        return "sha256:" + hashlib.sha256((self.folder / "manifest.json").read_bytes()).hexdigest()

    @property
    def blobs(self) -> Sequence[Path]:
        """Its layers, lowest first; a duplicate only at its last position."""
        with _readable(self.folder):
            manifest = json.loads((self.folder / "manifest.json").read_bytes())
            return [*dict.fromkeys(self._blob(layer) for layer in reversed(manifest["layers"]))][::-1]

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of its containers."""
        with _readable(self.folder):
            manifest = json.loads((self.folder / "manifest.json").read_bytes())
            config = json.loads(self._blob(manifest["config"]).read_bytes()).get("config") or {}
            if not isinstance(config, dict):
                raise TypeError(f"the settings of its containers are {config!r:.80}, expected a JSON object")
            return config

    def _blob(self, descriptor: Mapping[str, Any]) -> Path:
        name = str(descriptor["digest"]).partition(":")[2]
        if not name.isalnum():
            raise ValueError(f"{name!r} is not a digest")
        return self.folder / name


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise :class:`~etude.errors.SandboxError` for errors caused by an invalid manifest or config."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SandboxError(f"the image in {folder} cannot be read: {error!r}; fetch it again") from error


def add_image(
    store: ImageStore,
    source: str,
    *,
    name: str = "",
    workdir: str = "",
    user: str = "",
    timeout_s: float = FETCH_TIMEOUT_S,
) -> Image:
    """Fetch or build an image into the store, named by the digest of its manifest and by ``name``.

    ``source`` is a folder with a Dockerfile, a registry reference (``debian:12``, ``host:5000/a/b@sha256:…``), an
    archive file or an OCI layout folder, either with an optional ``@sha256:…`` to verify the image, or anything that
    skopeo accepts. ``workdir`` and ``user`` override the image's own.

    Raises :class:`~etude.errors.ConfigError` if a program is missing or no sandbox can run this kind of image,
    :class:`~etude.errors.SandboxError` with a program's log if it fails, ``TimeoutError`` after ``timeout_s``.
    """
    if os.geteuid() != 0:
        raise ConfigError(f"{source}: an image of a container keeps the owners of its files, which takes root")
    with _fetch(store, source, timeout_s) as fetched:
        image = _store_image(store, fetched, fetched.folder.parent, workdir, user)
        layers = [layer.name for layer in image.layers]
        store.put(image, layers, fetched.digest)
        return store.put(image, layers, name)


def add_services(
    store: ImageStore, image: Image, orders: Sequence[ServiceOrder], *, name: str = "", timeout_s: float
) -> Image:
    """Store ``image`` with services, which start in the given order; ``timeout_s`` applies to each.

    Same errors as :func:`add_image`.
    """
    services, layers = [], [layer.name for layer in image.layers]
    for order in orders:
        with _fetch(store, order.source, timeout_s, order.dockerfile) as fetched:
            service, digests = _store_service(store, fetched, order)
        services.append(service)
        layers += digests
    return store.put(replace(image, services=tuple(services)), layers, name)


@contextmanager
def _fetch(store: ImageStore, source: str, timeout_s: float, dockerfile: str = "Dockerfile") -> Iterator[_Fetched]:
    """Build or fetch an image into a folder that exists for the block, with space for temporary files."""
    with store.incoming() as folder:
        fetched = _Fetched(folder / "fetched")
        recipe = Path(source) / dockerfile
        if recipe.is_file():
            identity = folder / "identity"
            build = ["podman", "build", "--format=docker", f"--iidfile={identity}", f"--file={recipe}", source]
            _run(build, timeout_s, source)
            built = identity.read_text(encoding="ascii").strip()
            _run(["podman", "push", "--quiet", built, f"dir:{fetched.folder}"], timeout_s, source)
        else:
            reference, expected = reference_of(source)
            _run(["skopeo", "copy", "--quiet", reference, f"dir:{fetched.folder}"], timeout_s, source)
            if expected not in ("", fetched.digest):
                raise SandboxError(f"{source} has the image {fetched.digest}: name that digest, or get the right file")
        yield fetched


def reference_of(reference: str) -> tuple[str, str]:
    """A reference in skopeo's format, and the digest that a referenced file or folder must have.

    Raises :class:`~etude.errors.ConfigError` for a file that is not an archive or a folder that is not a layout.
    """
    if reference.startswith(TRANSPORTS):
        return reference, ""
    path, _, digest = reference.partition("@")
    if Path(path).is_dir():
        if not (Path(path) / "oci-layout").is_file():
            raise ConfigError(
                f"{path} has neither a Dockerfile nor a file oci-layout: name a folder that has one of them"
            )
        return f"oci:{path}", digest
    if Path(path).is_file():
        try:
            with tarfile.open(path) as archive:
                names = {name.removeprefix("./") for name in archive.getnames()}
        except tarfile.TarError:
            names = set()
        kinds = [kind for kind, mark in (("oci", "oci-layout"), ("docker", "manifest.json")) if mark in names]
        if not kinds:
            raise ConfigError(f"{path} is not an image: an archive has a file oci-layout or manifest.json")
        return f"{kinds[0]}-archive:{path}", digest
    return f"docker://{reference}", ""


def _run(argv: Sequence[str], timeout_s: float, what: str) -> None:
    """Run podman, skopeo or tar. ``TimeoutError`` after ``timeout_s``; all started processes are then killed.

    Raises :class:`~etude.errors.ConfigError` if it is missing, :class:`~etude.errors.SandboxError` with its log.
    """
    if shutil.which(argv[0]) is None:
        raise ConfigError(f"{what} needs {argv[0]!r}: on Debian or Ubuntu, apt-get install {argv[0]}")
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"{what}: not done after {timeout_s:g} s") from error
            raise
    if process.returncode != 0:
        text = log.decode(errors="replace").strip()[-LOG_CHARACTERS:]
        raise SandboxError(f"{what}: {' '.join(argv[:2])} failed with exit code {process.returncode}\n{text}")


def _store_image(store: ImageStore, fetched: _Fetched, folder: Path, workdir: str, user: str) -> Image:
    """Unpack and store missing layers, and the image; ``folder`` is for temporary files."""
    config = fetched.config
    blobs = fetched.blobs
    trees = [_known_tree(store, blob) or _unpack(blob, folder / f"tree-{blob.name}") for blob in blobs]
    _check_shell(trees, f"the image {fetched.digest}", "harnesses and graders run")
    owner = _user(user or config.get("User") or "", trees)
    workdir = workdir or config.get("WorkingDir") or "/"
    if not is_place(workdir):
        raise ConfigError(f"WORKDIR {workdir} of the image {fetched.digest} is not an absolute path without '..'")
    image = Image(
        base=SCRATCH,
        environment=_environment(config.get("Env") or ()),
        workdir=workdir,
        user=owner,
        entrypoint=tuple(config.get("Entrypoint") or ()),
        healthchecks=_healthchecks(config.get("Healthcheck") or {}),
    )
    accounts = _accounts(trees, owner, folder / "accounts")
    digests = [_store_layer(store, blob, tree, image, folder) for blob, tree in zip(blobs, trees, strict=True)]
    if accounts is not None:
        digests.append(_settle_layer(store, accounts))
    return replace(image, layers=tuple(map(store.layer, [*dict.fromkeys(reversed(digests))][::-1])))


def _known_tree(store: ImageStore, blob: Path) -> Path | None:
    """The layer of a blob that was unpacked earlier for another image, if any."""
    for note in (store.folder / "blobs").glob(f"{blob.name}*"):
        if (layer := store.layer(note.read_text(encoding="ascii"))).is_dir():
            return layer
    return None


def _store_layer(store: ImageStore, blob: Path, tree: Path, image: Image, folder: Path) -> str:
    """The digest of a blob's layer, in which the user's folders belong to the user."""
    inside = places_in(tree, (image.workdir, image.user.home))
    variant = hashlib.sha256(repr((image.user, inside)).encode()).hexdigest()[:16] if inside else ""
    note = store.folder / "blobs" / f"{blob.name}{variant}"
    if note.is_file() and store.layer(digest := note.read_text(encoding="ascii")).is_dir():
        return digest
    if not tree.is_relative_to(folder):  # it was unpacked for another user or place
        tree = _unpack(blob, folder / f"tree-{blob.name}")
    give_away(tree, inside, image.user)
    digest = _settle_layer(store, tree)
    (folder / "note").write_text(digest, encoding="ascii")
    (folder / "note").replace(note)
    return digest


def _store_service(store: ImageStore, fetched: _Fetched, order: ServiceOrder) -> tuple[ImageService, list[str]]:
    """A service, and the digests of its layers, lowest first."""
    config, folder = fetched.config, fetched.folder.parent
    place = ImageService(name=order.name, argv=(), environment={}).root.lstrip("/")
    digests = [_store_below(store, blob, place, folder) for blob in fetched.blobs]
    trees = [store.layer(digest) / place for digest in digests]
    what = f"service {order.name}, the image {fetched.digest},"
    _check_shell(trees, what, "starts it")
    uid, gid, home = _account(order.user or config.get("User") or "root", trees)
    command = tuple(config.get("Cmd") or ()) if order.entrypoint is None else ()
    entrypoint = tuple(config.get("Entrypoint") or ()) if order.entrypoint is None else order.entrypoint
    argv = (*entrypoint, *(command if order.command is None else order.command))
    if not argv:
        raise ConfigError(f"{what} has neither ENTRYPOINT nor CMD: write command, or entrypoint")
    service = ImageService(
        name=order.name,
        argv=argv,
        environment={
            "PATH": ":".join(SEARCH_FOLDERS),
            "HOME": home,
            **_environment(config.get("Env") or ()),
            **order.environment,
        },
        workdir=order.workdir or config.get("WorkingDir") or "/",
        uid=uid,
        gid=gid,
        healthchecks=order.healthchecks or _healthchecks(config.get("Healthcheck") or {}),
    )
    top = folder / f"own-{order.name}"
    _make_folders_above(top / place)
    (top / place).mkdir(mode=0o755)
    own = _OwnFiles(top / place, trees, what)
    for path in ("/proc", "/dev", "/tmp", service.workdir, *order.folders):
        own.add_folder(path)
    own.add_text("/etc/hosts", hosts_text((), HOSTNAME, order.names))
    for path, source in order.files.items():
        own.add_copy(path, source)
    return service, [*digests, _settle_layer(store, top)]


def _store_below(store: ImageStore, blob: Path, place: str, folder: Path) -> str:
    """The digest of the layer that holds a blob below a path."""
    note = store.folder / "blobs" / f"service-{PurePosixPath(place).name}-{blob.name}"
    if note.is_file() and store.layer(digest := note.read_text(encoding="ascii")).is_dir():
        return digest
    tree = folder / f"tree-{blob.name}"
    _make_folders_above(tree / place)
    _unpack(blob, tree / place)
    digest = _settle_layer(store, tree)
    (folder / "note").write_text(digest, encoding="ascii")
    (folder / "note").replace(note)
    return digest


def _make_folders_above(root: Path) -> None:
    """Make the two parent folders of a service's root; only root may enter the lower one."""
    root.parent.parent.mkdir(mode=0o755)
    root.parent.mkdir(mode=0o700)


class _OwnFiles:
    """The layer with étude's own files for a service's root, above its image's trees; links are never followed."""

    def __init__(self, root: Path, trees: Sequence[Path], what: str) -> None:
        self._root = root
        self._trees = trees
        self._what = what

    def add_folder(self, path: str) -> None:
        """Make a missing folder; ``/tmp`` is writable for everyone."""
        place = path.strip("/")
        if place and self._below(place) is None:
            folder = self._parent(place) / PurePosixPath(place).name
            folder.mkdir(exist_ok=True)
            folder.chmod(0o1777 if path == "/tmp" else 0o755)

    def add_text(self, path: str, text: str) -> None:
        """Write a file, replacing an existing one."""
        file = self._parent(path.strip("/")) / PurePosixPath(path).name
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)

    def add_copy(self, path: str, source: Path) -> None:
        """Copy a file or folder, replacing an existing one. Raises ``ConfigError`` if ``source`` does not exist."""
        if not source.exists():
            raise ConfigError(f"{self._what} is to see {source} at {path}: there is no such file or folder")
        target = self._parent(path.strip("/")) / PurePosixPath(path).name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            os.setxattr(target, "user.overlay.opaque", b"y")
        else:
            shutil.copy(source, target)

    def _parent(self, place: str) -> Path:
        """The parent folder of a path, created with its own parents as in the image."""
        self._below(place)
        for part in [*reversed(PurePosixPath(place).parents)][1:]:
            below, folder = self._below(str(part)), self._root / part
            if not folder.exists():
                folder.mkdir(mode=0o755)
                if below is not None:
                    shutil.copystat(below, folder)
                    os.chown(folder, below.stat().st_uid, below.stat().st_gid)
        return (self._root / place).parent

    def _below(self, place: str) -> Path | None:
        """The image's file or folder at a path. Raises :class:`~etude.errors.ConfigError` if the path
        contains links or ``..``.
        """
        if not is_place(f"/{place}"):
            raise ConfigError(f"{self._what} has {place!r} as the path of a folder or file: write it without '..'")
        if any(link := first_link(tree, place) for tree in (*self._trees, self._root)):
            raise ConfigError(f"{self._what} has a link at {link}, where {place} is expected: name the place itself")
        return _topmost(self._trees, place)


def _check_shell(trees: Sequence[Path], what: str, why: str) -> None:
    if not any(_topmost(trees, path) for path in ("bin/sh", "usr/bin/sh")):
        raise ConfigError(f"{what} has no /bin/sh, which {why}: add a shell")


def _settle_layer(store: ImageStore, tree: Path) -> str:
    try:
        digest = digest_tree(tree, owned=None)
    except ValueError as error:
        raise SandboxError(f"an image cannot be stored: {error}") from error
    settle(tree, store.layer(digest))
    return digest


def _unpack(blob: Path, tree: Path) -> Path:
    """Unpack a blob into a new folder, in overlayfs's layer format."""
    tree.mkdir(mode=0o755)
    argv = ["tar", "--extract", "--preserve-permissions", "--numeric-owner", f"--file={blob}", f"--directory={tree}"]
    _run(argv, UNPACK_TIMEOUT_S, f"the blob {blob.name}")
    for path in list(paths_below(tree)):
        if not os.path.lexists(path):
            continue  # its parent was removed
        kind = stat.S_IFMT(path.lstat().st_mode)
        if path.name == OPAQUE:
            os.setxattr(path.parent, "user.overlay.opaque", b"y")
        elif path.name.startswith(WHITEOUT) and not path.name.startswith(IGNORED):
            _hide(path.parent, path.name.removeprefix(WHITEOUT))
        elif kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) and not path.name.startswith(IGNORED):
            continue
        remove_tree(path) if kind == stat.S_IFDIR else path.unlink(missing_ok=True)
    return tree


def _hide(folder: Path, name: str) -> None:
    """Hide an entry of lower layers; an entry of this layer stays."""
    if name in ("", ".", ".."):
        raise SandboxError(f"a layer removes {name!r} in {folder.name}: it is damaged, or an attack")
    path = folder / name
    if not os.path.lexists(path):
        os.mknod(path, stat.S_IFCHR | 0o600, 0)
    elif path.is_dir() and not path.is_symlink():
        os.setxattr(path, "user.overlay.opaque", b"y")


def _topmost(trees: Sequence[Path], path: str) -> Path | None:
    """The file, folder or link that stacked layers show at a path, if the path contains no links."""
    for tree in reversed(trees):
        place = tree / path
        if first_link(tree, path) not in (None, f"/{path}"):
            return None
        if os.path.lexists(place):
            return None if stat.S_ISCHR(place.lstat().st_mode) else place
        for part in [*PurePosixPath(path).parents][:-1]:
            folder = tree / part
            if os.path.lexists(folder) and (not folder.is_dir() or "user.overlay.opaque" in os.listxattr(folder)):
                return None
    return None


def _rows(trees: Sequence[Path], path: str) -> list[list[str]]:
    """The rows of ``/etc/passwd`` or ``/etc/group``; empty if there is no such file."""
    file = _topmost(trees, path)
    if file is None or file.is_symlink() or not file.is_file():
        return []
    return [line.split(":") for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if ":" in line]


def _user(text: str, trees: Sequence[Path]) -> ImageUser:
    """The user that a config names. Raises :class:`~etude.errors.ConfigError` for a user that no sandbox can have."""
    name = text.partition(":")[0]
    if name in ("", "root", "0") or (name == "agent" and not _passwd_rows(name, trees)):
        return ImageUser()
    uid, gid, home = _account(text, trees)
    place = home.strip("/")
    is_own = bool(place) and is_place(f"/{place}") and place.split("/")[0] not in SYSTEM
    is_own = is_own and _topmost(trees, place) is not None
    return ImageUser(uid=uid, gid=gid, home=f"/{place}" if is_own else ImageUser().home)


def _passwd_rows(name: str, trees: Sequence[Path]) -> list[list[str]]:
    return [row for row in _rows(trees, "etc/passwd") if len(row) > 5 and name in (row[0], row[2])]


def _account(text: str, trees: Sequence[Path]) -> tuple[int, int, str]:
    """User, group and home of the user that a config names, root included; same errors as :func:`_user`."""
    name, _, group = text.partition(":")
    if name in ("root", "0"):
        return 0, 0, "/root"
    rows = _passwd_rows(name, trees)
    groups = [row[2] for row in _rows(trees, "etc/group") if len(row) > 2 and group in (row[0], row[2])]
    uid = rows[0][2] if rows else name
    own_gid = rows[0][3] if rows else "0"
    named_gid = groups[0] if groups else group
    gid = named_gid if group else own_gid
    if not uid.isdecimal() or not gid.isdecimal():
        raise ConfigError(f"USER {text}: /etc/passwd or /etc/group of the image has no such row: add it, or drop USER")
    if int(uid) not in USERS:
        raise ConfigError(f"USER {text}: user {uid} is none of 1 to {USERS[-1]}, which sandboxes have: use another one")
    return int(uid), int(gid), rows[0][5] if rows else "/"


def _accounts(trees: Sequence[Path], user: ImageUser, tree: Path) -> Path | None:
    """Create a layer in ``tree`` that adds the user and the host name; ``None`` if the image has them."""
    texts: dict[str, str] = {}
    for path, number, rest in (
        ("etc/passwd", user.uid, f":{user.gid}::{user.home}:/bin/sh"),
        ("etc/group", user.gid, ":"),
    ):
        rows = _rows(trees, path)
        if not any(row[2:3] == [str(number)] for row in rows):
            texts[path] = "\n".join([*map(":".join, rows), f"agent:x:{number}{rest}", ""])
    hosts = _topmost(trees, "etc/hosts")
    if hosts is None or (not hosts.is_symlink() and hosts.stat().st_size == 0):
        texts["etc/hosts"] = hosts_text((), HOSTNAME)
    for path, text in texts.items():
        (tree / "etc").mkdir(mode=0o755, parents=True, exist_ok=True)
        (tree / path).write_text(text, encoding="utf-8")
        (tree / path).chmod(0o644)
    return tree if texts else None


def _environment(lines: Sequence[str]) -> dict[str, str]:
    """Variables of a config, except a ``PATH`` of the usual folders: the sandbox sets a better one."""
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    if {*variables.get("PATH", "").split(":")} <= {*SEARCH_FOLDERS}:
        variables.pop("PATH", None)
    return variables


def _healthchecks(stored: Mapping[str, Any]) -> tuple[Healthcheck, ...]:
    kind, *words = stored.get("Test") or ["NONE"]
    if kind == "NONE":
        return ()
    argv = ("/bin/sh", "-c", *words) if kind == "CMD-SHELL" else tuple(words)
    keys = {"interval_s": "Interval", "timeout_s": "Timeout", "start_period_s": "StartPeriod"}
    times = {name: stored[key] / SECOND_NS for name, key in keys.items() if stored.get(key)}
    return (Healthcheck(argv=argv, retries=stored.get("Retries") or Healthcheck(argv=()).retries, **times),)
