"""Every installed package has the hashes of its files in the constraints, except torch."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(path.name for path in ROOT.glob("constraints*.txt") if path.name != "constraints-torch.txt")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("name", FILES)
def test_every_version_has_hashes(name: str) -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    pins = text.replace("\\\n", " ").splitlines()
    assert pins
    for pin in pins:
        requirement, *hashes = pin.split(" --", 1)
        assert re.fullmatch(r"[a-z0-9.-]+==[^ ;]+( ; .+)?", requirement.strip()), pin
        assert hashes and HASH.search(pin), f"{name}: {requirement} has no hash; `make pins` writes them"
