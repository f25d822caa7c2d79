"""The suite in ``suites/pypi``: its records match its page, and a few tasks are rebuilt from them and proved."""

import threading
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path

import pytest

from etude.cli.actions.build_suite import in_use
from etude.cli.main import main
from etude.config.suite import SUITE_FILE
from etude.dashboard.suite_results import read_results
from etude.sandboxes.images.store import ImageStore
from etude.taskgen.history.progress import read_progress
from etude.taskgen.history.records import HistoryRecord, id_of, read_records, write_records
from etude.tasks.suites import read_retired, suite_of

REPOSITORY = Path(__file__).parents[2]
SUITE = REPOSITORY / "suites" / "pypi"
PERMISSIVE = {"MIT", "MIT License", "BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "Apache Software License"}
"""Licences of what may be in it, as projects state them."""
BYTES = 2 << 20
"""Most that all of its files may come to."""
MADE_AGAIN = ("funcy", 3)
"""Package of which so many tasks are made again: its tests take a second."""


@pytest.fixture(scope="module")
def records() -> list[HistoryRecord]:
    return read_records(SUITE)


def rows(records: Sequence[HistoryRecord]) -> list[str]:
    """The table of its page: a row for each package, and one for all."""
    ordered = sorted(records, key=lambda each: each.package)
    parts = [(name, list(each)) for name, each in groupby(ordered, key=lambda each: each.package)]
    return [_row(name, each) for name, each in [*parts, ("all", list(records))]]


def _row(name: str, records: Sequence[HistoryRecord]) -> str:
    levels = Counter(each.difficulty for each in records)
    releases = len({(each.source, each.after) for each in records})
    licences = ", ".join(sorted({each.licence.removesuffix(" License") for each in records}))
    behaviours = len({each.template for each in records})
    counts = [len(records), behaviours, *(levels[level] for level in ("easy", "medium", "hard"))]
    return f"| {name} | {licences} | {releases} | " + " | ".join(map(str, counts)) + " |"


def test_its_page_says_what_is_in_it() -> None:
    page = (SUITE / "README.md").read_text(encoding="utf-8")
    assert [row for row in rows(in_use(SUITE)) if row not in page] == []


def test_its_records_are_whole(records: Sequence[HistoryRecord]) -> None:
    assert len({each.package for each in records}) >= 5
    assert read_retired(SUITE).keys() <= {each.task_id for each in records}
    assert len({each.template for each in records}) >= 20
    assert len({each.task_id for each in records}) == len(records)
    assert {each.licence for each in records} <= PERMISSIVE
    assert {each.canary for each in records} == {suite_of(SUITE).canary}
    for each in records:
        assert each.task_id == id_of(each.package, each.before, each.after, each.about)
        assert each.about
        assert not set(each.about) & set(each.others)
        assert each.template == f"{each.package}:{_module(each)}:{each.name}"
        assert each.name in each.prompt


def _module(record: HistoryRecord) -> str:
    path = Path(record.path.removeprefix("src/")).with_suffix("")
    return ".".join(path.parent.parts if path.name == "__init__" else path.parts)


def test_each_history_says_what_its_tasks_were_proved_with(records: Sequence[HistoryRecord]) -> None:
    progress = read_progress(SUITE)
    assert progress.keys() >= {each.source for each in records}  # more: histories that made no task
    assert {each.base for each in progress.values()} == {"debian"}
    for package in {each.package for each in records}:
        pins = (SUITE / package / "requirements.txt").read_text().split()
        assert all(pin.count("==") == 1 for pin in pins)
        assert any(pin.startswith("pytest==") for pin in pins)


def test_it_is_small_and_has_no_code_of_others() -> None:
    ignored = {"images", "archives", "tasks", "answers"}
    files = [file for file in SUITE.rglob("*") if file.is_file() and ignored.isdisjoint(file.relative_to(SUITE).parts)]
    assert sum(file.stat().st_size for file in files) < BYTES
    assert not [file.name for file in files if file.suffix == ".py"]
    assert tomllib.loads((SUITE / SUITE_FILE).read_text())["name"] == SUITE.name


@pytest.mark.heavy(
    "the base system debian (etude images build debian), an index of packages, and minutes",
    missing="debian" not in ImageStore().bases,
)
def test_tasks_that_are_made_again_are_solved_by_the_true_change_alone(
    records: Sequence[HistoryRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, count = MADE_AGAIN
    copy = tmp_path / "copy"
    (copy / package).mkdir(parents=True)
    for name in (SUITE_FILE, "histories.json", f"{package}/requirements.txt"):
        (copy / name).write_bytes((SUITE / name).read_bytes())
    write_records(copy, [each for each in records if each.package == package][:count])
    assert main(["suite", "fetch", str(copy)]) == 0
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "suites"))
    scripted, oracle = import_module("scripted"), import_module("oracle")
    for name, reply, passes in (("oracle", oracle.Oracle(copy).reply, True), ("scripted", scripted.reply, False)):
        server = scripted.serve(0, reply)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/v1"
            assert main(["suite", "run", str(copy), "--url", url, "--model", name, "--out", str(tmp_path / name)]) == 0
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
        assert [each.passed for each in read_results(tmp_path / name).tries] == [passes] * count
