"""Artefacts copied to the grader's sandbox: only the agent's files, and none in the grader's own folders."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rewards.graders.artefacts import Carried, Ground, carry
from etude.sandboxes.images.archives import Entry, EntryKind

GROUND = Ground.of(["tests/unit/test_a.py", "pkg/test_b.py"], ["python3", "-m", "pytest", "./run.sh"])


def file(name: str, text: str = "") -> Entry:
    return Entry(name=name, kind=EntryKind.FILE, data=text.encode())


def folder(name: str) -> Entry:
    return Entry(name=name, kind=EntryKind.FOLDER)


def link(name: str, target: str) -> Entry:
    return Entry(name=name, kind=EntryKind.LINK, target=target)


def carried(original: Iterable[Entry], agents: Iterable[Entry]) -> Carried:
    return carry(original, agents, GROUND)


@pytest.mark.parametrize(
    "name",
    [
        *("conftest.py", "pkg/conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "pytest.toml"),
        *("sitecustomize.py", "src/usercustomize/__init__.py", "pytest.py", "pytest/__main__.py", "a/_pytest/b.py"),
        *("a.pyc", "a/__pycache__/b.py", "native.so", "native.cpython-311-x86_64-linux-gnu.so", "x.so.1", "evil.pth"),
        *(
            "x.dist-info/entry_points.txt",
            "x.egg-info/PKG-INFO",
            "x.egg-link",
            "tests/helper.py",
            "tests/unit/data.txt",
        ),
        *("pkg/test_b.py", "pkg/test_b.py/inner", "run.sh", "tests"),
    ],
)
def test_the_graders_ground(name: str) -> None:
    assert GROUND.holds(name)
    assert carried([], [file(name, "x")]) == Carried(entries=(), removed=(), left=(name,))
    before = [file(name, "before")]
    assert carried(before, [file(name, "after")]) == Carried(entries=(), removed=(), left=(name,))
    assert carried(before, before) == Carried(entries=(), removed=(), left=())
    assert carried(before, []).removed == ()


@pytest.mark.parametrize(
    "name",
    [
        *("pkg/mod.py", "pkg/tests/mod.py", "test/client.py", "conftest/mod.txt", "setup.py", "pytest.md", "a.pyx"),
        *("pyproject.toml.bak", "also.soft", "pytest_helper.py", "pkg/test_c.py", "__main__.py", "json.py"),
    ],
)
def test_what_is_the_agents(name: str) -> None:
    assert not GROUND.holds(name)
    assert carried([file(name, "before")], [file(name, "after")]).entries == (file(name, "after"),)
    assert carried([file(name, "before")], []).removed == (name,)


@pytest.mark.parametrize(
    ("name", "target", "is_carried"),
    [
        ("a", "b", True),
        ("a/b", "../c", True),
        ("a/b", "../../c", False),
        ("a", "..", False),
        ("a", "/etc/passwd", False),
        ("a", "b/../../c", False),
        ("a", "..b", True),
    ],
)
def test_links_that_lead_out_are_left(name: str, target: str, is_carried: bool) -> None:
    result = carried([], [link(name, target)])
    assert (len(result.entries), result.left) == ((1, ()) if is_carried else (0, (name,)))


def test_nothing_is_in_the_way_of_a_hidden_test() -> None:
    assert carried([folder("pkg")], [link("pkg", "mine")]) == Carried(entries=(), removed=(), left=("pkg",))
    assert carried([folder("pkg")], [file("pkg")]).entries == ()
    assert carried([folder("pkg")], [folder("pkg")]).entries == (folder("pkg"),)


def test_what_became_something_else_is_removed_first() -> None:
    original = [folder("a"), file("a/b"), file("c"), folder("d"), file("d/conftest.py"), file("d/e")]
    agents = [file("a", "now a file"), folder("c"), file("c/d")]
    result = carried(original, agents)
    assert result.removed == ("a", "a/b", "c", "d/e")
    assert {entry.name for entry in result.entries} == {"a", "c", "c/d"}


NAMES = st.lists(
    st.sampled_from(["a", "b", "tests", "test_a.py", "unit", "conftest.py", "x.pyc"]), min_size=1, max_size=3
).map("/".join)
TREES = st.dictionaries(NAMES, st.sampled_from(["one", "two"]), max_size=6).map(
    lambda tree: [file(name, text) for name, text in tree.items()]
)


@given(TREES, TREES)
def test_in_the_end_the_ground_is_as_it_was_and_the_rest_is_the_agents(
    original: list[Entry], agents: list[Entry]
) -> None:
    result = carried(original, agents)
    sandbox = {entry.name: entry for entry in original if entry.name not in result.removed}
    sandbox |= {entry.name: entry for entry in result.entries}
    for name in {entry.name for entry in (*original, *agents)}:
        mine = original if GROUND.holds(name) or name in GROUND.ancestors else agents
        if name in GROUND.ancestors:
            continue  # a file where a folder of the tests has to be
        assert sandbox.get(name) == next((entry for entry in mine if entry.name == name), None)
