"""Snapshots of OCI sandboxes: a link above one of the machine's folders is refused before anything changes."""

from pathlib import Path

import pytest

from etude.sandboxes.oci.provider import _copy_upper_folders


def test_a_link_above_a_folder_of_the_machine_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    upper, machine = tmp_path / "upper", tmp_path / "machine"
    (machine / "python").mkdir(parents=True)
    (machine / "python" / "precious").touch()
    for number in ("0", "1"):
        (upper / number).mkdir(parents=True)
    (upper / "0" / "opt").symlink_to(machine)
    with pytest.raises(ValueError, match="/opt was made a link"):
        _copy_upper_folders(upper, ["", "/opt/python"], tmp_path / "layer")
    assert (machine / "python" / "precious").exists()
