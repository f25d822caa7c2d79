"""Working folders: made from the run's URL, and without any file of a particular machine."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.config.loading import default_recipe, load_recipe
from etude.errors import ConfigError, DamagedError, RunFolderError, UserError
from etude.objects import ObjectStore
from etude.run.folder import RunFolder
from etude.run.kept_files import KeptFiles
from etude.run.resuming import change, changed_config
from etude.run.run_url import is_run_url, normal_url
from etude.run.working_folder import (
    MODEL,
    RECIPE_FILES,
    REPORTS,
    WORK_VARIABLE,
    create_run,
    forget,
    keep,
    open_run_folder,
    working_path,
)

POSTGRES = "ledger.url=postgresql:///app"


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "work"))
    return tmp_path / "work"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "shared" / "run")


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Be another machine."""
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "elsewhere"))


def test_another_machine_has_the_recipe_the_plugins_and_the_place_of_the_ledger(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "recipe" / "losses.py"
    plugin.parent.mkdir()
    plugin.write_text("class Mine:\n    def __init__(self, options: object) -> None: ...\n")
    (tmp_path / "recipe" / "run.toml").write_text(
        '[ledger]\nurl = "postgresql:///app"\n[log]\nto = ["@losses.py:Mine"]\n'
    )
    made = create_run(url, load_recipe(tmp_path / "recipe"))
    plugin.unlink()
    elsewhere(monkeypatch, tmp_path)
    folder = open_run_folder(url)
    assert folder.path != made.path and folder.url == made.url == url
    assert folder.config().log.to[0].kind.startswith(f"@{folder.path}/plugins/losses.")
    assert folder.ledger == made.ledger
    assert (folder.store, folder.payloads) == (f"{url}/weights", f"{url}/payloads")
    assert not (folder.path / "admin.key").exists()
    assert "key" not in "".join(ObjectStore(url).list(""))


def test_a_process_that_opens_a_run_never_hides_its_place_from_another(url: str) -> None:
    """Regression: a rollouts process that started meanwhile stored turns on its own disk, where no trainer looks."""
    made = create_run(url, default_recipe([POSTGRES]))

    def open_again() -> None:
        for _ in range(1000):
            made.record_url(url)

    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_again)
        while not opened.done():
            assert RunFolder(made.path).payloads == f"{url}/payloads"
        opened.result()


def test_an_empty_record_of_the_place_is_refused(url: str) -> None:
    made = create_run(url, default_recipe([POSTGRES]))
    for name in ("run.url", "ledger.url"):
        (made.path / name).write_text("\n")
        with pytest.raises(DamagedError, match=rf"{name} is empty: write the place"):
            assert made.payloads != made.ledger
        (made.path / name).write_text(url)


def test_the_newest_files_count_on_every_machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_run(url, default_recipe([POSTGRES, "trainer.steps=3"]))
    elsewhere(monkeypatch, tmp_path)
    other = open_run_folder(url)
    change(other, changed_config(other, ["trainer.steps=7"]))
    keep(other, *RECIPE_FILES)
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "work"))
    assert open_run_folder(url).config().trainer.steps == 7
    assert made.config().trainer.steps == 7, "it is the same folder"


def test_files_that_are_kept_at_the_same_time_are_all_kept(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create_run(url, default_recipe([POSTGRES]))
    names = [f"model/{number}.json" for number in range(8)]
    folder.model.mkdir()
    for name in (*names, "model/model.safetensors"):
        (folder.path / name).write_text(name)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: keep(folder, name), names))
    keep(folder, *MODEL)
    elsewhere(monkeypatch, tmp_path)
    reader = open_run_folder(url, writes=False)
    assert {path.name for path in reader.model.iterdir()} == {Path(name).name for name in names}
    assert (open_run_folder(url).model / "model.safetensors").read_text() == "model/model.safetensors"


def test_a_disk_that_keeps_a_file_still_brings_what_another_machine_kept_meanwhile(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = create_run(url, default_recipe([POSTGRES]))
    elsewhere(monkeypatch, tmp_path)
    there = open_run_folder(url)
    for folder, name in ((here, "evaluations/here"), (there, "evaluations/there")):
        (folder.path / "evaluations").mkdir()
        (folder.path / name).write_text(name)
        KeptFiles(folder, "evaluations").keep(name)
    for folder in (here, there):
        KeptFiles(folder, "evaluations").bring()
        assert {path.name for path in (folder.path / "evaluations").iterdir()} == {"here", "there"}


def test_an_opener_leaves_what_this_machine_wrote_since_its_last_upload(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `etude show` by URL, during the end of a run, replaced its report by the one of the start before."""
    made = create_run(url, default_recipe([POSTGRES]))
    made.report_json.write_text("first")
    keep(made, *REPORTS)
    made.report_json.write_text("second")
    open_run_folder(url, writes=False)
    assert made.report_json.read_text() == "second"
    elsewhere(monkeypatch, tmp_path)
    other = open_run_folder(url)
    assert other.report_json.read_text() == "first"
    keep(other, *RECIPE_FILES)
    other.report_json.write_text("third")
    keep(other, *REPORTS)
    monkeypatch.setenv(WORK_VARIABLE, str(tmp_path / "work"))
    open_run_folder(url, writes=False)
    assert made.report_json.read_text() == "third", "another machine's is newer"


def test_a_changed_recipe_is_at_the_url_before_anybody_can_fetch_the_former_one(url: str) -> None:
    """Regression: a process that opened the run between the change and its upload brought the former recipe back."""
    made = create_run(url, default_recipe([POSTGRES, "trainer.steps=3"]))
    changed = made.config().model_copy(update={"trainer": made.config().trainer.model_copy(update={"steps": 7})})
    change(made, changed)
    assert open_run_folder(url).config().trainer.steps == 7
    keep(made, *RECIPE_FILES)
    assert made.config().trainer.steps == 7


def test_a_changed_file_of_a_working_folder_is_fetched_again_and_a_lost_one_is_named(url: str) -> None:
    folder = create_run(url, default_recipe([POSTGRES]))
    recipe = folder.config_file.read_bytes()
    folder.config_file.write_bytes(recipe[:-9])
    assert open_run_folder(url).config_file.read_bytes() == recipe
    folder.config_file.unlink()
    store = ObjectStore(f"{url}/files")
    store.delete(*store.list("parts"))
    with pytest.raises(DamagedError, match=r"\(run.toml\) is missing: restore it from a copy"):
        open_run_folder(url)


def test_a_run_at_a_url_needs_a_ledger_that_outlives_the_machine(url: str) -> None:
    with pytest.raises(ConfigError, match=r"ledger\.url is empty.*--ledger postgresql://"):
        create_run(url, default_recipe())
    assert not Path(url).exists()
    folder = create_run(url, default_recipe([POSTGRES]))
    with pytest.raises(RunFolderError, match=f"there is a run at {url} already: continue it with --resume {url}"):
        create_run(url, default_recipe([POSTGRES]))
    forget(folder)
    with pytest.raises(RunFolderError, match=f"{folder.path} is left of a run that was at {url}"):
        create_run(url, default_recipe([POSTGRES]))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/runs/a/", "s3://bucket/runs/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("file:///data/my%20runs/a/", "/data/my runs/a"),
        ("/data/runs/a/", "/data/runs/a"),
    ],
)
def test_a_url_has_one_form(text: str, url: str) -> None:
    assert normal_url(text) == url == normal_url(url)
    assert working_path(url).name.startswith("a-")


@pytest.mark.parametrize(
    "text", ["s3://bucket", "s3://bucket/", "http://host/a", "memory://", "s3:///a", "s3://b/a?x=1"]
)
def test_what_is_no_place_for_a_run_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL of a run"):
        normal_url(text)


def test_a_run_folder_stays_a_run_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", default_recipe())
    assert not is_run_url(str(folder.path))
    assert open_run_folder(str(folder.path)) == open_run_folder(folder.path) == folder
    keep(folder, *RECIPE_FILES)
    forget(folder)
    assert folder.url == "" and folder.config_file.exists()
    with pytest.raises(UserError, match="is not a run folder"):
        open_run_folder(str(tmp_path / "nothing"))
