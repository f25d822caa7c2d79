"""Every reader of foreign bytes gives a result or one of its own errors: a short run of `python -m tests.fuzz`."""

import signal
from random import Random

import pytest

from tests.fuzz.fuzzing import Target, fuzz
from tests.fuzz.mutation import mutate
from tests.fuzz.targets import HERE, TARGETS, seeds_of

EXECUTIONS = 250
"""Of each target, in a second or so; the same for every change."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_ends_as_its_docstring_says(name: str) -> None:
    seeds = seeds_of(name)
    begun = fuzz(TARGETS[name], seeds, 0)
    assert begun.accepted, "no input of the corpus gets through"
    run = fuzz(TARGETS[name], seeds, EXECUTIONS)
    assert [finding.fault for finding in run.findings.values()] == []


def test_every_folder_of_the_corpus_is_a_targets() -> None:
    assert {place.name for place in (HERE / "corpus").iterdir()} <= {name.replace(" ", "-") for name in TARGETS}


def test_an_error_of_another_kind_is_a_finding_once_for_each_place() -> None:
    def read(data: bytes) -> int:
        if data.startswith(b"["):
            raise KeyError(0)
        return int(data)

    run = fuzz(Target(read=read, errors=(ValueError,)), [b"1", b"[1]"], 300)
    assert [finding.fault.partition(" ")[0] for finding in run.findings.values()] == ["KeyError"]
    assert 0 < run.accepted < run.executions == 302


def test_an_input_that_ends_the_process_is_a_finding_and_not_the_end() -> None:
    def read(data: bytes) -> int:
        if data.startswith(b"["):
            signal.raise_signal(signal.SIGKILL)
        return int(data)

    run = fuzz(Target(read=read, errors=(ValueError,), native=True), [b"1", b"[1]", b"[2]", b"2"], 20)
    assert [(finding.data, finding.fault) for finding in run.findings.values()] == [
        (b"[1]", f"its process ends with {-signal.SIGKILL}")
    ]
    assert run.accepted >= 2
    assert run.executions == 24


def test_the_same_seed_makes_the_same_inputs() -> None:
    pool = [b'{"a": [1, {"b": "c"}]}', b'a = 1\nb = ["c"]\n']
    first, again, other = ([mutate(random, pool) for _ in range(200)] for random in (Random(1), Random(1), Random(2)))
    assert first == again != other
    assert len(set(first)) > 150
