"""Export of étude's tasks as folders in Harbor's format.

A task that came from such a folder goes back as it came. Tasks that are graded by étude's own means get a verifier that
asks the same questions: of a function (:class:`~etude.types.FunctionChecks`), or by the named tests
(:class:`~etude.types.TestChecks`). It is as strong as a script can be, which is less than étude's own graders: it has
neither must-fail twins nor questions from another process. Layers of an image become archives that Docker unpacks.

What the format has no key for is in ``[metadata.etude]``; :func:`~etude.tasks.harbor.folder.read_task` reads it
back. Writes folders; decides nothing about tasks.
"""

import json
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any
from uuid import uuid4

import tomli_w

from etude.sandbox_spec import SCRATCH, EnvironmentSpec, Image
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.harbor import function_verifier, named_tests_verifier
from etude.tasks.harbor.folder import ENVIRONMENT, INSTRUCTION, SETTINGS, SOLUTION, TEST_PROGRAM, TESTS
from etude.tasks.harbor.settings import MIB, TaskFolderError
from etude.types import FunctionChecks, ScriptChecks, Task, TestChecks

DOCKER_IMAGE = "python:3.11-slim-bookworm"
"""Image that stands for the provider's own base system where Docker builds the image."""
FILES = "files"
"""Folder of the build context: what goes into the working folder."""
RUN_GRADE = """#!/bin/bash
python3 /tests/grade.py /logs/verifier/reward.json
"""


def export_task(
    task: Task, folder: Path, *, images: ImageStore | None = None, solution: Mapping[str, str] | None = None
) -> None:
    """Write ``task`` as the new folder ``folder``; ``solution`` is what goes below ``solution/``.

    ``images`` holds the task's image, if it has one. Raises
    :class:`~etude.tasks.harbor.settings.TaskFolderError` for a folder that is there already and for what the
    format cannot say, :class:`~etude.errors.ConfigError` for an image that is not stored.
    """
    if folder.exists():
        raise TaskFolderError(f"{folder} is there already: name a new folder")
    environment = task.environment or EnvironmentSpec()
    if environment.services:
        kinds = [service.kind.value for service in environment.services]
        raise TaskFolderError(f"task {task.task_id} has the services {kinds}, which Harbor's format does not know")
    verifier = _verifier(task)
    image = images.open(environment.image) if images and environment.image else None
    if environment.image and image is None:
        raise TaskFolderError(f"task {task.task_id} is made from image {environment.image}: name the store that has it")
    if image and image.base == SCRATCH:
        raise TaskFolderError(
            f"task {task.task_id} is made from a container's image: copy the folder that it came from"
        )
    incoming = folder.with_name(f".{folder.name}.{uuid4().hex}")
    incoming.mkdir(parents=True)
    try:
        (incoming / INSTRUCTION).write_text(task.prompt + "\n", encoding="utf-8")
        (incoming / SETTINGS).write_text(tomli_w.dumps(_settings(task, environment, verifier)), encoding="utf-8")
        _write_files(incoming / TESTS, verifier.files)
        _write_files(incoming / SOLUTION, solution or {})
        _write_environment(incoming / ENVIRONMENT, task, environment, image)
        incoming.rename(folder)
    except BaseException:
        shutil.rmtree(incoming)
        raise


def _verifier(task: Task) -> ScriptChecks:
    """The task's checks as a script's."""
    checks = task.checks
    if isinstance(checks, ScriptChecks):
        if checks.command != ScriptChecks(files={}).command:
            raise TaskFolderError(f"task {task.task_id} is graded by {checks.command}: Harbor runs {TEST_PROGRAM}")
        return checks
    if isinstance(checks, FunctionChecks):
        cases = [{"arguments": case.arguments, "expected": case.expected} for case in checks.hidden]
        question = {"path": checks.path, "function": checks.function, "hidden": cases}
        files = _program(function_verifier, "cases.json", question)
        return ScriptChecks(files=files, artefacts=(checks.path,))
    if isinstance(checks, TestChecks):
        names = ("files", "must_pass", "about", "command", "timeout_s")
        files = _program(named_tests_verifier, "checks.json", {name: getattr(checks, name) for name in names})
        timeout_s = checks.timeout_s * len(checks.must_pass)
        return ScriptChecks(files=files, artefacts=checks.artefacts, timeout_s=timeout_s)
    raise TaskFolderError(f"task {task.task_id} has {type(checks).__name__}, which no script of ours asks")


def _program(module: ModuleType, name: str, question: Mapping[str, Any]) -> dict[str, str]:
    """The files of a verifier: one of our own programs, and what it asks."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    return {TEST_PROGRAM: RUN_GRADE, "grade.py": source, name: json.dumps(question, indent=1)}


def _settings(task: Task, environment: EnvironmentSpec, verifier: ScriptChecks) -> dict[str, Any]:
    """The tree of ``task.toml``."""
    limits = environment.limits
    whole = verifier.artefacts == (".",)
    hosts = sorted({place.rpartition(":")[0] for place in environment.allow})
    network: dict[str, Any] = {"network_mode": "allowlist", "allowed_hosts": hosts} if hosts else {}
    origin: dict[str, Any] = {
        "task_id": task.task_id,
        "family": task.family,
        "template": task.template,
        "split": task.split.value,
        "processes": limits.processes,
    }
    return {
        "schema_version": "1.4",
        **(
            {}
            if whole
            else {"artifacts": [str(PurePosixPath(environment.workdir) / path) for path in verifier.artefacts]}
        ),
        "metadata": {"etude": origin | ({"allow": list(environment.allow)} if environment.allow else {})},
        "verifier": {
            "timeout_sec": verifier.timeout_s,
            "environment_mode": "shared" if whole else "separate",
            "env": dict(verifier.environment),
        },
        "environment": {
            "cpus": limits.cpus,
            "memory_mb": -(-limits.memory_bytes // MIB),
            "storage_mb": -(-limits.disk_bytes // MIB),
            "workdir": environment.workdir,
            "env": dict(environment.variables),
            **(network or {"network_mode": "no-network"}),
        },
    }


def folder_of(task: Task, out: Path) -> Path:
    """The folder of a task below ``out``. Raises :class:`~etude.tasks.harbor.settings.TaskFolderError`."""
    return _below(out, task.task_id)


def _below(folder: Path, name: str) -> Path:
    """A path that a task names: tasks are passed on, and where they are written is no affair of theirs."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise TaskFolderError(f"{name!r} does not lie below {folder}: correct the task")
    return folder / path


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        file = _below(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            file.chmod(0o755)


def _write_environment(folder: Path, task: Task, environment: EnvironmentSpec, image: Image | None) -> None:
    """A Dockerfile and its context: the image's layers as archives, then the task's files."""
    folder.mkdir()
    lines = [f"FROM {DOCKER_IMAGE}"]
    for number, layer in enumerate(image.layers if image else ()):
        _write_archive(layer, folder / f"layer-{number}.tar")
        lines.append(f"ADD layer-{number}.tar /")
    lines += [f"ENV {name}={json.dumps(value)}" for name, value in (image.environment if image else {}).items()]
    lines.append(f"WORKDIR {environment.workdir}")
    if task.files:
        _write_files(folder / FILES, task.files)
        lines.append(f"COPY {FILES}/ {environment.workdir}/")
    (folder / "Dockerfile").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _write_archive(layer: Path, archive: Path) -> None:
    """A layer as a tar of root's files; times are left out, so that equal layers are equal archives.

    Raises :class:`~etude.tasks.harbor.settings.TaskFolderError` for a layer that hides files of those below.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()):
            raise TaskFolderError(f"layer {layer.name} removes {entry.name}, which an archive cannot say: flatten it")
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(archive, "w") as tar:
        for path in sorted(layer.iterdir()):
            tar.add(path, path.name, filter=plain)
