"""The vLLM server that a run asks for."""

from pathlib import Path

import pytest

from etude.config.inference import EngineConfig, NumericsConfig
from etude.config.recipe import RunConfig
from etude.config.training import TrainerConfig
from etude.engines.vllm.opener import server_of
from etude.models.spec import TINY, TINY_DENSE, ModelSpec
from etude.run.resolve import resolve

ROUTES = "--enable-return-routed-experts"


@pytest.mark.parametrize(("spec", "device", "routed"), [(TINY, "cuda", True), (TINY_DENSE, "cuda", False)])
def test_only_a_model_with_experts_is_asked_for_routes(spec: ModelSpec, device: str, routed: bool) -> None:
    engine = EngineConfig(kind="vllm", device="cuda", max_length=128)
    config = resolve(RunConfig(engine=engine, trainer=TrainerConfig(device="cuda")))
    server = server_of(config, spec, python=Path("python"), model=Path("model"), port=1)
    assert server.device == device and server.max_length == 128
    assert (ROUTES in server.command()) is routed
    off = config.model_copy(update={"numerics": NumericsConfig(replay="off")})
    assert ROUTES not in server_of(off, spec, python=Path("python"), model=Path("model"), port=1).command()
