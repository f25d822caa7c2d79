"""Who takes the optimiser steps of `bench trainer`, behind one call each, and on what.

This file is also imported by the Python of TRL's environment, in which étude is not installed: what only one contestant
needs is imported when it is made.

Array legend: L tokens of a sequence.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, final

Settings: TypeAlias = dict[str, str | int | float | bool]
"""Setup of a contestant, for reports."""

SHORTEST, MEDIAN, SPREAD = 32, 180, 0.6
"""Minimum, median and spread of the log-normal lengths of sequences, as in rollouts: most are short, some several times
as long."""
SAMPLED_SHARE = 0.4
"""Tokens that a model sampled, which alone have a loss; they come in turns."""
TURN = 20
"""Tokens of a turn, sampled and read alike."""
SYSTEM, TASK, REPLY = 26, 22, 14
"""Tokens of a conversation of SFT, on average, as in recipes/pretrained: its harness's system message, which all have,
its task, its reply.
"""
LEARNING_RATE, BETAS, CLIP_NORM = 1e-4, (0.9, 0.95), 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Start parameters of a contestant; sent to its process as JSON."""

    contestant: str
    folder: str
    """The Hugging Face checkpoint."""
    device: str
    dtype: str
    """Type of the forward pass; parameters and moments are float32."""
    threads: int
    vocabulary: int
    sequences: int
    """Sequences of one step."""
    longest: int
    microbatch_tokens: int
    """Tokens of one forward and backward pass, including padding; and no more rows than would fit at their longest."""
    steps: int
    """Timed steps, after an untimed one."""
    seed: int
    conversations: bool = False
    """True for SFT: the sequences are short conversations with one system message."""

    def __post_init__(self) -> None:
        if self.sequences % self.rows:
            raise ValueError(f"sequences={self.sequences} must be whole passes of {self.rows} rows: steps would mix")

    @property
    def rows(self) -> int:
        """Rows of one pass, for contestants that count rows."""
        return max(1, self.microbatch_tokens // self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One trajectory to train on."""

    token_ids: list[int]
    sampled: list[bool]


def sequences(setup: Setup) -> list[Example]:
    """The sequences of every step, longest first: equal for equal seeds on every machine."""
    source = random.Random(setup.seed)
    if setup.conversations:
        system = _random_ids(source, SYSTEM, setup.vocabulary)
        return sorted((_conversation(source, system, setup.vocabulary) for _ in range(setup.sequences)), key=_shortness)
    lengths = (
        min(setup.longest, max(SHORTEST, round(source.lognormvariate(0.0, SPREAD) * MEDIAN)))
        for _ in range(setup.sequences)
    )
    return [_sequence(source, length, setup.vocabulary) for length in sorted(lengths, reverse=True)]


def _conversation(source: random.Random, system: list[int], vocabulary: int) -> Example:
    """A task of some length, and a reply of some."""
    task, reply = (source.randint(mean // 2, mean + mean // 2) for mean in (TASK, REPLY))
    own = _random_ids(source, task + reply, vocabulary)
    return Example(token_ids=[*system, *own], sampled=[False] * (len(system) + task) + [True] * reply)


def _shortness(example: Example) -> int:
    return -len(example.token_ids)


def _random_ids(source: random.Random, count: int, vocabulary: int) -> list[int]:
    return [source.randrange(vocabulary) for _ in range(count)]


def _sequence(source: random.Random, length: int, vocabulary: int) -> Example:
    """The first turn is read."""
    turns = [turn and source.random() < SAMPLED_SHARE for turn in range(-(-length // TURN))]
    return Example(
        token_ids=_random_ids(source, length, vocabulary),
        sampled=[bool(turns[place // TURN]) for place in range(length)],
    )


class Turns(Protocol):
    """Stamps steps, which are taken when it is one's turn."""

    def begin(self) -> None:
        """Wait for the turn; from then on time counts."""
        ...

    def end(self) -> None:
        """The step is done."""
        ...


class Contestant(Protocol):
    """One way to take optimiser steps: forward, backward and update."""

    @property
    def settings(self) -> Settings:
        """Settings, with versions."""
        ...

    def run(self, turns: Turns) -> None:
        """Take all steps, each between ``begin`` and ``end``."""
        ...


# ── étude ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@final
class Etude:
    """Our trainer on the policy-gradient loss, in one of its arithmetics; sequences lie back to back."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from etude.config.inference import NumericsConfig
        from etude.models.checkpoint import load_checkpoint, load_state
        from etude.run.numerics import training_model
        from etude.trainer.batching.packing import Cost, pack

        torch.set_num_threads(setup.threads)
        arithmetic = setup.contestant.removeprefix("etude-")
        numerics = NumericsConfig.model_validate({"arithmetic": arithmetic, "dtype": setup.dtype, "replay": "off"})
        spec, state = load_checkpoint(Path(setup.folder))
        model = training_model(spec, numerics, setup.device).train()
        load_state(model, state)
        self._trainer = policy_trainer(model, numerics, steps=setup.steps + 1)
        trajectories = [trajectory_of(index, one) for index, one in enumerate(sequences(setup))]
        cost = Cost.of_model(spec)
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        (passes,) = pack(lengths, max_tokens=setup.microbatch_tokens, ranks=1, cost=cost)
        self._microbatches = [[trajectories[index] for index in chunk] for chunk in passes]
        self._steps = setup.steps
        self.settings: Settings = {
            "arithmetic": arithmetic,
            "rows": "packed",
            "passes": len(passes),
            "torch": torch.__version__,
        }

    def run(self, turns: Turns) -> None:
        """See the protocol."""
        from etude.trainer.losses import Totals

        totals = Totals(
            tokens=sum(int(t.loss_mask.sum()) for chunk in self._microbatches for t in chunk),
            trajectories=sum(map(len, self._microbatches)),
        )
        for step in range(1, self._steps + 2):
            turns.begin()
            self._trainer.step(step, self._microbatches, totals)
            turns.end()


@final
class EtudeSft:
    """Our SFT, as the phase of a run takes its steps."""

    def __init__(self, setup: Setup) -> None:
        import numpy as np
        import torch

        from etude.config.loading import default_recipe
        from etude.config.training import OptimiserConfig
        from etude.models.shared_rows import shared_rows
        from etude.run.phase_models import prepare, read_model
        from etude.trainer.imitation import ImitationTrainer
        from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
        from etude.types import Document

        torch.set_num_threads(setup.threads)
        model = read_model(Path(setup.folder))
        prepare(model, default_recipe([f"numerics.dtype={setup.dtype}", f"trainer.device={setup.device}"]))
        optimiser = build_optimiser(model, OptimiserConfig(), learning_rate=LEARNING_RATE, betas=BETAS)
        schedule = RateSchedule(steps=setup.steps + 1, warmup_steps=1)
        self._trainer = ImitationTrainer(Optimisation(model, optimiser, schedule, clip_norm=CLIP_NORM))
        examples = sequences(setup)
        self._documents = [
            Document(token_ids=np.array(one.token_ids, np.int32), weights=np.array(one.sampled, np.float32))
            for one in examples
        ]
        self._steps = setup.steps
        ids = [token for one in examples for token in one.token_ids]
        shared = shared_rows(ids, [len(one.token_ids) for one in examples])
        self.settings: Settings = {
            "rows": "packed",
            "rows_computed": 1.0 if shared is None else round(len(shared.firsts_U) / len(ids), 3),
            "torch": torch.__version__,
        }

    def run(self, turns: Turns) -> None:
        """See the protocol."""
        for step in range(1, self._steps + 2):
            turns.begin()
            self._trainer.step(step, [self._documents])
            turns.end()


def policy_trainer(model: Any, numerics: Any, *, steps: int) -> Any:
    """Our trainer on the policy-gradient loss, for a model on its device."""
    from etude.config.training import LossConfig, OptimiserConfig
    from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
    from etude.trainer.policy import PolicyTrainer

    optimiser = build_optimiser(model, OptimiserConfig(), learning_rate=LEARNING_RATE, betas=BETAS)
    schedule = RateSchedule(steps=steps, warmup_steps=1)
    return PolicyTrainer(Optimisation(model, optimiser, schedule, clip_norm=CLIP_NORM), LossConfig(), numerics)


def trajectory_of(index: int, sequence: Example) -> Any:
    """A sequence as a rollout has it: the engine found each sampled token fairly unlikely; rewards differ."""
    import numpy as np

    from etude.types import UNSAMPLED, Trajectory

    mask_L = np.array(sequence.sampled, bool)
    return Trajectory(
        rollout_id=str(index),
        token_ids=np.array(sequence.token_ids, np.int32),
        loss_mask=mask_L,
        logprobs=np.where(mask_L, np.float32(-5.0), np.float32(0.0)),
        versions=np.where(mask_L, 0, UNSAMPLED).astype(np.int32),
        temperatures=np.ones(len(mask_L), np.float32),
        turn_starts=tuple(np.flatnonzero(np.diff(mask_L.astype(np.int8)) == 1) + 1),
        advantages=np.where(mask_L, np.float32(1.0 if index % 2 else -1.0), np.float32(0.0)),
    )


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────────────


class Transformers:
    """``transformers.Trainer`` on the next-token loss of the same tokens.

    ``padded``: rows of like length, padded to the longest of their pass. ``packed``: rows laid back to back by
    ``DataCollatorWithFlattening``, whose attention sdpa masks by positions.
    """

    def __init__(self, setup: Setup) -> None:
        import torch

        transformers: Any = import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(setup.threads)
        self._rows = setup.contestant.rpartition("-")[2]
        self._setup = setup
        self._arguments: Any = transformers.TrainingArguments
        self._trainer: Any = transformers.Trainer
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.settings: Settings = {
            "version": transformers.__version__,
            "rows": self._rows,
            "attention": str(self._model.config._attn_implementation),
            "experts": str(getattr(self._model.config, "_experts_implementation", None)),
            "torch": torch.__version__,
        }

    def run(self, turns: Turns) -> None:
        """See the protocol."""
        setup, examples = self._setup, self._examples()
        arguments = self._arguments(
            output_dir=str(Path(setup.folder) / "trainer"),
            max_steps=setup.steps + 1,
            per_device_train_batch_size=setup.rows,
            gradient_accumulation_steps=setup.sequences // setup.rows,
            learning_rate=LEARNING_RATE,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP_NORM,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            bf16=setup.dtype == "bfloat16",
            use_cpu=setup.device == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        trainer = self._trainer(
            model=self._model,
            args=arguments,
            train_dataset=examples * (setup.steps + 1),
            data_collator=self._collator(),
            callbacks=[_turns(turns)],
        )
        trainer.train()

    def _examples(self) -> list[dict[str, list[int]]]:
        return [
            {
                "input_ids": one.token_ids,
                "labels": [
                    token if sampled else -100 for token, sampled in zip(one.token_ids, one.sampled, strict=True)
                ],
            }
            for one in sequences(self._setup)
        ]

    def _collator(self) -> Any:
        transformers: Any = import_module("transformers")
        return transformers.DataCollatorWithFlattening() if self._rows == "packed" else _padded


@final
class Trl(Transformers):
    """TRL's ``SFTTrainer`` on the same rows."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        trl: Any = import_module("trl")
        datasets: Any = import_module("datasets")
        tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(setup.folder)
        self._arguments = partial(
            trl.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False
        )
        self._trainer = lambda *, train_dataset, **given: trl.SFTTrainer(
            train_dataset=datasets.Dataset.from_list(train_dataset), processing_class=tokenizer, **given
        )
        self.settings = {**self.settings, "trl": trl.__version__}


def _padded(examples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    import torch

    longest = max(len(example["input_ids"]) for example in examples)
    filled = {
        name: [[*example[name], *[filler] * (longest - len(example[name]))] for example in examples]
        for name, filler in (("input_ids", 0), ("labels", -100))
    }
    mask = [[1] * len(e["input_ids"]) + [0] * (longest - len(e["input_ids"])) for e in examples]
    return {name: torch.tensor(rows) for name, rows in (filled | {"attention_mask": mask}).items()}


def _turns(turns: Turns) -> Any:
    transformers: Any = import_module("transformers")

    class Taken(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_step_begin(self, *_arguments: Any, **_options: Any) -> None:
            turns.begin()

        def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
            turns.end()

    return Taken()


# ── both ────────────────────────────────────────────────────────────────────────────────────────────────────────────

CONTESTANTS: Mapping[str, Callable[[Setup], Contestant]] = MappingProxyType(
    {
        "etude-invariant": Etude,
        "etude-fast": Etude,
        "etude-sft": EtudeSft,
        "transformers-padded": Transformers,
        "transformers-packed": Transformers,
        "trl-padded": Trl,
    }
)
"""Everyone, ours first."""
