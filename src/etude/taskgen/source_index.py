"""Script that lists or fetches source distributions of a project on pip's indexes, without executing any of them.

    source_index.py list NAME                          prints the versions, newest first, one per line
    source_index.py fetch NAME FOLDER VERSION...       writes FOLDER/VERSION/ARCHIVE for each available version

``pip download`` runs a project's build program for its metadata and first installs what that program needs: this takes
a minute on a busy machine, executes the fetched code, and fails on old releases. This script only fetches the archive
and compares its digest with the index. Indexes, proxies, certificates and passwords come from pip's settings, since the
script uses pip's own finder and session. Imports nothing from étude, and pip only when it runs as a script.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BYTES = 256 << 20
"""Maximum size of a fetched archive."""


class SourceIndex:
    """The source distributions of one project, by version."""

    def __init__(self, command: Any, name: str) -> None:
        """``command`` is pip's ``download`` command, within its main context."""
        options, _ = command.parse_args(["--no-binary", name, name])
        self._session = command.get_default_session(options)
        finder = command._build_package_finder(options, self._session, ignore_requires_python=True)
        candidates = sorted(finder.find_all_candidates(name), key=lambda each: each.version, reverse=True)
        self.links = {each.version: each.link for each in candidates if not each.link.is_yanked}

    def fetch(self, version: Any, folder: Path) -> str:
        """Write the archive of a version into a new folder; return the reason for a failure, or an empty string."""
        link = self.links.get(version)
        if link is None:
            return "no index has its source"
        answer = self._session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"}, stream=True)
        if answer.status_code != 200:
            return f"{link.url_without_fragment} answered {answer.status_code}"
        data = answer.raw.read(BYTES + 1)
        if len(data) > BYTES:
            return f"{link.filename} has more than {BYTES} bytes"
        if link.hash_name and hashlib.new(link.hash_name, data).hexdigest() != link.hash:
            return f"{link.filename} has another {link.hash_name} than the index says"
        incoming = folder.with_name(f".{folder.name}")
        incoming.mkdir(parents=True, exist_ok=True)
        (incoming / link.filename).write_bytes(data)
        incoming.rename(folder)
        return ""


def main(arguments: Sequence[str]) -> int:
    """List or fetch; the exit status is 1 if the index fails or a version is unavailable."""
    from pip._internal.commands import create_command
    from pip._internal.exceptions import PipError
    from pip._vendor.packaging.version import Version
    from pip._vendor.requests.exceptions import RequestException

    verb, name, *places = arguments
    command = create_command("download")
    status = 0
    with command.main_context():
        try:
            index = SourceIndex(command, name)
        except (PipError, RequestException) as error:
            sys.stderr.write(f"{name}: {error}\n")
            return 1
        if verb == "list":
            sys.stdout.writelines(f"{version}\n" for version in index.links)
        for version in places[1:]:
            try:
                failure = index.fetch(Version(version), Path(places[0]) / version)
            except (RequestException, OSError) as error:
                failure = str(error)
            if failure:
                sys.stderr.write(f"{name}=={version}: {failure}\n")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
