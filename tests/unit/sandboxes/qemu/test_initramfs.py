"""The initial RAM disk: an archive that the kernel reads, modules in dependency order, code without other imports."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

import etude
from etude.sandboxes.qemu.initramfs import AGENT_CODE, AGENT_MODULE, agent_archive, module_order, write_cpio


def test_an_archive_is_read_by_cpio(tmp_path: Path) -> None:
    program = shutil.which("bsdtar") or shutil.which("cpio")
    if program is None:
        pytest.skip("neither cpio nor bsdtar is installed")
    archive = write_cpio(("a",), {"a/x": (0o755, b"xyz"), "y": (0o644, b"")})
    extract = [program, "-xf", "-"] if program.endswith("bsdtar") else [program, "-id", "--quiet"]
    subprocess.run(extract, input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "a/x").read_bytes() == b"xyz"
    assert os.access(tmp_path / "a/x", os.X_OK)
    assert (tmp_path / "y").read_bytes() == b""


def test_every_field_of_an_archive_is_where_the_kernel_looks() -> None:
    archive = write_cpio((), {"name": (0o644, b"data!")})
    assert archive[:6] == b"070701"
    assert int(archive[6 + 8 : 6 + 16], 16) == 0o100644
    assert int(archive[6 + 48 : 6 + 56], 16) == len(b"data!")
    assert archive[110:116] == b"name\0\0"
    assert archive[116:124] == b"data!\0\0\0"
    assert b"TRAILER!!!" in archive
    assert len(archive) % 4 == 0


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    needs = {"a": "b,c-d", "b": "c-d", "c-d": "", "e": ""}
    for name, need in needs.items():
        (tmp_path / f"{name}.ko").write_bytes(b"\x7fELF\0depends=" + need.encode() + b"\0")
    assert list(module_order(tmp_path, ("a", "e"))) == ["c_d", "b", "a", "e"]
    with pytest.raises(FileNotFoundError, match="'f' is not below"):
        module_order(tmp_path, ("f",))


def test_the_agents_code_imports_nothing_but_itself_and_the_standard_library() -> None:
    source = Path(etude.__file__).parent
    modules = {f"etude.{name.removesuffix('.py').replace('/', '.')}" for name in AGENT_CODE}
    for name in AGENT_CODE:
        if name.endswith("__init__.py"):
            continue
        for node in ast.walk(ast.parse((source / name).read_text(encoding="utf-8"))):
            for module in imported(node):
                is_known = module in modules or module.split(".")[0] in sys.stdlib_module_names
                assert is_known or module.rpartition(".")[0] in modules, f"{name} imports {module}"


def imported(node: ast.AST) -> list[str]:
    """The names in an import: modules, and names imported from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def test_the_agents_code_is_in_its_archive() -> None:
    archive = agent_archive()
    assert AGENT_MODULE.replace(".", "/").encode() + b".py" in archive
    assert archive == agent_archive()


def test_the_folders_of_the_agents_code_are_in_the_archive_before_it() -> None:
    archive = agent_archive()
    for name in AGENT_CODE:
        path = PurePosixPath("agent/etude", name)
        place = archive.index(f"{path}\0".encode())
        for folder in [*path.parents][:-1]:
            assert -1 < archive.find(f"{folder}\0".encode()) < place
