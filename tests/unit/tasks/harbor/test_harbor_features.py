"""The table of Harbor's features is complete, matches the reader, and is shown on its page."""

from pathlib import Path

from etude.tasks.harbor import compose, settings
from etude.tasks.harbor.features import Support, features, markdown

PAGE = Path(__file__).parents[4] / "docs" / "harbor-features.md"
HEALTHCHECK = ("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec", "retries")
HARBORS = {
    *("schema_version", "source", "task", "metadata", "steps", "multi_step_reward_strategy", "solution.env"),
    *(f"artifacts.{name}" for name in ("source", "destination", "exclude", "service")),
    *(f"agent.{name}" for name in ("timeout_sec", "user", "network_mode", "allowed_hosts")),
    *(f"verifier.{name}" for name in ("timeout_sec", "env", "user", "environment_mode", "environment", "collect")),
    *(f"verifier.{name}" for name in ("network_mode", "allowed_hosts")),
    *(f"environment.{name}" for name in ("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb")),
    *(f"environment.{name}" for name in ("gpus", "gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "workdir")),
    *(f"environment.{name}" for name in ("network_mode", "allowed_hosts")),
    *(f"environment.healthcheck.{name}" for name in HEALTHCHECK),
}
"""The keys of ``harbor.models.task.config.TaskConfig`` in release 0.26, but for those with another name today."""


def test_every_key_of_the_format_is_in_the_table_once_and_no_other() -> None:
    names = [feature.name for feature in features()]
    assert len(names) == len(set(names))
    keys = {name.removeprefix("task.toml: ") for name in names if name.startswith("task.toml: ")}
    assert keys == HARBORS


def test_notes_are_about_what_there_is() -> None:
    rows = {feature.name: feature for feature in features()}
    read = {name for name, row in rows.items() if row.support is not Support.REFUSED}
    notes = [f"task.toml: {key}" for key in settings.NOTES] + [f"compose: {key}" for key in compose.NOTES]
    assert not {*notes} - read
    assert all(row.note for row in rows.values() if row.support in (Support.PART, Support.REFUSED))


def test_the_page_shows_the_table() -> None:
    assert markdown() in PAGE.read_text(encoding="utf-8"), "etude tasks features, into docs/harbor-features.md"
