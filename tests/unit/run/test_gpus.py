"""Assignment of GPUs to a run's processes."""

import re

import pytest

from etude.config.loading import default_recipe
from etude.errors import ConfigError
from etude.fleet.specs import ProcessSpec
from etude.run.gpus import VISIBLE, count_gpus, divide_gpus, phase_gpus, with_gpus

GPUS = ("engine.device=cuda", "trainer.device=cuda")


def divided(count: int, *settings: str) -> dict[str, tuple[int, ...]]:
    return divide_gpus(default_recipe([*GPUS, *settings]), count)


def test_engines_come_first_and_each_rank_has_a_gpu() -> None:
    assert divided(2) == {"serve": (0,), "train": (1,)}
    assert divided(8, "engine.replicas=2", "parallel.dp=3") == {"serve": (0,), "serve-1": (1,), "train": (2, 3, 4)}
    spread = ["engine.kind=vllm", "engine.options.arguments.tensor-parallel-size=2", "engine.replicas=2"]
    assert divided(8, *spread) == {"serve": (0, 1), "serve-1": (2, 3), "train": (4,)}
    assert divided(1, "trainer.device=cpu") == {"serve": (0,)}


def test_engines_for_users_have_their_own() -> None:
    part = "{name='kept', signal='kept', weight=1.0, range=[0.0, 1.0]}"
    live = ["live.groups_per_step=8", "live.after_steps=1", "feedback.window_s=1", "release.every_steps=1",
            f"feedback.reward.parts=[{part}]", "release.engines=2"]  # fmt: skip
    assert divided(4, *live) == {"serve": (0,), "production": (1,), "production-1": (2,), "train": (3,)}


def test_one_engine_and_one_rank_share_the_only_gpu() -> None:
    assert divided(1) == {}
    assert divide_gpus(default_recipe(["engine.device=cpu", "trainer.device=cpu", "engine.replicas=3"]), 0) == {}
    assert count_gpus(default_recipe(["engine.device=cpu", "trainer.device=cpu"])) == 0


@pytest.mark.parametrize("settings", [["engine.replicas=2"], ["parallel.dp=2"]])
def test_too_few_gpus_are_told_of_before_anything_starts(settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"want 3 GPUs, and this machine has 1: lower engine\.replicas"):
        divided(1, *settings)


def test_phases_have_the_gpus_of_the_trainer_or_see_all() -> None:
    def of_phases(*settings: str) -> dict[str, tuple[int, ...]]:
        return phase_gpus(default_recipe([*GPUS, *settings]), divided(4, *settings), 4)

    assert of_phases("parallel.dp=3") == {"midtrain": (1, 2, 3)}
    assert of_phases("parallel.dp=3", "parallel.imitation_dp=4") == {}
    assert of_phases("parallel.dp=3", "midtrain.tokens=0") == {}, "it reads nothing, on the first"
    assert of_phases("trainer.device=cpu", "parallel.imitation_dp=9") == {}
    with pytest.raises(ConfigError, match=r"midtrain has 5 ranks, and there are 4 GPUs: lower parallel\.imitation_dp"):
        of_phases("parallel.imitation_dp=5")


def test_named_gpus_are_taken() -> None:
    named = ["placement.engine=[[3], [1]]", "placement.trainer=[0, 2]", "engine.replicas=2", "parallel.dp=2"]
    assert divided(4, *named) == {"serve": (3,), "serve-1": (1,), "train": (0, 2)}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["placement.engine=[[0]]", "placement.trainer=[0]"], "names GPU 0 twice"),
        (["placement.engine=[[]]", "placement.trainer=[0]"], "an engine without a GPU"),
        (["placement.engine=[[0],[1]]", "placement.trainer=[2]"], "2 engines, and the run has 1 on GPUs (serve)"),
        (["placement.engine=[[0]]", "placement.trainer=[1, 2]"], "names 2 GPUs, and the trainer has 1 ranks"),
        (["placement.engine=[[0]]", "placement.trainer=[9]"], "names GPU 9, and this machine has 4"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        divided(4, *settings)


def test_a_process_sees_its_own_gpus_among_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [
        ProcessSpec(name=name, command=("x",), region="home", environment={"A": "1"}) for name in ("serve", "gateway")
    ]
    monkeypatch.delenv(VISIBLE, raising=False)
    assert [spec.environment for spec in with_gpus(specs, {"serve": (1, 2)})] == [
        {"A": "1", VISIBLE: "1,2"},
        {"A": "1"},
    ]
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b,GPU-c")
    assert with_gpus(specs, {"serve": (1, 2)})[0].environment[VISIBLE] == "GPU-b,GPU-c"
