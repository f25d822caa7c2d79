"""Commands, files and options that the README and its pages name exist in the program."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.core import TyperGroup

from etude.cli.main import load
from stranger import SHORTER, Block, Failed, blocks, environment, follow, reachable, read, section, shortened, shown_in

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = """# Page

```sh
etude check a.toml     # a comment
etude run a.toml --set 'a.b="#1"'

```

```toml title="a.toml"
name = "a"   # stays
```

```text
hf download some/model
a/folder/of.yours
etude run large
```
"""
SMALL_README = """## Two commands

```
make demo     # everything
make test
```

```
mkdir made      # by hand
etude run quickstart
```

A run that learnt nothing says so and ends with exit code 3; `. .venv/bin/activate` once.

## Four ways in

| you want to | begin with | then |
|---|---|---|
| **one** | [first](one.md) | [more](two.md) |
| **two** | [second](two.md#part) | |
| **three** | [third](three.md) | |
| **four** | [first](one.md), [fourth](four.md) | |

## More
"""
SMALL_PAGES = {
    "one.md": "```sh\netude run quickstart\necho there > there\n```\n",
    "two.md": '```text title="a/file"\nthere\n```\n\n```sh\ncmp there a/file   # of page one\n```\n',
    "three.md": "```sh\nfalse\ntrue\n```\n",
    "four.md": "```sh\nsleep 60\n```\n\n```text\netude run large\n```\n",
    "Makefile": "demo:\n\t@mkdir -p .venv/bin && touch .venv/bin/activate\n",
}
OPTION = re.compile(r"--[a-z][a-z-]*")
SUBCOMMANDS = re.compile(r"[a-z]+(\|[a-z]+)*")
LOOK_AROUND = [line for block in blocks(section(README, "Look around")) for line in block.text.splitlines()]


def test_blocks_are_commands_files_and_what_is_shown() -> None:
    commands, file, shown = blocks(PAGE)
    assert commands.commands() == ["etude check a.toml", "etude run a.toml --set 'a.b=\"#1\"'"]
    assert file == Block("toml", "a.toml", 'name = "a"   # stays\n')
    assert shown.language == "text"
    assert shown_in(PAGE) == ["hf download some/model", "etude run large"]


def test_the_readme_has_four_ways_whose_pages_have_commands() -> None:
    readme = read(README)
    assert readme.first[0] == "make demo"
    assert readme.by_hand[-1] == "etude run quickstart"
    assert readme.activate == ". .venv/bin/activate"
    assert readme.nothing_learnt == 3
    assert len(readme.ways) == 4
    for pages in readme.ways.values():
        for page in pages:
            commands = [
                command
                for block in blocks((ROOT / page).read_text(encoding="utf-8"))
                if block.language == "sh" and not block.title
                for command in block.commands()
            ]
            assert commands, page


def test_a_way_that_begins_nowhere_is_refused() -> None:
    way = re.compile(r"(\| \*\*see it work\*\* \| )[^|]+")
    with pytest.raises(Failed, match="four ways"):
        read(way.sub(r"\1your first run ", README))
    with pytest.raises(Failed, match="no section 'Two commands'"):
        read(README.replace("## Two commands", "## Start"))


def test_ways_share_a_clone_and_end_where_a_command_fails_or_time_is_up(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, text in {"README.md": SMALL_README, **SMALL_PAGES}.items():
        (repository / name).write_text(text, encoding="utf-8")
    user = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "--quiet"], ["add", "."], [*user, "commit", "--quiet", "-m", "pages"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    one, two, three, four, by_hand = follow(repository, tmp_path / "strangers", 5.0, ())
    assert [ran.command for ran in one.commands] == ["make demo", "echo there > there"]
    assert one.not_run == ["make test", "etude run quickstart"]
    assert not one.failure
    assert [ran.command for ran in two.commands] == ["cmp there a/file"]
    assert two.files == ["a/file"]
    assert not two.commands[0].status
    assert three.failure.startswith("three.md: false: exit status 1")
    assert not three.commands
    assert four.failure.startswith("four.md: sleep 60: the way took too long")
    assert four.not_run == ["etude run quickstart", "etude run large"]
    assert by_hand.failure.startswith("README.md: mkdir made && etude run quickstart: exit status 127")


def test_only_runs_of_the_quickstart_are_shortened() -> None:
    assert shortened("etude run quickstart --seed 3", SHORTER).startswith("etude run quickstart --seed 3 --set ")
    assert shortened("make demo", SHORTER).startswith("make demo ARGS='--set ")
    assert shortened("etude run agent.toml", SHORTER) == "etude run agent.toml"
    assert shortened("make demo", ()) == "make demo"


def test_an_index_that_cannot_be_reached_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    command = "pip install torch==1 --index-url https://index.invalid/whl/cpu && pip install -e ."
    left = "--index-url https://index.invalid/whl/cpu: not reachable from here"
    assert reachable(command) == ("pip install torch==1 && pip install -e .", [left])
    assert reachable("pip install -e .") == ("pip install -e .", [])


def test_the_strangers_environment_has_only_the_package_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example.org/simple")
    variables = environment(tmp_path)
    assert "PYTHONPATH" not in variables
    assert variables["PIP_INDEX_URL"] == "https://packages.example.org/simple"
    assert variables["HOME"] == str(tmp_path)


@pytest.mark.parametrize("line", [line for line in LOOK_AROUND if line.startswith("etude ")])
def test_a_command_that_the_readme_lists_exists_with_its_options(line: str) -> None:
    synopsis = line.removeprefix("etude ").split("  ")[0]
    for alternative in synopsis.split(" | "):
        names, _, rest = alternative.partition(" ")
        for name in names.split("|"):
            command, below = load(name), rest.split(" ")[0]
            options = {option for each in command.params for option in each.opts}
            if isinstance(command, TyperGroup) and SUBCOMMANDS.fullmatch(below):
                options = {option for each in below.split("|") for parameter in command.commands[each].params
                           for option in parameter.opts}  # fmt: skip
            assert set(OPTION.findall(alternative)) <= options
