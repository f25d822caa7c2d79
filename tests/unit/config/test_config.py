"""A recipe is read strictly: every fault is named with its key, its value and the fix."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from etude.config.imitation import SftConfig
from etude.config.keys import meanings_of, options_of, tables
from etude.config.loading import default_recipe, dump_toml, load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.renamed import RENAMED
from etude.config.rollouts import RolloutConfig
from etude.config.section import Section
from etude.config.tasks import BugfixOptions, TaskConfig
from etude.config.training import ModelShape, TrainerConfig
from etude.errors import ConfigError, UserError


def error_of(tree: dict[str, Any]) -> str:
    """The message with which a tree of plain values is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, source="test.toml")
    return str(caught.value)


def recipe(folder: Path, text: str) -> Path:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return folder


def sections(kind: type[BaseModel] = RunConfig) -> list[type[BaseModel]]:
    """``RunConfig`` and every section below it."""
    below = [field.annotation for field in kind.model_fields.values()]
    inner = [each for each in below if isinstance(each, type) and issubclass(each, BaseModel) and each is not Section]
    options = [
        each for field in kind.model_fields.values() if (rule := options_of(field)) for each in rule.classes.values()
    ]
    return [kind, *options, *(section for child in inner for section in sections(child))]


# --- Reading --------------------------------------------------------------------------------------------------------


def test_an_empty_recipe_is_the_default_run(tmp_path: Path) -> None:
    assert load_recipe(recipe(tmp_path, "")) == RunConfig()


def test_a_recipe_is_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = recipe(tmp_path, 'name = "mine"\n[trainer]\nsteps = 3\nbetas = [0.8, 0.9]\n')
    config = load_recipe(folder)
    assert (config.name, config.trainer.steps, config.trainer.betas) == ("mine", 3, (0.8, 0.9))
    assert load_recipe(folder / "run.toml") == config


def test_overrides_are_typed_like_toml_and_the_last_one_wins(tmp_path: Path) -> None:
    overrides = [
        "trainer.steps=5",
        "name=bare-word",
        'tasks.options.kinds=["loop"]',
        "eval.tasks = 7",
        "trainer.steps=6",
    ]
    config = load_recipe(recipe(tmp_path, "[trainer]\nsteps = 3\nthreads = 2\n"), overrides)
    assert config.trainer.steps == 6
    assert config.trainer.threads == 2, "what is not overridden stays"
    assert config.name == "bare-word"
    assert config.tasks.options == BugfixOptions(kinds=("loop",))
    assert config.eval.tasks == 7


changed_runs = st.builds(
    RunConfig,
    name=st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True),
    seed=st.integers(0, 2**62),
    tasks=st.builds(
        TaskConfig,
        heldout_every=st.integers(2, 50),
        options=st.builds(
            BugfixOptions,
            kinds=st.lists(st.sampled_from(["arith", "slice", "comp", "loop", "range"]), min_size=1, max_size=5).map(
                tuple
            ),
        ),
    ),
    trainer=st.builds(
        TrainerConfig,
        learning_rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        mismatch_share=st.floats(0, 1),
        device=st.sampled_from(["cpu", "cuda", "auto"]),
    ),
    sft=st.builds(SftConfig, file=st.text()),
)


@given(config=changed_runs)
def test_what_is_dumped_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    file = tmp_path_factory.getbasetemp() / "round-trip.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    assert load_recipe(file) == config


# --- Refusing -------------------------------------------------------------------------------------------------------


def test_a_missing_recipe_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no recipe at '.*nowhere': expected a TOML file, a folder with run\.toml"):
        load_recipe(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no recipe at"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("content", [b"steps = ", b"[a]\n[a]\n", b"name = '\xff'"])
def test_bad_toml_is_refused_with_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML: "):
        load_recipe(file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.steps", "--set 'trainer.steps': expected section.key=value"),
        ("=5", "--set '=5': expected section.key=value"),
        ("name.first=x", "--set 'name.first=x': 'name' is a value, not a section"),
        ("trainer.stepz=5", "unknown key 'trainer.stepz': did you mean 'trainer.steps'?"),
        ("trainer.steps=many", "trainer.steps = 'many': Input should be a valid integer"),
        ("trainer=5", "trainer = 5: "),
        ("steps=5", "run.toml --set steps:\n  unknown key 'steps': did you mean 'trainer.steps'?"),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe(tmp_path, 'name = "run"'), [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "unknown", "nearest"),
    [
        ({"trainer": {"learning_rat": 1e-3}}, "trainer.learning_rat", "trainer.learning_rate"),
        ({"rollout": {"group_size": 8}}, "rollout", "rollouts"),
        ({"gateway": {"access_logs": True}}, "gateway.access_logs", "gateway.access_log"),
    ],
)
def test_an_unknown_key_is_met_with_its_nearest(tree: dict[str, Any], unknown: str, nearest: str) -> None:
    assert f"unknown key {unknown!r}: did you mean {nearest!r}?" in error_of(tree)


def test_an_unknown_key_that_is_like_none_is_met_with_what_there_is() -> None:
    assert "unknown key 'eval.zzz': eval has enabled, tasks, " in error_of({"eval": {"zzz": 1}})
    assert "unknown key 'zzz': a recipe has name, " in error_of({"zzz": 1})


def test_a_shipped_recipe_is_found_by_its_name_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("self-summary")).name == "self-summary"
    (tmp_path / "self-summary").mkdir()
    (tmp_path / "self-summary" / "run.toml").write_text('name = "mine"')
    assert load_recipe(Path("self-summary")).name == "mine"


def test_an_unknown_recipe_name_lists_the_recipes_that_exist(tmp_path: Path) -> None:
    for path in (Path("quickstrat"), tmp_path / "quickstart"):
        with pytest.raises(ConfigError, match=r"or a name of .*quickstart, "):
            load_recipe(path)


@pytest.mark.parametrize(
    ("section", "key", "value", "shown"),
    [
        ("trainer", "steps", "40", "trainer.steps = '40': Input should be a valid integer"),
        ("trainer", "steps", 40.5, "trainer.steps = 40.5: "),
        ("trainer", "steps", True, "trainer.steps = True: "),
        ("trainer", "steps", 0, "trainer.steps = 0: Input should be greater than or equal to 1"),
        ("trainer", "betas", [0.9], "trainer.betas.1 is missing"),
        ("trainer", "mismatch_share", 1.01, "trainer.mismatch_share = 1.01: "),
        ("engine", "device", "gpu", "engine.device = 'gpu': Input should be 'cpu', 'cuda' or 'auto'"),
        ("engine", "port", 65536, "engine.port = 65536: Input should be less than or equal to 65535"),
        ("tasks", "options", {"kinds": ["poetry"]}, "tasks.options.kinds.0 = 'poetry': Input should be 'arith', "),
        ("tasks", "options", {"kinds": "arith"}, "tasks.options.kinds = 'arith': expected a list, such as [\"arith\"]"),
    ],
)
def test_a_wrong_type_or_range_names_key_value_and_what_is_right(
    section: str, key: str, value: object, shown: str
) -> None:
    assert error_of({section: {key: value}}).startswith(f"test.toml:\n  {shown}")


def test_vllm_is_not_told_of_a_plain_model_where_experts_are_quantised() -> None:
    assert "leave engine.kind out" in error_of({"engine": {"kind": "vllm"}, "numerics": {"experts": "nvfp4"}})


def test_a_checkpoint_is_not_practised_on_by_oversight() -> None:
    assert "midtrain.tokens is not" in error_of({"model": {"checkpoint": "mine"}, "midtrain": {"warmup_steps": 9}})
    for meant in ({"tokens": 0}, {"tokens": 9_000}, {"mixture": {"text:mine": 1.0}}):
        assert parse_config({"model": {"checkpoint": "mine"}, "midtrain": meant}, source="test.toml").model.checkpoint


def test_every_fault_is_reported_at_once() -> None:
    message = error_of({"trainer": {"steps": 0, "stepz": 1}, "name": "Has Spaces"})
    assert len(message.splitlines()) == 4
    for part in ("name = 'Has Spaces'", "trainer.steps = 0", "'trainer.stepz'"):
        assert part in message


@pytest.mark.parametrize(
    ("tree", "fix"),
    [
        ({"model": {"shape": {"heads": 4, "kv_heads": 3}}}, "kv_heads=3 must divide heads=4"),
        ({"model": {"shape": {"head_dim": 33}}}, "head_dim=33 must be even"),
        ({"model": {"shape": {"experts": 2, "experts_per_token": 3}}}, "experts_per_token=3 is more than experts=2"),
        ({"rollouts": {"concurrency": 7}}, "concurrency=7 is below group_size=8: no group starts"),
        (
            {"rollouts": {"max_staleness": 0, "concurrency": 129}},
            "concurrency=129 would have no effect beyond 128 = (max_staleness + 1) * groups_per_step * group_size",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(tree: dict[str, Any], fix: str) -> None:
    message = error_of(tree)
    assert fix in message
    assert "Value error" not in message, "pydantic's own prefix is noise"


def test_the_widest_useful_concurrency_is_accepted() -> None:
    rollouts = RolloutConfig(groups_per_step=4, group_size=8, max_staleness=1, concurrency=64)
    assert rollouts.rollouts_per_step == 32
    assert ModelShape(heads=4, kv_heads=2).kv_heads == 2


# --- What a section is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_section_is_frozen_strict_and_described(section: type[BaseModel]) -> None:
    assert issubclass(section, Section)
    assert section.__doc__
    meanings = meanings_of(section)
    for name, field in section.model_fields.items():
        assert meanings.get(name), f"{section.__name__}.{name} has no docstring"
        chosen = section.__name__.endswith("Options")  # of a choice that is not the default
        assert chosen or not field.is_required(), f"{section.__name__}.{name} has no default: an empty recipe must run"
    with pytest.raises(ValidationError, match="frozen"):
        setattr(section.model_construct(), next(iter(section.model_fields)), None)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tasks.family=repository", "needs tasks.folder"),
        ("tasks.folder=x", "has no tasks.folder"),
        ("tasks.family=migrations", "sandboxes.kind = 'ns'"),
        (
            "tasks.options.brief=true",
            "no effect with tasks.family = 'bugfix', it goes with 'repository'",
        ),
        ("tasks.impossible_share=0.5", "tasks.impossible_share"),
        ("sandboxes.options.urls=['http://a']", "it goes with 'remote'"),
        ("sandboxes.options.url=http://a", "it goes with 'remote'"),
        ("sandboxes.pool_size=4", "sandboxes.pool_size would have no effect"),
        ("cheating.outcomes.low=shrug", "cheating.outcomes.low"),
    ],
)
def test_a_environment_that_does_not_fit_jointly_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        default_recipe([override])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://a", "urls": ["http://b"]}, "name one server by url, or several by urls"),
        ({"urls": ["http://a", "b:80"]}, "'b:80' is not a URL of a server"),
        ({"urls": ["http://a", "http://a/"]}, "name each server once"),
    ],
)
def test_servers_of_sandboxes_are_named_one_way_and_once(options: dict[str, object], words: str) -> None:
    assert words in error_of({"sandboxes": {"kind": "remote", "options": options}})


def test_families_of_folders_take_their_machine() -> None:
    chosen = default_recipe(["tasks.family=harbor", "tasks.folder=examples/tasks", "sandboxes.kind=ns"])
    assert (chosen.tasks.family, chosen.sandboxes.kind) == ("harbor", "ns")
    with pytest.raises(ConfigError, match=r"with tasks.family = 'migrations' there are no options"):
        default_recipe(["tasks.family=migrations", "sandboxes.kind=ns", "tasks.options.cases=4"])


def test_an_old_key_is_met_with_the_new_one() -> None:
    assert "unknown key 'ledger.patience_s': it is ledger.retry_timeout_s now" in error_of(
        {"ledger": {"patience_s": 9}}
    )
    with pytest.raises(ConfigError, match=r"it is eval\.heldout_every now"):
        default_recipe(["eval.document_one_in=9"])


def test_an_old_key_that_had_no_effect_keeps_no_run_from_being_opened() -> None:
    assert parse_config({"loss": {"draft_coef": 0.0}, "telemetry": {"sinks": []}}, source="run.toml") == RunConfig()
    assert "it is loss.draft_learning_rate, a rate instead of a weight" in error_of({"loss": {"draft_coef": 0.5}})


@pytest.mark.parametrize("new", sorted(set(RENAMED.values())))
def test_new_keys_are_keys(new: str) -> None:
    keys = {key.path: key for table in tables() for key in table.keys}
    owner = keys.get(new.rpartition(".")[0])
    assert " " in new or new in keys or (owner is not None and owner.takes.startswith("a table"))
