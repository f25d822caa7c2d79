"""A registry of images on the loopback, podman and skopeo with settings of their own beside it, and layouts by hand."""

import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.sandboxes.images.store import default_folder

BUSYBOX = Path("/bin/busybox")
"""Path of Debian's ``busybox-static``."""
USER, PASSWORD = "tester", "a-password-nobody-may-see"
PASSWORD_HASH = "$2b$05$gTxjArYY3OYISb3BUV.YZOpJOtJaF1WKarAXl5lJaoMuV5cmmMZcq"
REGISTRY = """version: 0.1
storage:
  filesystem:
    rootdirectory: {folder}/registry
http:
  addr: 127.0.0.1:{port}
"""
AUTH = """auth:
  htpasswd:
    realm: tests
    path: {folder}/htpasswd
"""
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
INSECURE = '[[registry]]\nlocation = "127.0.0.1:{port}"\ninsecure = true\n'
BASE = """FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
RUN mkdir -p /etc /tmp /root /usr/bin && chmod 1777 /tmp && ln -s /bin/env /usr/bin/env \\
    && printf '#!/bin/sh\\nexec /bin/sh "$@"\\n' >/bin/bash && chmod 755 /bin/bash \\
    && echo 'root:x:0:0::/root:/bin/sh' >/etc/passwd && echo 'root:x:0:' >/etc/group
"""
"""A system of one program, with a shell that is called as Debian's is."""


def what_is_missing() -> str:
    """Reason why root or a program is missing here."""
    programs = ("podman", "skopeo", "docker-registry")
    lacks = [f"{program} is not installed" for program in programs if shutil.which(program) is None]
    lacks += [] if BUSYBOX.exists() else ["busybox-static is not installed"]
    return ", ".join([*lacks, *([] if os.geteuid() == 0 else ["it needs root"])])


@dataclass(frozen=True)
class Registry:
    """A registry that runs."""

    address: str
    folder: Path

    def podman(self, *arguments: str, stdin: bytes = b"") -> str:
        """Output of podman if it succeeds."""
        done = subprocess.run(["podman", *arguments], input=stdin, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def build(self, folder: Path, files: Mapping[str, str], tag: str) -> str:
        """Build a folder that is made of ``files``; the image's reference in this registry, to which it is pushed."""
        write_files(folder, files)
        reference = f"{self.address}/{tag}"
        self.podman("build", "--format=docker", "-t", reference, str(folder))
        self.podman("push", reference)
        return reference


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """Write a folder; what begins with ``#!`` is a program."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if text.startswith("#!") else 0o644)
    return folder


def write_layout(
    folder: Path,
    members: Sequence[tuple[str, str]],
    *,
    files: Mapping[str, str] | None = None,
    config: Mapping[str, str] | None = None,
) -> None:
    """An OCI layout of one layer, without any tool that would refuse what is in it.

    A member with a target is a link, one without an empty file; ``files`` come after them.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for name, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            archive.addfile(info)
        for name, text in (files or {}).items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    tar = put(layer.getvalue(), "layer.v1.tar")
    rootfs = {"type": "layers", "diff_ids": [tar["digest"]]}
    settings = {"architecture": "amd64", "os": "linux", "config": dict(config or {}), "rootfs": rootfs}
    parts = {"config": put(json.dumps(settings).encode(), "config.v1+json"), "layers": [tar]}
    manifest = put(json.dumps({"schemaVersion": 2, **parts}).encode(), "manifest.v1+json")
    write_files(
        folder,
        {
            "oci-layout": '{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps({"schemaVersion": 2, "manifests": [manifest]}),
        },
    )


@contextmanager
def running_registry(folder: Path, *, private: bool = False) -> Iterator[Registry]:
    """A registry in ``folder``, empty but for the image ``base`` in podman's own storage, ``localhost/base``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    write_files(
        folder,
        {
            "registry.yml": (REGISTRY + (AUTH if private else "")).format(folder=folder, port=port),
            "htpasswd": f"{USER}:{PASSWORD_HASH}\n",
            "auth.json": "{}",
            "storage.conf": STORAGE.format(folder=folder),
            ".config/containers/registries.conf": INSECURE.format(port=port),
        },
    )
    before = dict(os.environ)
    os.environ |= {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "ETUDE_IMAGES": str(default_folder()),
        "HOME": str(folder),
        "REGISTRY_AUTH_FILE": str(folder / "auth.json"),
        "BUILDAH_ISOLATION": "chroot",  # this may be a container itself
    }
    command = ["docker-registry", "serve", str(folder / "registry.yml")]
    # the registry takes any variable REGISTRY_… for a setting of its own
    with (
        (folder / "registry.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]}) as process,
    ):
        try:
            registry = Registry(address=f"127.0.0.1:{port}", folder=folder)
            _wait_for(port)
            (folder / "base").mkdir()
            shutil.copy(BUSYBOX, folder / "base" / "busybox")
            write_files(folder / "base", {"Dockerfile": BASE})
            registry.podman("build", "--format=docker", "-t", "localhost/base", str(folder / "base"))
            yield registry
        finally:
            process.terminate()
            subprocess.run(["podman", "rmi", "--all", "--force"], capture_output=True, check=False)
            overlay = str(folder / "storage" / "overlay")  # a mount of podman's own, now and then left behind
            subprocess.run(["umount", "--lazy", overlay], capture_output=True, check=False)
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ |= before


def _wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"the registry does not listen at port {port}")
