"""The PostgreSQL client in grading sandboxes: every answer is in time, bounded, and JSON, for any server output."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from databases import temporary_postgres
from etude.rewards.graders.postgres_client import LATE, LOST, ROWS_BYTES, QueryStep, answer
from etude.rewards.graders.queries import PINNED


@pytest.fixture(scope="module")
def server(postgresql: None) -> Iterator[Path]:
    with temporary_postgres() as folder:
        yield folder


@pytest.mark.parametrize(
    "script", ["SELECT pg_sleep(60)", "DO 'BEGIN LOOP END LOOP; END'", "SET statement_timeout = 0"]
)
def test_a_script_that_hangs_is_given_up(server: Path, script: str) -> None:
    late = answer(str(server), _step(script + "; SELECT pg_sleep(60)", timeout_s=0.3))
    assert late["state"] == LATE


def test_output_without_end_is_thrown_away(server: Path) -> None:
    answered = answer(str(server), _step("SELECT repeat('x', 1000) FROM generate_series(1, 20000)", timeout_s=30.0))
    assert answered["cut"]
    assert sum(len(row[0]) for row in answered["rows"]) < ROWS_BYTES
    assert answer(str(server), _step("SELECT repeat('x', 9000000)", timeout_s=30.0))["cut"]


def test_values_are_those_of_json(server: Path) -> None:
    sql = """SELECT 1, 2::bigint, 1.50::numeric, 0.5::float8, 'NaN'::float8, true, NULL, 'é"', '{"a": [1]}'::jsonb,
        date '2024-02-29', timestamptz '2024-02-29 12:00:00.5+02', '{1,2}'::int[], '\\x00ff'::bytea"""
    assert answer(str(server), _step(sql))["rows"] == [
        [
            1,
            2,
            "1.50",
            0.5,
            "NaN",
            True,
            None,
            'é"',
            {"a": [1]},
            "2024-02-29",
            "2024-02-29 10:00:00.5+00",
            "{1,2}",
            r"\x00ff",
        ]
    ]


def test_a_document_too_deep_for_this_side_is_a_wrong_answer(server: Path) -> None:
    deep = answer(str(server), _step("SELECT (repeat('[', 6000) || repeat(']', 6000))::json"))
    assert deep["state"] in (LOST, "54001")


def test_a_server_that_is_not_there_is_lost(tmp_path: Path) -> None:
    assert answer(str(tmp_path), _step("SELECT 1"))["state"] == LOST


def _step(script: str, *, timeout_s: float = 10.0) -> QueryStep:
    return {
        "user": "app",
        "database": "app",
        "settings": PINNED,
        "scripts": [script],
        "timeout_s": timeout_s,
        "vital": True,
    }
