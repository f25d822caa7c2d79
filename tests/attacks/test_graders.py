"""Attacks of an agent on the parts that decide its reward: the grader of database migrations, and judges.

Hidden tests, probes and canaries are attacked by ``python -m bench grading``; many more migrations are in
``test_queries.py``, and texts that instruct a judge in ``test_injection.py``.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from databases import ask, temporary_postgres, verdict
from etude.rewards.graders.queries import MigrationResult, judge
from etude.rewards.judge.prompts import BAR, guarded, spelled
from etude.tasks.migrations.family import migration_task
from etude.tasks.migrations.tables import unique
from etude.types import Query, QueryChecks, Split

EMAILS = unique("oldest", Random(3))
PEOPLE, NOTES = EMAILS.seen
LIAR = f"""
CREATE FUNCTION public.f(address text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
    IF EXISTS (SELECT FROM public.{PEOPLE} p WHERE p.email = address) THEN RAISE unique_violation; END IF;
    RETURN true;
END $$;
"""
FAKES = {
    "a check that raises the right error": f"ALTER TABLE {PEOPLE} ADD CHECK (public.f(email)) NOT VALID;",
    "a type that raises the right error": "CREATE DOMAIN public.address AS text CHECK (public.f(VALUE));"
    f"ALTER TABLE {PEOPLE} ALTER email TYPE public.address;",
    "an index of something else": f"CREATE UNIQUE INDEX ON {PEOPLE} ((email || id));",
    "an index of some rows": f"CREATE UNIQUE INDEX ON {PEOPLE} (email) WHERE id < 0;",
    "an index that failed": f"CREATE UNIQUE INDEX ON {PEOPLE} (email); UPDATE pg_index SET indisvalid = true;",
}


@pytest.fixture(scope="module")
def server(postgresql: None) -> Iterator[Path]:
    with temporary_postgres() as folder:
        yield folder


@pytest.mark.parametrize("fake", FAKES.values(), ids=FAKES)
def test_to_be_paid_for_a_constraint_that_is_none(server: Path, fake: str) -> None:
    task = migration_task(EMAILS, "x", Split.TRAIN)
    assert task.environment is not None
    assert isinstance(task.checks, QueryChecks)
    ask(server, "ALTER DATABASE app CONNECTION LIMIT -1", database="postgres")
    result = verdict(server, task.environment.services[0].setup, task.checks, EMAILS.mistakes[1] + LIAR + fake)
    assert not result.applied or result.right < len(EMAILS.queries)


def _answer(state: str = "", rows: list[Any] | None = None) -> dict[str, Any]:
    return {"state": state, "message": "", "rows": rows or [], "cut": False, "open": False, "done": 2}


@pytest.mark.parametrize("state", ["53100", "53200", "53300", "57014", "42501", "late"])
def test_to_turn_a_wrong_migration_into_a_failure_of_the_machine(state: str) -> None:
    """A database error after the migration, such as a full disk, makes the migration wrong, and is not retried."""
    checks = QueryChecks(path="m.sql", queries=(Query(sql="SELECT 1", rows=((1,),)),), unseen="")
    assert judge(checks, [_answer(), _answer(state), _answer(rows=[[1]])]) == MigrationResult(False, 0, True)


MARKERS = (
    "<|im_end|>",
    "<|im_start|>system",
    "</s>",
    "<s>",
    "[INST]",
    "[/INST]",
    "[gMASK]",
    "<start_of_turn>",
    "<<SYS>>",
)


def test_to_have_a_cut_make_a_role_marker_of_a_text() -> None:
    """No limit on a judge's input, wherever it truncates a text, leaves a role marker inside the guarded part."""
    text = "\n".join(f"a{marker}b<{marker}[{marker}" for marker in MARKERS)
    mark = "0123456789abcdef" * 2
    for limit in range(len(spelled(text)) + 1):
        fence = guarded(text, "work", mark, limit)
        inside = fence.removeprefix(f"<<< {mark} work\n").removesuffix(f"\n>>> {mark} work")
        assert all(marker not in inside for marker in MARKERS), limit
        assert all(line.startswith((BAR, "(")) for line in inside.split("\n")), limit
