"""The runtime's bundle and the shell commands: no character of a path is interpreted."""

import shlex
import subprocess
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox_spec import Image, ImageUser, SandboxSpec
from etude.sandboxes.oci.bundle import ROOT, bundle, overlays, process, root_script, stage_script

STAGE = Path("/stage with space")


def test_layers_lie_over_the_bottom_and_over_the_machines_folders(tmp_path: Path) -> None:
    low, high = tmp_path / "low", tmp_path / "high"
    (low / "usr").mkdir(parents=True)
    high.mkdir()
    spec = SandboxSpec(image=Image(layers=(low, high)))
    root, usr = overlays(spec, (Path("/shim"), Path("/skeleton")), {"/usr": Path("/usr")})
    assert (root.target, list(root.lowers)) == ("", [high, low, Path("/shim"), Path("/skeleton")])
    assert (usr.target, list(usr.lowers)) == ("/usr", [low / "usr", Path("/usr")])


def test_a_link_of_a_layer_puts_nothing_of_the_machine_into_an_overlay(tmp_path: Path) -> None:
    layer, machine = tmp_path / "layer", tmp_path / "machine"
    (machine / "python").mkdir(parents=True)
    layer.mkdir()
    (layer / "usr").symlink_to(machine)
    (layer / "opt").symlink_to(machine)
    spec = SandboxSpec(image=Image(layers=(layer,)))
    shown = {"/usr": Path("/usr"), "/opt/python": Path("/opt/python")}
    _, usr, python = overlays(spec, (Path("/skeleton"),), shown)
    assert (list(usr.lowers), list(python.lowers)) == ([Path("/usr")], [Path("/opt/python")])


def test_no_place_is_used_before_the_links_to_it_are_refused(tmp_path: Path) -> None:
    mounts = {"/a/b": tmp_path}
    spec = SandboxSpec(image=Image(workdir="/srv/here"), mounts=mounts)
    lines = root_script(STAGE, overlays(spec, (Path("/skeleton"),), {"/usr": Path("/usr")}), spec).splitlines()
    for place in ("/usr", "/srv", "/srv/here", "/home", "/home/agent", "/tmp", "/proc", "/dev", "/sys", "/a", "/a/b"):
        checked = next(number for number, line in enumerate(lines) if place in line.split() and "no_links" in line)
        used = next(number for number, line in enumerate(lines) if f"/root{place}" in line)
        assert checked < used, place


@pytest.mark.parametrize("character", ":,\\")
def test_a_path_that_no_overlay_can_have_is_refused(tmp_path: Path, character: str) -> None:
    layer = tmp_path / f"a{character}b"
    with pytest.raises(SandboxError, match="move it"):
        overlays(SandboxSpec(image=Image(layers=(layer,))), (Path("/skeleton"),), {})


def test_scripts_are_what_a_shell_understands(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    mounts = {"/a b/$(id)": tmp_path / "folder", "/it's/file": tmp_path / "file"}
    spec = SandboxSpec(image=Image(workdir="/srv/`id`"), mounts=mounts)
    script = stage_script(STAGE, 1 << 20) + root_script(STAGE, overlays(spec, (Path("/skeleton"),), {}), spec)
    subprocess.run(["sh", "-n"], input=script, text=True, check=True, timeout=10)
    for part in ("/a b/$(id)", "/it's/file", "/srv/`id`"):
        assert shlex.quote(part) in script
    assert "size=1048576," in script


def test_an_agent_has_no_powers_and_root_few() -> None:
    agent, root = (process(["true"], {"A": "b"}, "/work", user=user) for user in (ImageUser(), ROOT))
    assert agent["user"] == {"uid": 1000, "gid": 1000}
    assert agent["capabilities"] == {"bounding": [], "effective": [], "permitted": []}
    assert (agent["noNewPrivileges"], root["noNewPrivileges"]) == (True, False)
    assert root["user"] == {"uid": 0, "gid": 0}
    assert "CAP_SYS_ADMIN" not in str(root)
    assert "CAP_CHOWN" in str(root)


def test_the_machines_own_kernel_is_masked_and_filtered() -> None:
    own, shared = (bundle(STAGE, shares_kernel=shares)["linux"] for shares in (False, True))
    assert isinstance(own, dict) and isinstance(shared, dict)
    assert not own.keys() & {"seccomp", "maskedPaths", "readonlyPaths"}
    assert "/proc/kcore" in str(shared["maskedPaths"])
    assert "/proc/sysrq-trigger" in str(shared["readonlyPaths"])
    assert isinstance(shared["seccomp"], dict) and isinstance(shared["seccomp"]["syscalls"], list)
    refused = [str(rule) for rule in shared["seccomp"]["syscalls"]]
    for call in ("mount", "bpf", "unshare", "clone3", "keyctl"):
        assert any(f"'{call}'" in rule and "args" not in rule for rule in refused), call
    vsock = {"index": 0, "value": 16, "op": "SCMP_CMP_GT"}
    assert any("'socket'" in rule and str(vsock) in rule for rule in refused)
    type_in = {"index": 1, "value": 0xFFFFFFFF, "valueTwo": 0x5412, "op": "SCMP_CMP_MASKED_EQ"}
    assert any("'ioctl'" in rule and str(type_in) in rule for rule in refused), "the high half would get round it"


@pytest.mark.parametrize("shares_kernel", [False, True])
def test_nothing_inside_takes_uncounted_memory(shares_kernel: bool) -> None:
    config = bundle(STAGE, shares_kernel=shares_kernel)
    assert isinstance(config["mounts"], list)
    for mount in config["mounts"]:
        assert isinstance(mount, dict)
        if mount["type"] == "tmpfs":
            assert "size=" in str(mount["options"])
