"""A task's record is read back as written, for every kind of check, and damage is detected."""

import json
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import DamagedError
from etude.ledger.records import QUOTED, decode_observed, decode_task, encode_observed, encode_task, template_of
from etude.sandbox_spec import EnvironmentSpec, SandboxLimits, Service, ServiceKind
from etude.types import (
    Case,
    FunctionChecks,
    Json,
    Observation,
    ObservedSession,
    Probe,
    Query,
    QueryChecks,
    ScriptChecks,
    Split,
    Task,
    TestChecks,
)

JSON: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TEXT = st.text(max_size=20)
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
FILES = st.dictionaries(TEXT, TEXT, max_size=3)
ROW = st.lists(JSON, max_size=3).map(tuple)
CASES = st.lists(st.builds(Case, arguments=ROW, expected=JSON), max_size=3).map(tuple)
QUERIES = st.builds(Query, sql=TEXT, rows=st.lists(ROW, max_size=3).map(tuple), setup=TEXT, fails_with=TEXT)
PROBES = st.lists(st.builds(Probe, module=TEXT, function=TEXT, cases=CASES), max_size=2).map(tuple)
CHECKS = st.one_of(
    st.builds(FunctionChecks, path=TEXT, function=TEXT, visible=CASES, hidden=CASES.filter(len)),
    st.builds(
        TestChecks,
        files=FILES,
        must_pass=TEXTS.filter(len),
        about=st.just(1),
        artefacts=TEXTS,
        command=TEXTS,
        probes=PROBES,
    ),
    st.builds(
        ScriptChecks, files=FILES, command=TEXTS, artefacts=TEXTS, environment=FILES, timeout_s=st.floats(1, 1e6)
    ),
    st.builds(QueryChecks, path=TEXT, queries=st.lists(QUERIES, min_size=1, max_size=3).map(tuple)),
)
ENVIRONMENTS = st.builds(
    EnvironmentSpec,
    image=TEXT,
    services=st.lists(st.builds(Service, kind=st.sampled_from(ServiceKind), setup=TEXT), max_size=2).map(tuple),
    allow=TEXTS,
    variables=FILES,
    limits=st.builds(SandboxLimits, memory_bytes=st.integers(1, 1 << 40), cpus=st.floats(0.1, 64)),
)
TASKS = st.builds(
    Task,
    task_id=TEXT,
    family=TEXT,
    template=TEXT,
    split=st.sampled_from(Split),
    prompt=TEXT,
    files=FILES,
    checks=CHECKS,
    environment=st.none() | ENVIRONMENTS,
)


@settings(deadline=None, max_examples=200)
@given(TASKS)
def test_a_task_survives_its_record(task: Task) -> None:
    record = encode_task(task)
    assert decode_task(record) == task
    assert template_of(record) == task.template


@settings(deadline=None, max_examples=50)
@given(TASKS, st.data())
def test_a_record_that_says_something_else_is_damaged(task: Task, data: st.DataObject) -> None:
    fields = json.loads(encode_task(task))
    name = data.draw(st.sampled_from(["task_id", "family", "template", "split", "prompt", "files", "checks"]))
    wrong = data.draw(st.sampled_from((7, None, ["x"], {"kind": 7}, {"kind": "FunctionChecks", "surplus": 1})))
    with pytest.raises(DamagedError, match="unreadable task record"):
        decode_task(json.dumps(fields | {name: wrong}).encode())


SESSIONS = st.builds(
    ObservedSession,
    session_id=TEXT,
    observation=st.builds(
        Observation,
        user=TEXT,
        day=st.integers(0, 9),
        template=TEXT,
        arm=TEXT,
        prompt_tokens=st.integers(0, 99),
        weight=st.floats(0.1, 1),
    ),
    ended_at=st.floats(0, 1e9),
    sampled_tokens=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    answers=st.dictionaries(TEXT, st.lists(st.none() | st.floats(0, 1), max_size=2).map(tuple), max_size=2),
    reward=st.floats(-1, 1),
)


@given(SESSIONS)
def test_a_session_survives_its_record_and_a_cut_one_is_damaged(session: ObservedSession) -> None:
    record = encode_observed(session)
    assert decode_observed(record) == session
    with pytest.raises(DamagedError, match="unreadable session record"):
        decode_observed(record[:-1])


def a_task(**fields: Any) -> Task:
    facts = {"task_id": "a", "family": "f", "template": "t", "split": Split.TRAIN, "prompt": "p", "files": {}}
    checks = FunctionChecks(path="p", function="f", visible=(), hidden=(Case(arguments=(), expected=0),))
    return Task(**facts | {"checks": checks} | fields)


def test_the_template_is_found_among_texts_and_names_that_look_like_it() -> None:
    mark = '"template": "other", "'
    task = a_task(task_id=mark, family=mark, template=f'", "{mark}', files={"template": "other"}, prompt=mark)
    assert template_of(encode_task(task)) == task.template


def test_mappings_may_be_read_only_and_whole_numbers_floats() -> None:
    checks = ScriptChecks(files=MappingProxyType({"a": "b"}), timeout_s=60)
    task = a_task(files=MappingProxyType({"a": "b"}), checks=checks)
    assert decode_task(encode_task(task)) == task


def test_a_record_without_a_template_is_damaged() -> None:
    with pytest.raises(DamagedError, match="it has no template"):
        template_of(b'{"task_id": "a"}')


def test_an_error_quotes_the_beginning_of_a_long_record() -> None:
    for read in (template_of, decode_task):
        with pytest.raises(DamagedError) as caught:
            read(b"x" * 10_000)
        assert QUOTED <= str(caught.value).count("x") < 2 * QUOTED


def test_an_error_names_unknown_fields_and_values_of_a_wrong_type() -> None:
    with pytest.raises(DamagedError, match="Task has no five, four, one, three, two"):
        decode_task(json.dumps({"task_id": "a"} | dict.fromkeys(["one", "two", "three", "four", "five"], 1)).encode())
    with pytest.raises(DamagedError, match="'7' is no str"):
        decode_task(b'{"task_id": 7}')
    with pytest.raises(DamagedError, match="'NoChecks'"):
        decode_task(b'{"checks": {"kind": "NoChecks"}}')
