"""The whole algorithm in one file and one process: mid-training, then reinforcement learning of a coding agent.

No HTTP, no ledger, no weight store, no asynchrony between trainer and engine: what is left is the loop itself. The
real run does the same with every arrow durable and every box a process of its own (`etude run recipes/quickstart`).
The recipe is the public API's (docs/python.md); the boxes are étude's own modules, opened up here to be read and
changed, and they may change.

    python examples/rl_loop.py          about a minute on a laptop
"""

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

import etude
from etude.config.rollouts import CodingOptions
from etude.config.tasks import BugfixOptions
from etude.config.training import ModelShape
from etude.engines.native.engine import NativeEngine, Weights
from etude.harnesses import tools
from etude.harnesses.coding import observe
from etude.models.checkpoint import spec_from_shape
from etude.models.decoder import Decoder
from etude.protocols import HarnessResult, SamplingParams, turn_of
from etude.rewards.graders.functions import HiddenTests
from etude.run.phase_models import optimisation_of
from etude.sandboxes.local.provider import LocalSandboxes
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.corpus import demonstration_sources, tokenizer_texts
from etude.tasks.corpora.mixture import BatchStream, Cursor, Mixture, Side
from etude.tasks.corpora.texts import PlainText
from etude.tasks.corpora.transcripts import BugfixDemonstrations
from etude.tokens.chat import ChatTemplate
from etude.trainer.batching.batch import build_batch
from etude.trainer.batching.packing import Cost, pack
from etude.trainer.imitation import ImitationTrainer
from etude.trainer.losses import LossTokens, Totals, policy_loss
from etude.trainer.scores import sampled_logprobs, sampled_tokens
from etude.types import Batch, Group, Rollout, RolloutStatus, Split, Task, Turn

SEED = 0
TASKS_PER_STEP, GROUP_SIZE, STEPS = 8, 8, 12
HELDOUT_TASKS = 64
LEARNING_RATE = 5e-4
PASS_TOKENS = 8_000

RECIPE = etude.Recipe(
    {
        "tasks": {"options": {"kinds": ["arith"]}},
        "midtrain": {"tokens": 700_000, "batch_tokens": 2_000},
        "harness": {"options": {"max_turns": 6}},
        "engine": {"max_running": 64, "max_length": 512},
    }
).config
TASKS = cast(BugfixOptions, RECIPE.tasks.options)
HARNESS = cast(CodingOptions, RECIPE.harness.options)
SHAPE = cast(ModelShape, RECIPE.model.shape)


@dataclass(frozen=True)
class Components:
    """Chat format, engine and sandboxes of a rollout."""

    chat: ChatTemplate
    engine: NativeEngine
    sandboxes: LocalSandboxes


async def play(task: Task, components: Components, name: str, temperature: float) -> Rollout:
    """One rollout: prompt, tool calls in a sandbox, a reward from hidden tests."""
    sandbox = await components.sandboxes.create(task.files)
    turns: list[Turn] = []
    context = components.chat.render_message("user", task.prompt)
    reason = "turns"
    for _ in range(HARNESS.max_turns):
        prompt_ids = context + components.chat.generation_prompt()
        params = SamplingParams(
            max_tokens=HARNESS.max_tokens_per_turn, temperature=temperature, stop_ids=(components.chat.end_id,)
        )
        sampled = await components.engine.generate(prompt_ids, params, session=name)
        turns.append(turn_of(prompt_ids, params, sampled))
        call = tools.parse_call(components.chat.decode(sampled.token_ids.tolist()))
        if isinstance(call, tools.Submit):
            reason = tools.SUBMIT
            break
        # The next prompt continues these very tokens: text is never tokenised twice.
        observation = components.chat.render_message("user", await observe(call, task.checks, sandbox))
        context = prompt_ids + sampled.token_ids.tolist() + observation
    reward = await HiddenTests().grade(task, sandbox, HarnessResult(reason=reason, counts={}))
    await sandbox.close()
    return Rollout(
        rollout_id=name,
        group_index=0,
        slot=0,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=reward.value,
        reason=reason,
        turns=tuple(turns),
    )


async def play_groups(tasks: Sequence[Task], components: Components, version: int) -> list[Group]:
    """``GROUP_SIZE`` rollouts of every task, all at once."""
    names = [[f"{version}/{t}/{slot}" for slot in range(GROUP_SIZE)] for t in range(len(tasks))]
    games = [play(task, components, name, 1.0) for task, row in zip(tasks, names, strict=True) for name in row]
    rollouts = await asyncio.gather(*games)
    return [
        Group(index=i, task=task, admitted_version=version, rollouts=tuple(rollouts[i * GROUP_SIZE :][:GROUP_SIZE]))
        for i, task in enumerate(tasks)
    ]


async def pass_rate(tasks: Sequence[Task], components: Components, label: str, temperature: float) -> float:
    """Share of held-out tasks solved at the first try."""
    rollouts = await asyncio.gather(*(play(t, components, f"{label}/{i}", temperature) for i, t in enumerate(tasks)))
    return sum(rollout.reward or 0.0 for rollout in rollouts) / len(tasks)


def train_step(model: Decoder, optimiser: torch.optim.Optimizer, batch: Batch) -> None:
    """One optimiser step: truncated importance weight × advantage × log-probability, mean over the batch's tokens."""
    if not batch.trajectories:
        return
    optimiser.zero_grad()
    totals = Totals(tokens=batch.num_loss_tokens, trajectories=len(batch.trajectories))
    lengths = [len(trajectory.token_ids) for trajectory in batch.trajectories]
    (passes,) = pack(lengths, max_tokens=PASS_TOKENS, ranks=1, cost=Cost(per_token=1.0, per_pair=0.0))
    for chunk in passes:
        trajectories = [batch.trajectories[index] for index in chunk]
        tokens = sampled_tokens(trajectories, [one.loss_mask for one in trajectories], model.embedding.device)
        of_loss = LossTokens(
            logprobs_N=sampled_logprobs(model, tokens),
            engine_logprobs_N=tokens.engine_logprobs_N,
            advantages_N=tokens.advantages_N,
            trajectories_N=tokens.trajectories_N,
        )
        policy_loss(of_loss, RECIPE.loss, totals).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def mid_train(family: BugfixFamily) -> tuple[ChatTemplate, Decoder]:
    """From random weights to an agent that knows the tools and works badly."""
    demonstrations = BugfixDemonstrations(family, BugfixOptions())
    chat = ChatTemplate.train(tokenizer_texts(demonstrations, SEED), vocab_size=512)
    model = Decoder(spec_from_shape(SHAPE, chat.vocab_size))
    model.initialise(SEED)
    side = Side(seed=SEED, one_in=20)
    sources = demonstration_sources(
        demonstrations, PlainText(chat), side, context_weight=RECIPE.midtrain.context_weight
    )
    stream = BatchStream(mixture=Mixture(shares=RECIPE.midtrain.shares, tokens=RECIPE.midtrain.tokens), sources=sources)
    steps = RECIPE.midtrain.tokens // RECIPE.midtrain.batch_tokens
    trainer = ImitationTrainer(optimisation_of(model, RECIPE, RECIPE.midtrain, steps=steps))
    cursor = Cursor()
    for step in range(1, steps + 1):
        documents, cursor = stream.batch(cursor, until=step * RECIPE.midtrain.batch_tokens)
        loss = trainer.step(step, [documents])
        print(f"  {step}/{steps} loss {loss.mean:.2f}", end="\r")
    return chat, model


async def main() -> None:
    """Mid-train, measure, learn, measure."""
    started_s = time.perf_counter()
    torch.set_num_threads(1)  # matrices this small are faster alone: two threads would wait for each other
    family = BugfixFamily(TASKS, seed=SEED)
    chat, model = mid_train(family)
    print(f"\nmid-trained after {time.perf_counter() - started_s:.0f} s")

    engine = NativeEngine(Weights(copy.deepcopy(model), 0, ""), RECIPE.engine, seed=SEED)
    stepping = asyncio.create_task(engine.run())
    components = Components(chat, engine, LocalSandboxes())
    heldout = [family.task(Split.HELDOUT, index) for index in range(HELDOUT_TASKS)]
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    print(f"held out, before: {await pass_rate(heldout, components, 'before', 1.0):.2f}")

    for step in range(1, STEPS + 1):
        tasks = [family.task(Split.TRAIN, step * TASKS_PER_STEP + i) for i in range(TASKS_PER_STEP)]
        batch = build_batch(step, await play_groups(tasks, components, version=step - 1))
        train_step(model, optimiser, batch)
        await engine.swap(Weights(copy.deepcopy(model), step, ""))
        print(f"step {step:2}: reward {batch.rewards.mean():.2f}, {batch.num_degenerate_groups} groups without signal")

    sampled, greedy = [await pass_rate(heldout, components, f"after {t}", t) for t in (1.0, 0.0)]
    print(f"held out, after: {sampled:.2f} (greedy {greedy:.2f}), {time.perf_counter() - started_s:.0f} s in all")
    stepping.cancel()
    await components.sandboxes.close()


if __name__ == "__main__":
    asyncio.run(main())
