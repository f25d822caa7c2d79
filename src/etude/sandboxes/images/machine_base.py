"""The machine's own programs as a base system: a small directory tree around them, created once by each provider.

    /usr, /bin, /lib… of the machine, read-only ◀ this skeleton: a minimal /etc, empty folders, user accounts

Owns the skeleton's contents. Copies files instead of mounting folders: only the listed parts of the machine's ``/etc``
are visible.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

from etude.sandbox_spec import WORKDIR, SandboxSpec
from etude.sandboxes.ns.root import AGENT, HOME, HOSTNAME, hosts_text

SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders or links, in addition to ``/usr``, that may contain programs and libraries."""
ETC_FILES = (
    *("debian_version", "host.conf", "inputrc", "issue", "ld.so.cache", "ld.so.conf", "localtime", "login.defs"),
    *("magic", "mime.types", "netconfig", "nsswitch.conf", "os-release", "profile", "protocols", "rpc", "services"),
    *("shells", "timezone"),
)
ETC_FOLDERS = ("alternatives", "fonts", "java-17-openjdk", "ld.so.conf.d", "perl", "ssl/certs", "terminfo")
"""Parts of ``/etc`` that programs need to start, resolve names and check certificates; no secrets and no accounts."""
EMPTY_FOLDERS = ("dev", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "usr", "var/lib", "var/log")
OWN_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:{shell}\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    f"agent:x:{AGENT}:{AGENT}::{HOME}:{{shell}}\n",
    "etc/group": f"root:x:0:\ntty:x:5:\nnogroup:x:65534:\nagent:x:{AGENT}:\n",
    "etc/hostname": f"{HOSTNAME}\n",
    "etc/hosts": hosts_text((), HOSTNAME),
    "etc/resolv.conf": "",
}
"""Files with a sandbox's users and host names."""
SEARCH_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Folders of every search path, in order."""
ROOT_HOME = "/root"
PERMANENT = 0o755


def write_skeleton(folder: Path) -> None:
    """Create the skeleton in a new ``folder``. Files that the machine lacks are left out."""
    folder.mkdir(mode=PERMANENT)
    for name in (*EMPTY_FOLDERS, "tmp", "var/tmp", "etc/ssl", WORKDIR.strip("/"), HOME.strip("/")):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ETC_FILES:
        with suppress(OSError):
            shutil.copy2(Path("/etc", name), folder / "etc" / name)
    for name in ETC_FOLDERS:
        with suppress(OSError, shutil.Error):
            shutil.copytree(Path("/etc", name), folder / "etc" / name, symlinks=True)
    for name in SYSTEM_FOLDERS:
        place = Path("/", name)
        if place.is_symlink():
            (folder / name).symlink_to(place.readlink())
    for target in machine_folders():
        (folder / target.strip("/")).mkdir(parents=True, exist_ok=True)
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    for name, text in OWN_FILES.items():
        (folder / name).write_text(text.format(shell=shell), encoding="utf-8")
    _open_up(folder)
    for name in ("tmp", "var/tmp"):
        (folder / name).chmod(0o1777)
    for name in (WORKDIR, HOME):
        if os.geteuid() == 0:
            os.chown(folder / name.strip("/"), AGENT, AGENT)


@cache
def machine_folders() -> Mapping[str, Path]:
    """Folders of the machine that are shown besides ``/usr``: separate system folders, and this process's Python."""
    shown = {f"/{name}": Path("/", name) for name in SYSTEM_FOLDERS}
    shown = {target: path for target, path in shown.items() if path.is_dir() and not path.is_symlink()}
    interpreter = Path(sys.base_prefix)
    shown |= {} if interpreter.is_relative_to("/usr") else {str(interpreter): interpreter}
    return MappingProxyType(shown)


def variables_of(spec: SandboxSpec) -> dict[str, str]:
    """Variables of every command.

    ``PATH`` has the programs of the mounts, then the image's own folders or the system's. If the base system is the
    machine's, the folder of this process's Python is last.
    """
    image = spec.image
    folders = [f"{target}/bin" for target, source in spec.mounts.items() if (source / "bin").is_dir()]
    folders += image.environment["PATH"].split(":") if "PATH" in image.environment else SEARCH_FOLDERS
    if not image.base and not Path(sys.base_prefix).is_relative_to("/usr"):
        folders.append(f"{sys.base_prefix}/bin")
    home = ROOT_HOME if spec.user == "root" else image.user.home
    usual = {"LANG": "C.UTF-8", "HOME": home, **image.environment, "PATH": ":".join(folders)}
    return {**usual, **spec.environment}


def environment_mounts(folder: Path) -> dict[str, Path]:
    """Mounts for a Python environment: the folder at its own path, and the Python installation it was made from."""
    folder = folder.absolute()
    mounts = {str(folder): folder}
    settings = folder / "pyvenv.cfg"
    if settings.is_file():
        for line in settings.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                base = Path(value.strip()).resolve().parent
                mounts |= {} if base.is_relative_to("/usr") else {str(base): base}
    return mounts


def _open_up(folder: Path) -> None:
    """Make all files readable for everyone, independently of the umask."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))
