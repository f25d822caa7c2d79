"""The documentation site: links as in the pages, and the reference that is read from the code."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import etude
from etude.cli.main import COMMANDS
from etude.telemetry.events import Event
from etude.telemetry.metrics import METRICS
from reference_pages import pages
from site_links import ELSEWHERE, FOLDERS, pictures_of, turn_links

ROOT = Path(__file__).parents[3]
PAGES = {"index.md", "gpu.md", "page/run.png", "recipes/quickstart.md", "tutorials/first-run.md", "measured/index.md"}


@pytest.mark.parametrize(
    ("uri", "text", "turned"),
    [
        ("index.md", "[GPUs](docs/gpu.md#limits)", "[GPUs](gpu.md#limits)"),
        ("index.md", "![page](docs/page/run.png)", "![page](page/run.png)"),
        ("recipes/quickstart.md", "[GPUs](../../docs/gpu.md)", "[GPUs](../gpu.md)"),
        ("gpu.md", "[first](../recipes/quickstart/README.md)", "[first](recipes/quickstart.md)"),
        ("tutorials/first-run.md", "[home](../../README.md)", "[home](../index.md)"),
        ("gpu.md", "[below](#limits), [there](https://example.org/a.md)", "[below](#limits), [there](https://example.org/a.md)"),
        ("gpu.md", "[figures](../bench/results)", "[figures](measured/index.md)"),
        ("gpu.md", "`[GPUs](docs/gpu.md)`", "`[GPUs](docs/gpu.md)`"),
        ("gpu.md", "```\n[GPUs](docs/gpu.md)\n```\n", "```\n[GPUs](docs/gpu.md)\n```\n"),
    ],
)  # fmt: skip
def test_links_lead_to_where_the_site_has_the_page(uri: str, text: str, turned: str) -> None:
    assert turn_links(text, uri, PAGES, None) == turned


def test_a_file_that_the_site_has_not_is_linked_in_the_repository_or_not_at_all() -> None:
    text = "see [types](../src/etude/types.py)"
    assert turn_links(text, "gpu.md", PAGES, None) == "see types"
    assert turn_links(text, "gpu.md", PAGES, "https://example.org/e/") == (
        "see [types](https://example.org/e/blob/main/src/etude/types.py)"
    )


def test_pictures_beside_a_document_are_taken_along() -> None:
    assert pictures_of("recipes/a/README.md", "![x](x.svg) ![y](../../docs/y.png) `![z](z.svg)`") == ["recipes/a/x.svg"]


def test_every_document_has_a_place_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages_elsewhere = {*ELSEWHERE.values(), *FOLDERS.values(), *pages()}
    assert not {page for page in documents | pages_elsewhere if page not in navigation}


def test_the_reference_names_all_that_there_is() -> None:
    reference = pages()
    commands, python, events = (reference[f"reference/{name}.md"] for name in ("command-line", "python", "events"))
    assert not [name for name in COMMANDS if f"`etude {name}`" not in commands]
    assert "`etude weights export`" in commands
    assert not [name for name in etude.__all__ if f".{getattr(etude, name).__qualname__}\n" not in python]
    for event in get_args(Event):
        assert f"## `{event.__name__}`" in events
        assert all(f"| `{field.name}` |" in events for field in fields(event))
    assert all(f"| `{name}` |" in events for name in METRICS)
    assert not re.search(r":(?:class|meth|func):", events)
