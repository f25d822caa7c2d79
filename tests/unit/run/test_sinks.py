"""The sink process of a run: errors before the start, what it sends, and that no other process waits for it."""

import re
import shutil
import time
import tomllib
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.run import sinks
from etude.run.folder import RunFolder
from etude.run.sinks import SinksProcess, check_log, feed_sinks, run_sinks
from etude.run.working_folder import WORK_VARIABLE, create_run, open_run_folder
from etude.telemetry.log import EventReader
from etude.telemetry.tail import EventTail
from run_events import small_run, write

PAGE = Path(__file__).parents[3] / "docs" / "trackers.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def config(**changes: object) -> RunConfig:
    return parse_config(changes, source="here")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_page_are_recipes(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_ALERT_URL", "https://example.com/hook")
    monkeypatch.setattr(sinks, "PACKAGES", {})
    whole = config(**tomllib.loads(example))
    assert whole.log.to or whole.alerts
    check_log(whole)


def test_a_sink_whose_package_is_missing_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "PACKAGES", {"wandb": "wandb_that_is_not_here"})
    with pytest.raises(ConfigError, match=r"log\.to = 'wandb' needs .* pip install 'etude\[wandb\]'"):
        check_log(config(log={"to": ["wandb"]}))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"when": "k9 > 1"}, r"watches 'k9', which does not exist: choose one of no_signal, decline, mismatch"),
        ({"when": "cost > 1"}, r"would never fire: only a judge"),
        ({"when": "k3 > 1", "to": ["webhook"], "webhook": "$NOWHERE"}, r"\$NOWHERE.*no such environment variable"),
        ({"when": "k3 over 1"}, r"'k3 over 1' is not a condition: expected such as 'mismatch > 0\.001'"),
        ({"when": "k3 > 1 for 2 hours"}, r"is not a condition"),
        ({"when": "k3 > 1", "to": ["webhook"]}, r"go together"),
        ({"when": "k3 > 1", "to": ["webhook"], "webhook": "example.com"}, r"not a URL"),
    ],
)
def test_an_alert_that_cannot_work_is_refused(rule: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_log(config(alerts=[{"name": "one", **rule}]))


@pytest.mark.parametrize(
    "url", ["example.com/hook", "https://example.com/a b", "https://example.com/secret\n", "http://"]
)
def test_an_alert_whose_variable_has_no_url_is_refused_without_its_value(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", url)
    rule = {"name": "one", "when": "k3 > 1", "to": ["webhook"], "webhook": "$HOOK"}
    with pytest.raises(ConfigError, match=r"webhook = '\$HOOK', and it is not a URL") as refused:
        check_log(config(alerts=[rule]))
    assert url not in str(refused.value)
    folder = RunFolder.create(tmp_path / "run", config(alerts=[rule]))
    with pytest.raises(ConfigError, match="not a URL"):
        run_sinks(folder)


def test_each_sink_and_each_rule_has_one_name() -> None:
    with pytest.raises(ConfigError, match=r"log\.to names 'wandb' twice"):
        config(log={"to": ["wandb", {"kind": "wandb"}]})
    with pytest.raises(ConfigError, match=r"two rules named 'a'"):
        config(alerts=[{"name": "a", "when": "k3 > 1"}, {"name": "a", "when": "k3 > 2"}])


def test_what_was_not_sent_is_sent_once_and_then_it_ends(tmp_path: Path) -> None:
    to = [{"kind": "jsonl", "options": {"folder": str(tmp_path / "far")}}, "tensorboard"]
    folder = RunFolder.create(tmp_path / "run", config(name="tiny", log={"to": to}))
    folder.report_html.write_text("<html>")
    write(folder.events, list(small_run(2)))
    ending = Event()
    ending.set()
    for _ in range(2):
        assert feed_sinks(folder, ending, closing_s=None)
    (lines,) = [file.read_bytes().splitlines() for file in (tmp_path / "far").iterdir()]
    assert len(lines) == len(list(small_run(2)))
    assert (folder.path / "tensorboard" / "report.html").is_file()
    assert EventReader(folder.events, "sinks").new() == []


def test_positions_are_brought_by_the_sinks_alone_and_never_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: whoever opened a run by its URL put stored positions back, and trackers got everything twice."""
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "here"))
    far = {"kind": "jsonl", "options": {"folder": str(tmp_path / "far")}}
    recipe = config(name="tiny", log={"to": [far]}, ledger={"url": "postgresql:///app"})
    folder = create_run(str(tmp_path / "url"), recipe)
    events, ending = list(small_run(2)), Event()
    ending.set()

    write(folder.events, events)
    assert feed_sinks(folder, ending, closing_s=None)
    position = folder.path / "sinks" / "jsonl.json"
    with closing(EventTail(folder.events, position)) as tail:  # sinks at work, which copy their positions later
        tail.put("more.jsonl", 5000)
    ahead = position.read_text()
    open_run_folder(folder.url, writes=False)
    assert position.read_text() == ahead
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "elsewhere"))
    other = open_run_folder(folder.url)
    assert not (other.path / "sinks").exists()
    shutil.copytree(folder.events, other.events, dirs_exist_ok=True)
    assert feed_sinks(other, ending, closing_s=None)
    (lines,) = [file.read_bytes().splitlines() for file in (tmp_path / "far").iterdir()]
    assert len(lines) == len(events)


def test_nothing_is_started_for_a_run_without_sinks(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config())
    with SinksProcess(folder, folder.config()) as process:
        assert process.check() == []
    assert not (folder.logs / "sinks.log").exists()


@pytest.mark.heavy("processes that take seconds to start")
def test_a_process_that_dies_is_told_of_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FIRST_PAUSE_S", 0.01)
    folder = RunFolder.create(tmp_path / "run", config(log={"to": ["tensorboard"]}))
    messages: list[str] = []
    with SinksProcess(folder, folder.config()) as process:
        process.check()
        folder.config_file.rename(tmp_path / "gone.toml")  # so that it dies
        until_s = time.monotonic() + 120
        while len(messages) < 2 and time.monotonic() < until_s:
            began_s = time.monotonic()
            messages += process.check()
            assert time.monotonic() - began_s < 5.0
            time.sleep(0.05)
    assert len(messages) == 2
    assert "is not a run folder" in messages[0]
