"""References of images, as skopeo has them."""

import tarfile
from pathlib import Path

import pytest

from etude.errors import ConfigError, SandboxError
from etude.sandboxes.images.containers import _Fetched, reference_of


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("debian:12", ("docker://debian:12", "")),
        ("host:5000/a/b@sha256:12", ("docker://host:5000/a/b@sha256:12", "")),
        ("docker://debian", ("docker://debian", "")),
        ("oci-archive:x.tar", ("oci-archive:x.tar", "")),
    ],
)
def test_what_is_no_path_is_a_registrys_or_has_its_transport(reference: str, expected: tuple[str, str]) -> None:
    assert reference_of(reference) == expected


def test_files_and_folders_are_known_by_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "oci-layout").touch()
    (tmp_path / "manifest.json").touch()
    assert reference_of(f"{tmp_path}@sha256:1") == (f"oci:{tmp_path}", "sha256:1")
    for kind, name in (("oci", "oci-layout"), ("docker", "manifest.json")):
        with tarfile.open(tmp_path / f"{kind}.tar", "w") as archive:
            archive.add(tmp_path / name, f"./{name}")
        path = tmp_path / f"{kind}.tar"
        assert reference_of(str(path)) == (f"{kind}-archive:{path}", "")


def test_files_and_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar", encoding="utf-8")
    with pytest.raises(ConfigError, match="text is not an image"):
        reference_of(str(tmp_path / "text"))
    with pytest.raises(ConfigError, match="neither a Dockerfile nor a file oci-layout"):
        reference_of(str(tmp_path))


@pytest.mark.parametrize(
    "manifest",
    [
        *("", "[]", "{}", '{"layers": [{}]}', '{"layers": [{"digest": "sha256:../../etc/passwd"}]}'),
        '{"layers": [], "config": {"digest": "sha256:gone"}}',
        '{"layers": ' + "[" * 3000 + "]" * 3000 + "}",
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    image = _Fetched(tmp_path)
    with pytest.raises(SandboxError, match="cannot be read"):
        _ = image.blobs, image.config
