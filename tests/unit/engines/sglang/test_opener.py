"""The SGLang kind of engine, from a recipe to its server's end, with a stand-in for the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from etude.config.inference import ENGINES
from etude.config.loading import default_recipe
from etude.engines.kinds import ServedEngine, WeightUpdate
from etude.engines.sglang.opener import features_of, open_sglang
from etude.engines.sglang.server import PYTHON_VARIABLE, SglangServer
from etude.errors import ConfigError, UserError
from etude.models.spec import TINY, TINY_DENSE
from etude.protocols import SamplingParams
from etude.run.preflight import check_machine
from etude.run.resolve import resolve
from served_engines import PulledStates, context_of
from sglang_server import stand_in


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[tuple[ServedEngine, PulledStates]]:
    settings = ["engine.kind=sglang", f"engine.options.python={stand_in(tmp_path)}", "engine.max_length=64"]
    config = resolve(default_recipe([*settings, "engine.device=cpu", "trainer.device=cpu", "numerics.replay=full"]))
    states = PulledStates(TINY)
    async with open_sglang(context_of(tmp_path, config, TINY), states.version(0)) as served:
        yield served, states


def test_a_server_is_started_sampled_from_updated_and_stopped(tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(tmp_path) as (served, states):
            health = await served.engine.health()
            assert (health.version, health.digest) == (0, states.version(0).digest)
            greedy = SamplingParams(max_tokens=8, temperature=0.0, want_routes=True)
            before = await served.engine.generate([5, 6, 7], greedy, session="s")
            assert before.routes is not None and before.routes.shape == (10, *TINY.routes_shape)
            assert before.versions.tolist() == [0] * 8
            update = WeightUpdate(weights=states.version(1), changed=None)
            swap = await asyncio.to_thread(served.updater.stage, update)
            long = asyncio.create_task(
                served.engine.generate([5, 6, 7], SamplingParams(max_tokens=60, want_routes=True), session="s")
            )
            await asyncio.sleep(0.1)
            assert await swap() > 0
            assert served.updater.version == 1
            whole = await long
            assert len(whole.token_ids) == 60 and (np.diff(whole.versions) >= 0).all()
            assert whole.routes is not None and len(whole.routes) == 62
            after = await served.engine.generate([5, 6, 7], greedy, session="s")
            assert after.versions.tolist() == [1] * 8
            assert after.token_ids.tolist() != before.token_ids.tolist()

    asyncio.run(scene())


def test_a_server_that_does_not_start_is_told_of_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no GPU here')")
    settings = ["engine.kind=sglang", f"engine.options.python={stand_in(tmp_path, broken)}", "engine.device=cpu"]

    async def scene() -> None:
        config = resolve(default_recipe([*settings, "trainer.device=cpu"]))
        async with open_sglang(context_of(tmp_path, config, TINY), PulledStates(TINY).version(0)):
            raise AssertionError("it opened")

    with pytest.raises(ConfigError, match=r"SGLang cannot serve this run(.|\n)*no GPU here"):
        asyncio.run(scene())


def test_a_recipe_without_sglang_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert ENGINES.find("sglang") is open_sglang
    with pytest.raises(UserError, match=r"no SGLang: /nowhere/python is missing.*engine\.options\.python"):
        list(check_machine(default_recipe(["engine.kind=sglang", "engine.options.python=/nowhere/python"])))


def test_only_a_model_with_experts_is_asked_for_routes() -> None:
    server = SglangServer(
        python=Path("p"), model=Path("m"), version=3, port=1, device="cuda", dtype="bfloat16", max_length=64,
        max_running=4, routes=True,
    )  # fmt: skip
    command = server.command({"PYTHONPATH": "ours", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HOME": "/root"})
    assert command.argv[:3] == ["p", "-m", "sglang.launch_server"]
    assert "--enable-return-routed-experts" in command.argv
    assert not command.environment.keys() & {"PYTHONPATH", "SGLANG_RETURN_ORIGINAL_LOGPROB"}
    assert features_of(TINY, server).hidden_layers == TINY.layers
    assert features_of(TINY_DENSE, server).sparse_layers == ()
