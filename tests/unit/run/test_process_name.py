"""Names of processes: written and read back, and nothing else is one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.run.process_name import ProcessName

NAMES = st.builds(
    ProcessName,
    command=st.from_regex(r"[a-z]{1,10}", fullmatch=True),
    replica=st.integers(0, 999_999),
    region=st.from_regex(r"([a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?)?", fullmatch=True),
)


@given(NAMES, NAMES)
def test_a_name_is_read_back_and_no_two_are_written_alike(one: ProcessName, other: ProcessName) -> None:
    assert ProcessName.parse(str(one)) == one
    assert (str(one) == str(other)) == (one == other)


def test_a_first_process_at_home_has_the_name_of_its_command() -> None:
    assert str(ProcessName(command="serve")) == "serve"
    assert str(ProcessName(command="serve", replica=1, region="eu-west")) == "serve-1@eu-west"


@pytest.mark.parametrize("text", ["", "serve-0", "serve-01", "Serve", "serve@", "serve/1", "../serve", "serve-1@a_b"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a valid process name"):
        ProcessName.parse(text)


@pytest.mark.parametrize(
    "parts", [{"command": "a-b"}, {"command": "serve", "replica": -1}, {"command": "serve", "region": "-"}]
)
def test_a_name_has_only_parts_that_can_be_read_back(parts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be named"):
        ProcessName(**parts)  # type: ignore[arg-type]  # what hypothesis would never build
