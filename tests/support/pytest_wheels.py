"""Wheels of pytest and its dependencies, made from this environment's files, without a package index."""

import zipfile
from importlib.metadata import distribution
from pathlib import Path

WHEELS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


def make_wheels(folder: Path) -> Path:
    """Write the wheels into a folder."""
    folder.chmod(0o755)  # whoever is root in a sandbox is nobody here
    for name in WHEELS:
        installed = distribution(name)
        files = [file for file in installed.files or () if ".." not in file.parts and file.suffix != ".pyc"]
        version = installed.version
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for file in files:
                if file.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                    wheel.write(file.locate(), str(file))
            (record,) = [file for file in files if file.name == "RECORD"]
            wheel.writestr(str(record), "".join(f"{file},,\n" for file in files))
    return folder
