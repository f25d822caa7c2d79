"""Fleet files are read like recipes: mistakes are named with the fix, and the examples are valid."""

from collections import Counter
from pathlib import Path

import pytest

from etude.config.fleet import FleetConfig, RayOptions, RegionConfig
from etude.config.loading import default_recipe, load_fleet
from etude.config.recipe import RunConfig
from etude.config.training import ParallelConfig
from etude.errors import ConfigError
from etude.run.fleet_plan import plan_loop, settings_of
from etude.run.process_name import ProcessName

EXAMPLES = Path(__file__).parents[3] / "examples" / "fleet"
SOUND = 'home = "here"\n[[regions]]\nname = "here"\nengines = 1\n'


def read(text: str, folder: Path) -> FleetConfig:
    file = folder / "fleet.toml"
    file.write_text(text)
    return load_fleet(file)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('home = "here"\n', "regions is missing"),
        (SOUND.replace("engines", "engine"), "unknown key 'regions.0.engine': did you mean 'regions.0.engines'?"),
        (f"trainer_nodes = 4\n{SOUND}", "unknown key 'trainer_nodes': did you mean 'trainer'?"),
        (f"{SOUND}[trainer]\nnode = 4\n", "unknown key 'trainer.node': did you mean 'trainer.nodes'?"),
        (f"{SOUND}[resources.server]\ngpus = 1\n", "unknown key 'resources.server': resources has serve, gateway,"),
        (f"{SOUND}[resources.serve]\ngpu = 1\n", "unknown key 'resources.serve.gpu'"),
        (f'launcher = "rae"\n{SOUND}', "launcher = 'rae' is no launcher: did you mean 'ray'?"),
        (f'{SOUND}[options]\naddress = "auto"\n', "unknown key 'fleet.options.address': it would have no effect"),
        (SOUND.replace('name = "here"', 'name = "There"'), "'There': expected small letters, digits and hyphens"),
        (SOUND.replace('home = "here"', 'home = "there"'), "home = 'there' is not a region: expected one of 'here'"),
        (f"{SOUND}gateways = 0\n", "here has engines and no gateway"),
        (SOUND.replace("engines = 1", ""), "no region has engines"),
        (f"{SOUND}lent_engines = 2\n", "lent_engines = 2 are more than its engines = 1"),
        (f'{SOUND}[[regions]]\nname = "here"\n', "the name 'here' is used twice"),
        (f'{SOUND}[[regions]]\nname = "eu"\n', "here has no store"),
        ("home = ", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text, tmp_path)
    assert fault in str(raised.value)


def test_a_fleet_that_is_not_there_points_at_the_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="examples/fleet has some to begin with"):
        load_fleet(tmp_path / "fleet.toml")


def test_a_launcher_of_ones_own_is_found_beside_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    fleet = read(f'launcher = "@mine.py:Mine"\n{SOUND}', tmp_path)
    assert fleet.launcher == f"@{tmp_path}/mine.py:Mine"


def test_options_are_of_the_launcher(tmp_path: Path) -> None:
    fleet = read(f'launcher = "ray"\n{SOUND}[options]\nregion_label = "region"\n', tmp_path)
    assert fleet.ray == RayOptions(region_label="region")


@pytest.mark.parametrize(
    ("name", "machines"),
    [("one-machine", 1), ("four-machines", 4), ("slurm", 4), ("thousand-machines", 1_000)],
)
def test_the_examples_are_sound_and_as_large_as_they_say(name: str, machines: int) -> None:
    fleet = load_fleet(EXAMPLES / f"{name}.toml")
    config = RunConfig(parallel=ParallelConfig(dp=8 * fleet.trainer.nodes))
    specs = plan_loop(config, fleet, "s3://bucket/run")
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert all(ProcessName.parse(name) for name in names)
    engines = sum(region.engines for region in fleet.regions)
    assert Counter(ProcessName.parse(name).command for name in names)["serve"] == engines
    gpus = sum(spec.resources.gpus for spec in specs)
    hosts = sum(region.sandbox_hosts for region in fleet.regions)
    assert machines - 130 <= (gpus + 7) // 8 + hosts <= machines or gpus == 0


def test_sandbox_hosts_announce_themselves_and_only_who_needs_it_gets_their_key() -> None:
    home = RegionConfig(name="home", store="s3://run", engines=1, sandbox_hosts=1)
    far = RegionConfig(name="far", store="s3://far", sandbox_hosts=2)
    fleet = FleetConfig(home="home", regions=(home, far))
    remote = default_recipe(["sandboxes.kind=remote"])
    specs = {spec.name: spec for spec in plan_loop(remote, fleet, "s3://run")}
    assert specs["sandboxes"].command[2:] == (
        "serve", "--host", "0.0.0.0", "--port", "8700", "--announce", "s3://run"
    )  # fmt: skip
    assert specs["sandboxes-1@far"].command[-8:] == (
        "--port", "8701", "--announce", "s3://far", "--replica", "1", "--region", "far"
    )  # fmt: skip
    holders = {name for name, spec in specs.items() if "ETUDE_SANDBOXES_KEY" in spec.secrets}
    assert holders == {"sandboxes", "sandboxes@far", "sandboxes-1@far", "rollouts"}
    assert "ETUDE_RUN_KEY" not in specs["sandboxes"].secrets, "a host runs programs that nobody trusts"
    local = {spec.name: spec for spec in plan_loop(default_recipe(), fleet, "s3://run")}
    assert "ETUDE_SANDBOXES_KEY" not in local["rollouts"].secrets


def test_who_opens_the_ledger_gets_its_password_and_who_reads_weights_their_key() -> None:
    home = RegionConfig(name="home", store="s3://run", engines=1, gateways=1, sandbox_hosts=1)
    fleet = FleetConfig(home="home", regions=(home, RegionConfig(name="far", store="s3://far", relays=1)))
    remote = default_recipe(["sandboxes.kind=remote"])
    specs = {spec.name: spec.secrets for spec in plan_loop(remote, fleet, "s3://run")}
    assert {name for name, secrets in specs.items() if "PGPASSWORD" in secrets} == {"train", "rollouts"}
    assert {name for name, secrets in specs.items() if "ETUDE_WEIGHTS_KEY" not in secrets} == {"sandboxes"}


def test_rollouts_get_the_key_of_a_judge_s_model_if_there_is_one() -> None:
    fleet = FleetConfig(home="home", regions=(RegionConfig(name="home", engines=1),))
    judged = ["judge.kind=model", "judge.options.url=https://judge.example/v1", "judge.options.model=grader"]
    for overrides, has_key in (([], False), (judged, True)):
        specs = {spec.name: spec for spec in plan_loop(default_recipe(overrides), fleet, "s3://run")}
        assert ("ETUDE_JUDGE_KEY" in specs["rollouts"].secrets) is has_key


def test_remote_sandboxes_have_a_server_or_a_host_of_the_fleet() -> None:
    fleet = FleetConfig(home="home", regions=(RegionConfig(name="home", engines=1),))
    plan_loop(default_recipe(["sandboxes.kind=remote", "sandboxes.options.urls=['http://a']"]), fleet, "s3://run")
    with pytest.raises(ConfigError, match=r"has no server.*sandbox_hosts"):
        plan_loop(default_recipe(["sandboxes.kind=remote"]), fleet, "s3://run")


def test_a_recipe_takes_from_its_fleet_what_one_machine_cannot_know() -> None:
    one, four = (load_fleet(EXAMPLES / f"{name}.toml") for name in ("one-machine", "four-machines"))
    assert settings_of(one) == ["engine.replicas=3", "gateway.replicas=1"]
    assert settings_of(four) == ['trainer.device="cuda"', 'engine.device="cuda"']
