"""Base systems made of Debian packages: a root directory, the same as a disk, and the files to boot a virtual machine.

    bases/NAME/
      root/            the root directory, for sandboxes that share this machine's kernel
      root.squashfs    the same as a disk
      vmlinuz          Debian's kernel for virtual machines
      initramfs        busybox, the kernel modules of virtio disks and ports, and a script that starts the agent
      made.json        its inputs, their digest, and every package with its version

``mmdebstrap`` does the work, as root or, if user namespaces and ``/etc/subuid`` allow it, as any user. A base is built
in a temporary folder and moved into place when complete. The result depends on the suite, the mirror and the packages;
versions are the mirror's current ones, so for reproducible bytes name a snapshot mirror.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson

from etude.errors import ConfigError, SandboxError
from etude.sandboxes.images.disks import pack
from etude.sandboxes.images.layers import AGENT, remove_tree
from etude.sandboxes.images.store import NAME, ImageStore, settle
from etude.sandboxes.qemu.initramfs import write_initramfs

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
SECURITY_MIRROR = "http://deb.debian.org/debian-security"
PACKAGES = ("python3", "python3-pip", "python3-venv", "python-is-python3", "git", "procps", "ca-certificates", "passwd")
"""Packages of every base: agents' commands need them."""
BOOT_PACKAGES = ("linux-image-cloud-amd64", "busybox-static")
"""Packages that are unpacked for their files, not installed."""
TRIMMED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*")
LEFTOVERS = ("var/cache", "var/log", "var/lib/apt/lists", "boot-packages")
"""Folders that are emptied: no command needs them, and they differ from day to day."""
BUILD_TIMEOUT_S = 1800.0
EPOCH = "1700000000"
"""Time of all files made during the build."""
FETCH_BOOT = (
    'set -e; mkdir "$1/boot-packages"; cd "$1/boot-packages"; export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"; '
    "kernel=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \\(linux-image-[0-9].*\\)/\\1/p'); "
    'apt-get download -o APT::Sandbox::User=root busybox-static "$kernel"'
)
"""Run by mmdebstrap with the new root as ``$1``."""
FINISH = (
    f'set -e; chroot "$1" useradd --no-create-home --uid {AGENT} --shell /bin/bash agent; '
    f'for d in home/agent work; do mkdir -p "$1/$d"; chroot "$1" chown {AGENT}:{AGENT} "/$d"; done; '
    ': > "$1/etc/resolv.conf"; echo debian > "$1/etc/hostname"; : > "$1/etc/machine-id"'
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRecipe:
    """The recipe of a base system."""

    name: str = "debian"
    packages: tuple[str, ...] = ()
    """In addition to ``PACKAGES``: ``postgresql``, ``redis-server``, ``gcc`` or any other Debian package."""
    suite: str = SUITE
    mirror: str = MIRROR

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is not a valid base system name: letters, digits and ._:- only")
        wrong = [word for word in (self.suite, *self.packages) if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", word)]
        if wrong:
            raise ConfigError(f"{wrong} are not valid Debian package names")

    @property
    def digest(self) -> str:
        """SHA-256 of the inputs and of the build steps."""
        inputs = [self.suite, self.mirror, sorted({*PACKAGES, *self.packages}), FETCH_BOOT, FINISH, TRIMMED, LEFTOVERS]
        return hashlib.sha256(orjson.dumps(inputs)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A stored base system."""

    name: str
    folder: Path
    digest: str
    """Digest of its recipe."""
    packages: tuple[str, ...]
    """``name=version`` of every package."""

    @property
    def root(self) -> Path:
        """Its root directory."""
        return self.folder / "root"

    @property
    def disk(self) -> Path:
        """The root as a squashfs."""
        return self.folder / "root.squashfs"

    @property
    def kernel(self) -> Path:
        """A bzImage."""
        return self.folder / "vmlinuz"

    @property
    def initramfs(self) -> Path:
        """A cpio archive that starts the content of a second archive after it."""
        return self.folder / "initramfs"


def open_base(store: ImageStore, name: str = "debian") -> Base:
    """Open a stored base system. Raises :class:`~etude.errors.ConfigError` if there is none of that name."""
    folder = store.folder / "bases" / name
    try:
        made = orjson.loads((folder / "made.json").read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        raise ConfigError(
            f"base system {name!r} is not in {store.folder}, which has {list(store.bases)}: "
            f"build it with `etude images build {name}`, or set ETUDE_IMAGES to the folder that has it"
        ) from None
    return Base(name=name, folder=folder, digest=made["digest"], packages=tuple(made["packages"]))


def build_base(store: ImageStore, recipe: BaseRecipe | None = None, progress: Progress = print) -> Base:
    """Build a base system, or open it if it was built from the same recipe; takes about two minutes and 600 MB.

    Raises :class:`~etude.errors.ConfigError` if a tool is missing or the base system to be replaced may be in use,
    :class:`~etude.errors.SandboxError` with the end of the log if the build fails.
    """
    recipe = recipe or BaseRecipe()
    place = store.folder / "bases" / recipe.name
    with _only_builder(store, recipe.name, progress):
        try:
            base = open_base(store, recipe.name)
        except ConfigError:
            pass
        else:
            if base.digest == recipe.digest:
                return base
            with store.alone():  # refused now rather than after the build
                progress(f"{recipe.name}: its recipe has changed, building it again")
        with store.incoming() as folder:
            _build(recipe, folder, progress)
            if place.exists():
                with store.alone():
                    place.rename(folder / "replaced")
                    settle(folder / "base", place)
            else:
                settle(folder / "base", place)
        return open_base(store, recipe.name)


def remove_base(store: ImageStore, name: str) -> None:
    """Remove a base system. Raises :class:`~etude.errors.ConfigError` if there is none of that name, or if it may be in
    use.
    """
    base = open_base(store, name)
    with store.incoming() as folder, store.alone():
        base.folder.rename(folder / "removed")


def _build(recipe: BaseRecipe, folder: Path, progress: Progress) -> None:
    for program, package in (("mmdebstrap", "mmdebstrap"), ("mksquashfs", "squashfs-tools"), ("dpkg-deb", "dpkg")):
        if shutil.which(program) is None:
            raise ConfigError(f"{program!r} is not installed: on Debian or Ubuntu, apt-get install {package}")
    base = folder / "base"
    base.mkdir()
    progress(f"{recipe.name}: fetching and installing {len({*PACKAGES, *recipe.packages})} packages and what they need")
    _run(_bootstrap_command(recipe, folder / "root.tar"), progress)
    (base / "root").mkdir()
    own = [] if os.geteuid() == 0 else ["--no-same-owner"]
    _run(["tar", "-xf", str(folder / "root.tar"), "-C", str(base / "root"), "--exclude=./dev/*", *own], progress)
    progress(f"{recipe.name}: kernel and initial RAM disk")
    _unpack_boot(base, folder)
    for leftover in LEFTOVERS:
        _empty(base / "root" / leftover)
    progress(f"{recipe.name}: disk")
    pack(base / "root", base / "root.squashfs")
    status = (base / "root/var/lib/dpkg/status").read_text(encoding="utf-8")
    made = {"digest": recipe.digest, "packages": _packages(status), "suite": recipe.suite, "mirror": recipe.mirror}
    (base / "made.json").write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2))


def _bootstrap_command(recipe: BaseRecipe, tar: Path) -> list[str]:
    sources = [
        f"deb {recipe.mirror} {recipe.suite} main",
        f"deb {recipe.mirror} {recipe.suite}-updates main",
        f"deb {SECURITY_MIRROR} {recipe.suite}-security main",
    ]
    return [
        "mmdebstrap",
        "--variant=essential",
        "--architectures=amd64",
        f"--include={','.join((*PACKAGES, *recipe.packages))}",
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Retries "3"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in TRIMMED),
        f"--customize-hook={FETCH_BOOT}",
        f"--customize-hook={FINISH}",
        recipe.suite,
        str(tar),
        *(sources if recipe.mirror == MIRROR else sources[:1]),
    ]


def _unpack_boot(base: Path, folder: Path) -> None:
    """Extract the kernel, its modules and busybox from their packages."""
    boot = folder / "boot"
    for package in (base / "root/boot-packages").glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(boot)], lambda line: None)
    kernels, modules = list(boot.glob("boot/vmlinuz-*")), list(boot.glob("lib/modules/*/kernel"))
    if len(kernels) != 1 or len(modules) != 1 or not (boot / "bin/busybox").exists():
        raise SandboxError(f"Debian's {' and '.join(BOOT_PACKAGES)} do not hold one kernel and a busybox")
    kernels[0].rename(base / "vmlinuz")
    (base / "initramfs").write_bytes(write_initramfs(modules[0], boot / "bin/busybox"))


def _packages(status: str) -> list[str]:
    """``name=version`` of every package in dpkg's own list."""
    blocks = [block for block in status.split("\n\n") if block.strip()]
    fields = [dict(re.findall(r"^(\w+): (.*)$", block, re.MULTILINE)) for block in blocks]
    return sorted(f"{field['Package']}={field['Version']}" for field in fields)


def _empty(folder: Path) -> None:
    """Remove the content of a folder of a root, if the folder exists."""
    for inner in list(folder.iterdir()) if folder.is_dir() else ():
        if inner.is_dir() and not inner.is_symlink():
            remove_tree(inner)
        else:
            inner.unlink()
    if folder.name == "boot-packages" and folder.is_dir():
        folder.rmdir()


def _run(argv: Sequence[str], progress: Progress) -> None:
    """Run a program and report its output lines. Raises :class:`~etude.errors.SandboxError` with the last of them."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    lines: list[str] = []
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines = [*lines[-30:], line.rstrip()]
                if line.startswith(("I:", "W:", "E:")):
                    progress(f"  {line[3:].rstrip()}")
                if time.monotonic() > deadline:
                    raise SandboxError(f"{argv[0]} was not done after {BUILD_TIMEOUT_S} s")
        except BaseException:
            process.terminate()  # it removes its temporary files
            raise
    if process.returncode != 0:
        raise SandboxError(f"{argv[0]} failed with exit code {process.returncode}:\n" + "\n".join(lines))


@contextmanager
def _only_builder(store: ImageStore, name: str, progress: Progress) -> Iterator[None]:
    """Wait until no other process builds a base of this name."""
    lock = os.open(store.folder / "bases" / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{name}: another process builds it, waiting")
            _wait_for_lock(lock, name)
        yield
    finally:
        os.close(lock)


def _wait_for_lock(lock: int, name: str) -> None:
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.5)
        else:
            return
    raise SandboxError(f"base system {name!r} is being built by another process for more than {BUILD_TIMEOUT_S} s")
