"""Allowed places of a ledger, and what is never written down about it."""

import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import RunFolderError
from etude.ledger.open import SCHEMA, is_url, open_database, place_of_run, public

SERVER = "postgresql://me@db.example:5432/runs"


def test_a_path_is_a_file_and_a_url_a_server() -> None:
    assert [is_url(place) for place in (Path("a/ledger.db"), "a/ledger.db", SERVER, "postgres://db/x")] == [
        *(False, False),
        *(True, True),
    ]


def test_every_run_gets_a_schema_of_its_own_that_people_can_find() -> None:
    one, other = (place_of_run(SERVER, "Quick-start! " * 9) for _ in range(2))
    assert one != other
    for place in (one, other):
        server, _, schema = place.partition("#")
        assert server == SERVER
        assert SCHEMA.fullmatch(schema)
        assert schema.startswith("etude_quick_start_")


@pytest.mark.parametrize("fragment", ["", "#", "#Upper", "#a-b", "#a;drop", "#" + "a" * 64])
def test_a_url_without_a_sound_schema_is_refused(fragment: str) -> None:
    with pytest.raises(RunFolderError, match="names no schema"):
        open_database(SERVER + fragment, retry_timeout_s=1.0)


def test_what_is_said_of_a_server_has_no_secrets() -> None:
    assert public("postgresql://me:s3cret@db:1/runs?password=s3cret") == "postgresql://db:1/runs"
    assert public("postgresql:///app?user=me&host=/run") == "postgresql:///app"


def test_without_the_client_library_its_name_and_the_command_are_told() -> None:
    script = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from etude.errors import ConfigError\nfrom etude.ledger.open import open_database\n"
        f"try: open_database({SERVER + '#a'!r}, retry_timeout_s=1.0)\n"
        "except ConfigError as error: print(error)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install -e '.[postgres]'" in output.stdout
