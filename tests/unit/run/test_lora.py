"""Adapters on a frozen base: trained alone, published in their own log, served exactly, exported."""

import asyncio
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from torch import Tensor

from etude.config.inference import EngineConfig
from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.engines.http import engine_app
from etude.engines.kinds import Swap, WeightUpdate
from etude.engines.native.engine import NativeEngine, Weights
from etude.engines.native.opener import NativeUpdater
from etude.errors import ConfigError, DamagedError, UserError
from etude.models.adapters import base_of
from etude.models.checkpoint import load_checkpoint, load_state, save_checkpoint, state_of
from etude.models.decoder import Decoder
from etude.models.hf import CausalModel
from etude.models.spec import TINY, TINY_DENSE, TINY_LATENT, ModelSpec
from etude.protocols import SamplingParams
from etude.run.engine_adapters import adapter_routes
from etude.run.export import export_run
from etude.run.folder import RunFolder
from etude.run.numerics import (
    FrozenBase,
    frozen_base,
    load_published,
    published_state,
    serving_model,
    training_model,
)
from etude.run.parity import check_parity
from etude.run.phase_models import publish_start
from etude.run.store_outages import StoreOutages
from etude.run.trainer_group import optimisation_of, policy_model
from etude.run.weight_log import open_log
from etude.telemetry.log import EventLog
from etude.tokens.chat import ChatTemplate
from etude.trainer.checkpoint import Checkpoints
from etude.trainer.optimisation import Optimisation
from etude.weights.publish import Publisher
from etude.weights.pull import Receiver, pull
from etude.weights.tensors import to_stored, to_tensors

SPECS = {"grouped": TINY, "dense": TINY_DENSE, "latent": TINY_LATENT}
IDS = torch.arange(40) % TINY.vocab_size


def config_of(checkpoint: Path, dtype: str, experts: str, **lora: object) -> RunConfig:
    return parse_config(
        {
            "model": {"checkpoint": str(checkpoint)},
            "midtrain": {"tokens": 0},
            "numerics": {"dtype": dtype, "arithmetic": "invariant", "experts": experts},
            "lora": {"rank": 8, "alpha": 16.0, **lora},
        },
        source="test",
    )


def make_start(folder: Path, spec: ModelSpec) -> Path:
    """A model to start from."""
    chat = ChatTemplate.train(["def f(a):\n    return a\n"], spec.vocab_size)
    model = Decoder(spec)
    model.initialise(0, std=0.2)
    save_checkpoint(folder, spec, state_of(model), end_id=chat.end_id, pad_id=chat.pad_id)
    chat.save(folder)
    return folder


def make_run(path: Path, spec: ModelSpec, dtype: str = "float32", experts: str = "plain", **lora: object) -> RunFolder:
    """A run that has published version 0 of its adapter."""
    origin = make_start(path / "start", spec)
    folder = RunFolder.create(path / "run", config_of(origin, dtype, experts, **lora))
    with EventLog(folder.events, "test") as events, StoreOutages(folder.store, 1.0, events) as outages:
        publish_start(folder, origin, events, outages)
    return folder


def base_for(folder: RunFolder) -> FrozenBase:
    base = frozen_base(folder.model, folder.config())
    assert base is not None
    return base


def logits(model: CausalModel) -> Tensor:
    with torch.inference_mode():
        return model.logits(model.forward_packed(IDS))


def train(model: CausalModel, config: RunConfig, steps: int = 2) -> Optimisation:
    """Steps towards the likelihood of some ids; the rate is high, so that weights really move."""
    optimisation = optimisation_of(model, config.model_copy(update={"trainer": config.trainer.model_copy(
        update={"learning_rate": 0.02, "warmup_steps": 1})}))  # fmt: skip
    for step in range(1, steps + 1):
        scores = model.logits(model.forward_packed(IDS)).log_softmax(-1)
        optimisation.step(step, [-scores[:-1].gather(1, IDS[1:, None]).mean()])
    return optimisation


@pytest.mark.parametrize(
    ("name", "dtype", "experts"),
    [*product(SPECS, ["float32", "bfloat16"], ["plain"]), ("grouped", "bfloat16", "nvfp4")],
)
def test_what_is_trained_is_what_is_published_and_served_to_the_last_bit(
    tmp_path: Path, name: str, dtype: str, experts: str
) -> None:
    folder = make_run(tmp_path, SPECS[name], dtype, experts)
    config, base, log = folder.config(), base_for(folder), open_log(folder)
    first = pull(log, 0)
    updater = NativeUpdater.open(
        first,
        EngineConfig(),
        partial(serving_model, SPECS[name], config.numerics, "cpu", base),
        partial(load_published, config=config.numerics),
    )
    policy = policy_model(folder, config, None, log, base)
    assert torch.equal(logits(policy), logits(updater.engine.weights.model))
    before = logits(policy)
    frozen = {name: each.clone() for name, each in policy.named_parameters() if not each.requires_grad}
    train(policy, config)
    assert not torch.equal(logits(policy), before)
    for each, parameter in policy.named_parameters():
        assert each not in frozen or (parameter.grad is None and torch.equal(parameter, frozen[each]))
    with Publisher(log) as publisher, Receiver(log) as receiver:
        receiver.advance()
        record = publisher.publish(to_stored(published_state(policy, config.numerics)), version=1, step=1).result()
        arrival = receiver.advance()
        swap = updater.stage(WeightUpdate(weights=receiver.weights(), changed=receiver.changed(arrival)))
        asyncio.run(pause(swap))
    served = updater.engine.weights
    assert (served.version, served.digest) == (1, record.digest) and record.base == 0
    assert updater._residents[0].digest() == record.digest
    assert torch.equal(logits(policy), logits(served.model))
    parity = check_parity(SPECS[name], to_tensors(pull(log, 1).state), config.numerics, "cpu", base)
    assert parity.exact, parity.first


async def pause(swap: Swap) -> float:
    return await swap()


def test_a_checkpoint_and_the_log_hold_the_adapter_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path, TINY)
    config, log, base = folder.config(), open_log(folder), base_for(folder)
    policy = policy_model(folder, config, None, log, base)
    optimisation = train(policy, config, steps=1)
    adapter = sum(each.numel() for each in policy.parameters() if each.requires_grad)
    everything = sum(each.numel() for each in policy.parameters())
    logged = sum(tensor.numel() for tensor in to_tensors(pull(log, 0).state).values())
    assert logged == adapter + 17  # the base's digest, and the scale
    assert adapter < everything / 2
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, optimisation.tensors())
    assert all("lora" in each or "adapters" in each or "correction" in each for each in checkpoints.load(1))
    other = training_model(TINY, config.numerics, "cpu", base)
    optimisation_of(other, config).restore(checkpoints.load(1))
    assert torch.equal(logits(other), logits(policy))


def bytes_of(model: CausalModel, optimisation: Optimisation) -> int:
    """Weights, gradients and moments of a trainer, as they are in memory."""
    parameters = list(model.parameters())
    moments = [tensor for name, tensor in optimisation.tensors().items() if "exp_avg" in name]
    grads = [each.grad for each in parameters if each.grad is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *grads, *moments))


def test_what_is_frozen_has_neither_gradient_nor_moments(tmp_path: Path) -> None:
    """The figures of docs/lora.md."""
    folder = make_run(tmp_path, TINY_LATENT, "bfloat16")
    config = folder.config()
    adapted = training_model(TINY_LATENT, config.numerics, "cpu", base_for(folder))
    whole = training_model(TINY_LATENT, config.numerics, "cpu")
    assert isinstance(whole, Decoder)
    whole.initialise(0)
    assert bytes_of(adapted, train(adapted, config, steps=1)) == 60_120 * 2 + 30_528 * 16
    assert bytes_of(whole, train(whole, config, steps=1)) == 60_120 * 16


def test_models_of_one_process_share_the_base(tmp_path: Path) -> None:
    base = base_for(make_run(tmp_path, TINY))
    one, other = base.model("cpu", torch.float32), base.model("cpu", torch.float32)
    shared = [a is b for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    assert shared == [not each.requires_grad for each in one.parameters()]


def test_an_adapter_is_laid_over_no_other_base(tmp_path: Path) -> None:
    folder = make_run(tmp_path, TINY)
    state = to_tensors(pull(open_log(folder), 0).state)
    other = Decoder(TINY)
    other.initialise(1)
    save_checkpoint(folder.model, TINY, state_of(other), end_id=1, pad_id=0)
    with pytest.raises(DamagedError, match=f"trained on the weights {base_of(state)[:12]}"):
        load_state(base_for(folder).model("cpu", torch.float32), state)


@pytest.mark.parametrize("name", SPECS)
def test_an_export_is_merged_or_a_peft_folder_that_a_run_can_start_from(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path, SPECS[name])
    config, log, base = folder.config(), open_log(folder), base_for(folder)
    policy = policy_model(folder, config, None, log, base)
    train(policy, config)
    with Publisher(log) as publisher:
        publisher.publish(to_stored(published_state(policy, config.numerics)), version=1, step=1).result()
    export_run(folder, tmp_path / "merged", None)
    spec, state = load_checkpoint(tmp_path / "merged")
    merged = Decoder(spec, policy.arithmetic)
    load_state(merged, state)
    assert torch.allclose(logits(merged), logits(policy), atol=1e-5)
    export_run(folder, tmp_path / "peft", None, peft=True)
    again = make_run(tmp_path / "again", SPECS[name], start=str(tmp_path / "peft"))
    started = policy_model(again, again.config(), None, open_log(again), base_for(again))
    assert torch.equal(logits(started), logits(policy))
    with pytest.raises(UserError, match=r"set lora\.rank = 8 and lora\.alpha = 16"):
        make_run(tmp_path / "other", SPECS[name], start=str(tmp_path / "peft"), alpha=8.0)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"lora": {"rank": 4}}, "multiple of 8"),
        ({"lora": {"alpha": 4.0}}, "with lora.rank = 0"),
        ({"lora": {"rank": 8}}, "random weights"),
        ({"lora": {"rank": 8, "phases": ["rl"]}, "parallel": {"dp": 2}}, "one process"),
        ({"lora": {"rank": 8, "phases": ["rl"]}, "optimiser": {"kind": "muon"}}, "whole matrices"),
        ({"lora": {"rank": 8, "phases": ["sft"], "start": "x"}}, "no 'rl'"),
    ],
)
def test_what_adapters_do_not_go_with_is_refused(recipe: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(recipe, source="test")


def test_an_adapter_of_another_run_is_added_and_removed_over_http(tmp_path: Path) -> None:
    folder = make_run(tmp_path, TINY)
    served = serving_model(TINY, folder.config().numerics, "cpu", base_for(folder))
    stranger = make_run(tmp_path / "stranger", TINY_DENSE)

    async def play() -> None:
        engine = NativeEngine(Weights(served, 0, "own"), EngineConfig(), seed=0)
        stepping = asyncio.create_task(engine.run())
        app = engine_app(engine, "", adapter_routes(engine))
        async with TestClient(TestServer(app)) as client:

            async def post(path: str, **body: object) -> tuple[int, dict[str, object]]:
                response = await client.post(path, json=body)
                return response.status, await response.json()

            record = pull(open_log(folder), 0)
            answer = await post("/v1/load_lora_adapter", lora_name="tenant", lora_path=folder.store)
            assert answer == (200, {"version": 0, "digest": record.digest})
            assert await (await client.get("/v1/adapters")).json() == {"tenant": answer[1]}
            prompt = {"prompt_ids": [1, 2, 3], "session": "", "max_tokens": 2, "adapter": "tenant"}
            assert (await client.post("/generate", json=prompt)).status == 200
            status, error = await post("/v1/load_lora_adapter", lora_name="stranger", lora_path=stranger.store)
            assert status == 400 and "trained on the weights" in str(error)
            assert (await post("/v1/unload_lora_adapter", lora_name="tenant"))[0] == 200
            assert (await post("/generate", **prompt))[0] == 400
        stepping.cancel()

    asyncio.run(play())


def test_rows_of_one_step_have_adapters_of_their_own(tmp_path: Path) -> None:
    """Three adapters are used: the run's, which is exchanged meanwhile, and two temporary ones."""
    folder = make_run(tmp_path, TINY)
    config, base = folder.config(), base_for(folder)
    models = {name: training_model(TINY, config.numerics, "cpu", base) for name in ("", "one", "other")}
    for seed, model in enumerate(models.values()):
        generator = torch.Generator().manual_seed(seed)
        moved = {key: torch.randn(each.shape, generator=generator) * 0.3 for key, each in state_of(model).items()}
        load_state(model, state_of(model) | {key: each for key, each in moved.items() if "lora" in key})
    served = serving_model(TINY, config.numerics, "cpu", base)
    load_published(served, state_of(models[""]), config.numerics)
    prompt = [*range(1, 40)]

    async def play() -> None:
        engine = NativeEngine(Weights(served, 7, "own"), EngineConfig(), seed=0)
        for version, name in ((3, "one"), (4, "other")):
            engine.adapters.add(name, state_of(models[name]), version=version, digest=name)
        stepping = asyncio.create_task(engine.run())
        ask = partial(engine.generate, prompt, session="")
        for _ in range(2):  # the second time prefixes are found in the cache
            names = ["", "one", "other", "one", ""]
            answers = await asyncio.gather(*(ask(SamplingParams(max_tokens=12, adapter=name)) for name in names))
            for name, answer in zip(names, answers, strict=True):
                ids = torch.tensor([*prompt, *answer.token_ids.tolist()])
                with torch.inference_mode():
                    hidden = models[name].forward_packed(ids)[len(prompt) - 1 : -1]
                    logits = models[name].logits(hidden)
                    expected = models[name].arithmetic.logprobs(logits, ids[len(prompt) :], torch.ones(12), None)
                assert answer.logprobs.tolist() == expected.tolist(), name
                assert set(answer.versions.tolist()) == {{"": 7, "one": 3, "other": 4}[name]}
        last = asyncio.create_task(ask(SamplingParams(max_tokens=12, adapter="one")))
        await asyncio.sleep(0)
        engine.adapters.remove("one")
        assert len((await last).token_ids) == 12
        with pytest.raises(ValueError, match="no adapter 'one', only \\['other'\\]"):
            await ask(SamplingParams(max_tokens=1, adapter="one"))
        engine._scheduler.check()
        stepping.cancel()

    asyncio.run(play())
