"""Open choices of a recipe are resolved once, when the run is made; every process on any machine reads the same."""

from pathlib import Path

import pytest

from etude.config.loading import load_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.run import resolve as resolve_module
from etude.run.folder import RunFolder
from etude.run.process_name import TRAINER
from etude.run.processes import run_process
from etude.run.resolve import check_devices, resolve, resolve_device


def elsewhere(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Be a machine with another device than this one."""
    monkeypatch.setattr(resolve_module, "resolve_device", lambda name: device if name == "auto" else name)


def on(engine: str, trainer: str, **numerics: str) -> RunConfig:
    return parse_config(
        {"engine": {"device": engine}, "trainer": {"device": trainer}, "numerics": dict(numerics)}, source="test"
    )


@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_the_machine_that_makes_a_run_decides_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, there: str
) -> None:
    elsewhere(monkeypatch, here)
    folder = RunFolder.create(tmp_path / "run", RunConfig())
    message = load_recipe(folder.config_file)
    assert (message.engine.device, message.trainer.device) == (here, here)
    expected = ("invariant", "off") if here == "cpu" else ("fast", "completion")
    assert (message.numerics.arithmetic, message.numerics.replay) == expected
    elsewhere(monkeypatch, there)
    assert RunFolder.open(tmp_path / "run").config() == message == folder.config()


@pytest.mark.parametrize("kind", ["native", "vllm", "sglang"])
def test_nothing_is_left_open_in_the_recipe_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No key stays ``auto``, since processes on other machines would resolve it differently."""
    elsewhere(monkeypatch, "cuda")
    folder = RunFolder.create(tmp_path / "run", parse_config({"engine": {"kind": kind}}, source="test"))
    assert '"auto"' not in folder.config_file.read_text(encoding="utf-8")


@pytest.mark.parametrize("here", ["cpu", "cuda"])
def test_devices_that_a_recipe_names_decide_whatever_machine_makes_the_run(
    monkeypatch: pytest.MonkeyPatch, here: str
) -> None:
    elsewhere(monkeypatch, here)
    mixed = resolve(on("cpu", "cuda"))
    assert (mixed.numerics.arithmetic, mixed.numerics.replay) == ("fast", "completion")
    assert resolve(on("cpu", "cpu")).numerics.arithmetic == "invariant"
    for config in (mixed, resolve(on("cpu", "cpu")), resolve(on("auto", "cpu", arithmetic="fast"))):
        assert resolve(config) == config
        assert "auto" not in {config.engine.device, config.trainer.device, *config.numerics.model_dump().values()}


def test_a_process_whose_device_is_not_here_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch, "cpu")
    folder = RunFolder.create(tmp_path / "run", on("cpu", "cuda"))
    check_devices(folder.config(), ("engine",))
    with pytest.raises(ConfigError, match=r"trainer.device = 'cuda', but torch .* its trainer belongs on a machine"):
        run_process(TRAINER, folder)


def test_a_machine_without_a_driver_is_not_asked_about_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "GPU_FILES", ())
    assert resolve_device("auto") == "cpu" and resolve_device("cuda") == "cuda"


@pytest.mark.parametrize(
    ("engine", "trainer", "named", "dtype"),
    [
        ("cuda", "cuda", "auto", "bfloat16"),
        ("cuda", "cuda", "float32", "float32"),
        ("cpu", "cuda", "auto", "float32"),
        ("cpu", "cpu", "auto", "float32"),
        ("cpu", "cpu", "bfloat16", "bfloat16"),
    ],
)
def test_weights_are_bfloat16_where_all_of_a_run_are_gpus(engine: str, trainer: str, named: str, dtype: str) -> None:
    tree = {"engine": {"device": engine}, "trainer": {"device": trainer}, "numerics": {"dtype": named}}
    numerics = resolve(parse_config(tree, source="run.toml")).numerics
    assert numerics.dtype == numerics.stored_dtype == dtype


@pytest.mark.parametrize(
    ("ranks", "chosen", "expected"), [(1, None, False), (2, None, True), (1, True, True), (2, False, False)]
)
def test_several_ranks_compute_activations_again_unless_the_recipe_says_otherwise(
    ranks: int, chosen: bool | None, expected: bool
) -> None:
    trainer = {"device": "cpu"} | ({} if chosen is None else {"checkpoint_activations": chosen})
    config = parse_config({"trainer": trainer, "parallel": {"dp": ranks}, "engine": {"device": "cpu"}}, source="test")
    assert not (chosen is None and config.trainer.recomputes)
    assert resolve(config).trainer.checkpoint_activations is resolve(config).trainer.recomputes is expected


def test_moments_in_the_hosts_memory_are_for_trainers_on_gpus() -> None:
    offloaded = {"optimiser": {"state": "offload"}, "engine": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=r"optimiser.state = 'offload' has no effect with a trainer on a CPU"):
        resolve(parse_config(offloaded | {"trainer": {"device": "cpu"}}, source="test"))
    assert (
        resolve(parse_config(offloaded | {"trainer": {"device": "cuda"}}, source="test")).optimiser.state == "offload"
    )
