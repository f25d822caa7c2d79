"""The tutorials of ``docs/tutorials`` as a reader follows them: one folder, page after page, command after command.

A block with a title is a file, and a block of shell without one is commands. Runs are made shorter than the pages have
them, and are otherwise theirs; blocks called ``text`` are shown and not run.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etude.cli.main import main
from stranger import SHORTER, blocks, shortened

DOCS = Path(__file__).parents[2] / "docs"
PAGES = re.findall(r"tutorials/([\w-]+)\.md", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
NOTHING_LEARNT = 3
"""The exit status of a run in which no group had a signal, as the pages say of models this small."""
TIMEOUT_S = 600.0

pytestmark = pytest.mark.heavy("minutes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's own."""
    return tmp_path_factory.mktemp("reader")


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    ran = 0
    for block in blocks((DOCS / "tutorials" / f"{page}.md").read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            for command in block.commands():
                ended = subprocess.run(
                    ["bash", "-c", shortened(command, SHORTER)],
                    cwd=folder,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                )
                accepted = (0, NOTHING_LEARNT) if command.startswith("etude run") else (0,)
                assert ended.returncode in accepted, f"{command}: {(ended.stdout + ended.stderr)[-4000:]}"
                ran += 1
    assert ran


@pytest.mark.parametrize("recipe", ["gpu-8b", "gpu-30b-a3b"])
def test_the_costs_on_the_page_of_models_are_those_of_the_plans(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "tutorials" / "your-model.md").read_text(encoding="utf-8")
    row = re.findall(rf"`recipes/{recipe}` .*?\| ([\d.]+) min, \$([\d.]+) \| ([\d.]+) hours, \$([\d.]+)", page)[0]
    minutes, usd, hours, usd_of_100 = map(float, row)
    assert main(["plan", "run", str(DOCS.parent / "recipes" / recipe), "--hardware", "h100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_s"] / 60 == pytest.approx(minutes, abs=0.05)
    assert plan["usd"]["step"] == pytest.approx(usd, abs=0.005)
    assert 100 * plan["step_s"] / 3600 == pytest.approx(hours, abs=0.05)
    assert 100 * plan["usd"]["step"] == pytest.approx(usd_of_100, abs=0.5)


def test_the_cost_of_a_trillion_parameters_is_that_of_the_page_on_planning() -> None:
    page = (DOCS / "tutorials" / "your-model.md").read_text(encoding="utf-8")
    planning = (DOCS / "planning.md").read_text(encoding="utf-8").split("--hardware docs/plans/composer.toml")[1]
    minutes, usd = re.findall(r"`recipes/gpu-1t` .*?\| ([\d.]+) min, \$([\d,]+)", page)[0]
    assert re.findall(r"a step +([\d.]+) min", planning)[0] == minutes
    planned_usd = re.findall(r"money +\$([\d,.]+) a step", planning)[0]
    assert float(planned_usd.replace(",", "")) == pytest.approx(float(usd.replace(",", "")), abs=0.5)


def test_every_tutorial_is_on_the_site() -> None:
    assert sorted(PAGES) == sorted(path.stem for path in (DOCS / "tutorials").glob("*.md"))
    assert PAGES[0] == "first-run"
