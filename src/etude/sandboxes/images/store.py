"""The store of images on this machine: layers by their digest, images of layers, base systems, and disks of layers.

    folder/
      layers/DIGEST/        a directory tree, see etude.sandboxes.images.layers
      images/DIGEST.json    base, layers, environment, working folder, and the rest of a container's config
      names/NAME            the digest of an image
      bases/NAME/           the root directory of a base system, and what belongs to it (etude.sandboxes.images.debian)
      blobs/DIGEST…         the layer that a blob of a registry was unpacked to (etude.sandboxes.images.containers)
      disks/DIGEST.squashfs a layer as a read-only disk, see etude.sandboxes.images.disks
      incoming/             incomplete files; each is renamed into place when it is complete

Files in a layer keep their owner and mode, so a set-uid file of root would give root's rights to any user who runs it:
only the store's owner can enter the parent folders.

Everything under a digest is written once and never changed, and an interrupted writer leaves only a folder in
``incoming``, which the next writer removes. An open store holds a shared lock of the folder, from before a writer's
first layer until sandboxes need none: only who has the store alone (:meth:`ImageStore.alone`) removes something. Owns
the folder; not its use by sandboxes.
"""

import fcntl
import hashlib
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import orjson

from etude.errors import ConfigError, DamagedError, SandboxError
from etude.sandbox_spec import SCRATCH, WORKDIR, Healthcheck, Image, ImageService, ImageUser
from etude.sandboxes.images.layers import copy_tree, digest_tree, remove_tree, size_of

DIGEST = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}")
"""Names of images and base systems."""
FOLDERS = ("images", "names", "blobs")
OF_CONTAINERS = ("user", "entrypoint", "healthchecks", "services")
"""Settings of an image that are stored only if they differ from the default."""
PRIVATE_FOLDERS = ("layers", "bases", "disks", "incoming")
"""Folders with images' files, which other users must not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """One line of a list of images."""

    image: Image
    names: tuple[str, ...]
    size_bytes: int
    """Bytes of the regular files in its layers, including layers shared with other images."""


class ImageStore:
    """Layers and images in one folder; any number of processes may use it concurrently. Nothing is removed from it by
    others while this object exists.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` is created if missing; the default is :func:`default_folder`.

        Raises :class:`~etude.errors.ConfigError` if it cannot be closed to other users.
        """
        self.folder = (folder or default_folder()).absolute()
        for name in FOLDERS:
            (self.folder / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        for name in PRIVATE_FOLDERS:
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
            _close_to_others(self.folder / name)
        (self.folder / "bases" / SCRATCH / "root").mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._lock)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # whoever has it alone moves a few folders, then lets go

    @property
    def bases(self) -> Mapping[str, Path]:
        """The root directories of the stored base systems, by name, and an empty one for ``SCRATCH``."""
        names = (folder.name for folder in sorted((self.folder / "bases").iterdir()))
        return MappingProxyType({name: root for name in names if (root := _root_of(self.folder, name)).is_dir()})

    @property
    def images(self) -> Sequence[StoredImage]:
        """Every image, named ones first."""
        names: dict[str, list[str]] = {}
        for file in sorted((self.folder / "names").iterdir()):
            names.setdefault(file.read_text(encoding="utf-8"), []).append(file.name)
        digests = [*names, *sorted({file.stem for file in (self.folder / "images").glob("*.json")} - set(names))]
        images = [(self.open(digest), tuple(names.get(digest, ()))) for digest in digests]
        return [
            StoredImage(image=image, names=named, size_bytes=sum(map(size_of, image.layers))) for image, named in images
        ]

    def add_layer(self, tree: Path) -> str:
        """Copy the content of ``tree`` into the store and return its digest; an existing layer is left unchanged.

        Files below the paths ``OWNED`` and files of this machine's user 1000 belong to the agent, the rest to root.
        Raises ``ValueError`` for content that no layer can hold and :class:`~etude.errors.SandboxError` if the tree is
        unreadable or the store is full.
        """
        try:
            with self.incoming() as folder:
                digest = copy_tree(tree, folder / "layer")
                settle(folder / "layer", self.layer(digest))
        except OSError as error:
            raise SandboxError(f"{tree} cannot be stored as a layer in {self.folder}: {error}") from error
        return digest

    def layer(self, digest: str) -> Path:
        """The path of a layer, whether it exists or not."""
        return self.folder / "layers" / digest

    def _stored_layer(self, digest: str) -> Path:
        """The path of a layer that an image names. The image may come from another person, with tasks, so it must not
        lead to another folder of this machine. Raises :class:`~etude.errors.DamagedError`.
        """
        layer = self.layer(str(digest))
        if not DIGEST.fullmatch(layer.name) or layer.name != digest or layer.is_symlink():
            raise DamagedError(f"an image in {self.folder} has a layer {digest!r}, which is none: build it again")
        return layer

    def add(
        self,
        layers: Sequence[str],
        *,
        base: str = "",
        environment: Mapping[str, str] | None = None,
        workdir: str = WORKDIR,
        name: str = "",
    ) -> Image:
        """Store an image of layers, lowest first; see :meth:`put`."""
        return self.put(Image(base=base, environment=dict(environment or {}), workdir=workdir), layers, name)

    def put(self, config: Image, layers: Sequence[str], name: str = "") -> Image:
        """Store an image with the settings of ``config`` and these layers, lowest first, and give it a name, which is
        taken from any other image.

        Raises :class:`~etude.errors.ConfigError` for a layer or base system that is not stored, and for an invalid
        name.
        """
        missing = [digest for digest in layers if not DIGEST.fullmatch(digest) or not self.layer(digest).is_dir()]
        if missing:
            raise ConfigError(f"layers {missing} are not in {self.folder}: store them with add_layer")
        self._check_base(config.base)
        changed = [key for key in OF_CONTAINERS if getattr(config, key) != getattr(Image(), key)]
        settings = {key: getattr(config, key) for key in ("base", "environment", "workdir", *changed)}
        settings["layers"] = list(layers)
        data = orjson.dumps(settings, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(data).hexdigest()
        self._write(self.folder / "images" / f"{digest}.json", data)
        if name:
            self._check_name(name)
            self._write(self.folder / "names" / name, digest.encode())
        return self.open(digest)

    def open(self, reference: str) -> Image:
        """An image by its digest or name.

        Raises :class:`~etude.errors.ConfigError` if it, one of its layers or its base system is not stored,
        :class:`~etude.errors.DamagedError` if what is stored is no image.
        """
        digest = self._resolve(reference)
        try:
            stored = orjson.loads((self.folder / "images" / f"{digest}.json").read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                f"image {reference!r} is not in {self.folder}: build it with `etude images build`, `etude tasks build` "
                "or, of a suite that has only records, `etude suite fetch`, or set ETUDE_IMAGES to the folder that "
                "has it"
            ) from None
        except orjson.JSONDecodeError as error:
            raise DamagedError(f"image {digest} in {self.folder} is not JSON: {error}; build it again") from error
        layers = tuple(map(self._stored_layer, stored["layers"]))
        missing = [layer.name for layer in layers if not layer.is_dir()]
        if missing:
            raise ConfigError(f"image {reference!r} needs layers {missing}, not in {self.folder}: build it again")
        self._check_base(stored["base"])
        try:
            return Image(
                digest=digest,
                base=stored["base"],
                layers=layers,
                environment=stored["environment"],
                workdir=stored["workdir"],
                user=ImageUser(**stored.get("user", {})),
                entrypoint=tuple(stored.get("entrypoint", ())),
                healthchecks=_checks(stored),
                services=tuple(
                    ImageService(**{**service, "argv": tuple(service["argv"]), "healthchecks": _checks(service)})
                    for service in stored.get("services", ())
                ),
            )
        except ValueError as error:
            raise DamagedError(f"image {digest} in {self.folder} is damaged: {error}; build it again") from error

    def verify(self, image: Image) -> None:
        """Compare an image's layers with their digests. Raises :class:`~etude.errors.DamagedError` if one differs.

        A layer with special paths for the agent can be verified only by root, which can set owners.
        """
        for layer in image.layers:
            digests = {digest_tree(layer), digest_tree(layer, owned=()), digest_tree(layer, owned=None)}
            if layer.name not in digests:
                raise DamagedError(f"layer {layer.name} of image {image.digest or image} was changed: build it again")

    def remove(self, reference: str) -> int:
        """Remove an image and its names, and :meth:`collect`. Same errors as :meth:`open` and :meth:`alone`."""
        with self.incoming() as folder, self.alone():
            digest = self._resolve(reference)
            file = self.folder / "images" / f"{digest}.json"
            if not file.exists():
                raise ConfigError(f"image {reference!r} is not in {self.folder}")
            for name in (self.folder / "names").iterdir():
                if name.read_text(encoding="utf-8") == digest:
                    name.unlink()
            file.unlink()
            return self._move_unused(folder)

    def collect(self) -> int:
        """Remove layers that no image uses, and disks of removed layers; return the number of layers. Raises like
        :meth:`alone`.
        """
        with self.incoming() as folder, self.alone():
            return self._move_unused(folder)

    def _move_unused(self, folder: Path) -> int:
        """Move unused layers into ``folder``, to be removed when others may use the store again."""
        images = [orjson.loads(file.read_bytes())["layers"] for file in (self.folder / "images").glob("*.json")]
        used = {digest for layers in images for digest in layers}
        merged = {merged_digest(layers[:count]) for layers in images for count in range(2, len(layers) + 1)}
        unused = [layer for layer in (self.folder / "layers").iterdir() if layer.name not in used]
        for layer in unused:
            layer.rename(folder / layer.name)
        for disk in (self.folder / "disks").glob("*.squashfs"):
            if disk.stem not in used | merged:
                disk.unlink()
        for note in (self.folder / "blobs").iterdir():
            if note.read_text(encoding="ascii") not in used:
                note.unlink()
        return len(unused)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A moment in which nothing else has the store open, so that parts of it can be removed or replaced.

        Raises :class:`~etude.errors.ConfigError`, without waiting, if a run or another command has it open.
        """
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{self.folder} is in use: a run's sandboxes or another command may need what would be removed "
                    "from it; try again when they have ended"
                ) from None
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # a refused change of a lock has released it

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A fresh folder on the store's file system, removed at the end; those of dead writers are removed too.

        Raises :class:`~etude.errors.ConfigError` in another user's store, since that user could run this user's files.
        """
        for name in PRIVATE_FOLDERS:
            owner = (self.folder / name).stat().st_uid
            if owner != os.geteuid():
                raise ConfigError(
                    f"{self.folder / name} belongs to user {owner}, who could run what user {os.geteuid()} stores "
                    "there: set ETUDE_IMAGES to a folder of your own"
                )
        parent = self.folder / "incoming"
        hidden = parent / f".{uuid4().hex}"
        hidden.mkdir()
        lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = hidden.rename(parent / hidden.name[1:])  # from now on other processes may remove it, once unlocked
        try:
            for other in parent.glob("[!.]*"):
                _sweep(other)
            yield folder
        finally:
            remove_tree(folder)
            os.close(lock)

    def _resolve(self, reference: str) -> str:
        if DIGEST.fullmatch(reference):
            return reference
        self._check_name(reference)
        try:
            return self._digest((self.folder / "names" / reference).read_text(encoding="utf-8"), reference)
        except FileNotFoundError:
            names = sorted(file.name for file in (self.folder / "names").iterdir())
            raise ConfigError(f"no image is called {reference!r} in {self.folder}: it has {names}") from None

    def _digest(self, text: str, name: str) -> str:
        if not DIGEST.fullmatch(text):
            raise DamagedError(f"the name {name!r} in {self.folder} is of no image: build it again")
        return text

    def _check_base(self, base: str) -> None:
        """Raise for a base system that is in neither this store nor the user's default store, which images of tasks may
        use.
        """
        roots = [_root_of(folder, base) for folder in (self.folder, default_folder())]
        if base and not (NAME.fullmatch(base) and any(root.is_dir() and _is_own(root) for root in roots)):
            raise ConfigError(
                f"base system {base!r} is not in {self.folder}, which has {list(self.bases)}: "
                f"build it with `etude images build {base}`"
            )

    def _check_name(self, name: str) -> None:
        if not NAME.fullmatch(name) or DIGEST.fullmatch(name):
            raise ConfigError(f"{name!r} is not a valid image name: letters, digits and ._:- only, at most 100")

    def _write(self, path: Path, data: bytes) -> None:
        with self.incoming() as folder:
            (folder / "file").write_bytes(data)
            (folder / "file").replace(path)


def _checks(stored: Mapping[str, Any]) -> tuple[Healthcheck, ...]:
    return tuple(Healthcheck(**{**check, "argv": tuple(check["argv"])}) for check in stored.get("healthchecks", ()))


def merged_digest(layers: Sequence[str]) -> str:
    """The name of the disk that merges these layers, lowest first."""
    return hashlib.sha256("".join(layers).encode()).hexdigest()


def default_folder() -> Path:
    """``$ETUDE_IMAGES``, else ``etude/images`` in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("ETUDE_IMAGES") or cache / "etude" / "images")


def _root_of(folder: Path, base: str) -> Path:
    """The root directory of a base system in the folder of a store."""
    return folder / "bases" / base / "root"


def _is_own(root: Path) -> bool:
    """True if a base system is at its own path: a link could show any folder of this machine."""
    return not root.is_symlink() and not root.parent.is_symlink()


def _close_to_others(folder: Path) -> None:
    """Prevent other users from reaching the content of a folder of a store, even an old one."""
    status = folder.stat()
    if os.geteuid() not in (0, status.st_uid):
        raise ConfigError(f"{folder} belongs to user {status.st_uid}: set ETUDE_IMAGES to a folder of your own")
    if status.st_mode & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"{folder} is open to other users: {error}; set its mode to 700") from error


def settle(source: Path, target: Path) -> None:
    """Move a complete folder or file into place; if another writer was faster, keep that writer's."""
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise


def _sweep(folder: Path) -> None:
    """Remove a folder of ``incoming`` whose lock is free."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or just removed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(folder)
    except OSError:
        pass  # its writer is alive, or another user's
    finally:
        os.close(lock)
