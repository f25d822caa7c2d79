"""The vLLM server that a run asks for."""

import re
from pathlib import Path

import pytest

from etude.config.inference import EngineConfig, NumericsConfig
from etude.config.loading import default_recipe, parse_config
from etude.config.recipe import RunConfig
from etude.config.training import TrainerConfig
from etude.engines.vllm.opener import server_of
from etude.errors import ConfigError
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


def test_a_recipe_adds_arguments_of_the_servers_own() -> None:
    given = ["tensor-parallel-size=2", "gpu-memory-utilization=0.6", "async-scheduling=true", "swap-space=false",
             "speculative-config.method=ngram", "speculative-config.num_speculative_tokens=4"]  # fmt: skip
    settings = [f"engine.options.arguments.{each}" for each in given]
    config = resolve(default_recipe(["engine.kind=vllm", "engine.device=cuda", "trainer.device=cuda", *settings]))
    command = server_of(config, TINY, python=Path("python"), model=Path("model"), port=1).command()
    added = ["--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.6", "--async-scheduling"]
    added += ["--speculative-config", '{"method":"ngram","num_speculative_tokens":4}']
    assert command[-len(added) :] == added


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("dtype", "decided by numerics.dtype"), ("api-key", "decided by nothing"), ("--tp", "without `--`"),
     ("tp size", "not an argument of a server")],
)  # fmt: skip
def test_arguments_that_are_no_ones_or_ours_are_refused(kind: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_config({"engine": {"kind": kind, "options": {"arguments": {name: "x"}}}}, source="run.toml")
