"""TRL's ``GRPOTrainer`` at work for `bench loop`: runs in TRL's environment, without étude.

    environments, grades  ◀──one request at a time──  this program  ──steps, saved checkpoints──▶  trl.py

It is TRL as its documentation has multi-turn environments: an ``environment_factory`` whose one tool carries a call
out, TRL's own loop of generating and calling, transformers' ``generate``. The model, the tasks, the text of every
message, the limits, the loss (token mean over the batch, no standard deviation, no reference), the optimiser and its
schedule are étude's. Environments and hidden tests are étude's, too, at the other end of the pipe.

Imports only the standard library and the packages that are measured.
"""

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import IO, Any, final

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""étude's chat format without a list of tools: the model was never shown one."""
ROWS = 32
"""Rollouts of one forward and backward pass; more would only be padded further."""


@final
class Link:
    """The way to the bench."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self.seconds = 0.0
        """Seconds of requests since the step began."""

    def tell(self, **message: Any) -> None:
        """Send a message without an answer."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message and wait for the answer."""
        started_s = time.perf_counter()
        self.tell(**message)
        answer: dict[str, Any] = json.loads(sys.stdin.readline())
        self.seconds += time.perf_counter() - started_s
        return answer


def environment(link: Link) -> type:
    """The environment class, of which TRL makes an instance for every rollout of a batch and reuses it."""
    made: list[object] = []

    class Environment:
        def __init__(self) -> None:
            self.number = len(made)
            made.append(self)

        def reset(self, **row: Any) -> None:
            link.ask(verb="reset", environment=self.number, task=row["index"])

        def act(self, call: str) -> str:
            """Carry out a call of the text tools.

            Args:
                call: The call.
            """
            observation: str = link.ask(verb="act", environment=self.number, call=call)["observation"]
            return observation

    return Environment


def text_tokenizer(setup: dict[str, Any]) -> Any:
    """The checkpoint's tokenizer, for which a whole reply is one call, unless it submits or was cut."""
    transformers: Any = import_module("transformers")

    class TextTools(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers has no types here
        def parse_response(self, response: list[int], prefix: Any = None) -> dict[str, Any]:
            text = self.decode(response, skip_special_tokens=True)
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if response[-1] == self.eos_token_id and text.rstrip() != setup["submit"]:
                message["tool_calls"] = [{"type": "function", "function": {"name": "act", "arguments": {"call": text}}}]
            return message

    tokenizer = TextTools.from_pretrained(setup["model"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {}  # says that replies can be parsed; how, is above
    return tokenizer


def grader(link: Link, end_id: int) -> Any:
    """étude's hidden tests, of the whole batch at once."""

    def hidden_tests(
        completions: list[Any], completion_ids: list[list[int]], environments: list[Any], **_others: Any
    ) -> list[float]:
        replies = [
            [environment.number, messages[-1]["content"], ids[-1] == end_id]
            for environment, messages, ids in zip(environments, completions, completion_ids, strict=True)
        ]
        rewards: list[float] = link.ask(verb="grade", replies=replies)["rewards"]
        return rewards

    return hidden_tests


def measured_trainer(link: Link) -> type:
    """``GRPOTrainer`` with a clock in it."""
    trl: Any = import_module("trl")

    class Measured(trl.GRPOTrainer):  # type: ignore[misc]  # TRL is not installed where types are checked
        generate_s = 0.0
        trained_tokens = 0
        signal_tokens = 0

        def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            answer = super()._generate_single_turn(*arguments, **options)
            self.generate_s += time.perf_counter() - started_s
            return answer

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            tokens_B = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
            self.trained_tokens += int(tokens_B.sum())
            self.signal_tokens += int(tokens_B[batch["advantages"] != 0].sum())
            return batch

        def report(self, step: int, clock_s: float, seconds: float) -> None:
            link.tell(
                verb="step",
                step=step,
                clock_s=clock_s,
                seconds=seconds,
                generate_s=self.generate_s,
                sandbox_s=link.seconds,
                trained_tokens=self.trained_tokens,
                signal_tokens=self.signal_tokens,
            )
            self.generate_s, self.trained_tokens, self.signal_tokens, link.seconds = 0.0, 0, 0, 0.0

    return Measured


def stopwatch(link: Link, setup: dict[str, Any]) -> Any:
    """The callback that reports steps and saves checkpoints; the clock is stopped meanwhile."""
    transformers: Any = import_module("transformers")

    class Stopwatch(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        trainer: Any = None
        _began_s = _paused_s = _step_s = 0.0

        def on_train_begin(self, *_arguments: Any, **_options: Any) -> None:
            self._began_s = time.perf_counter()

        def on_step_begin(self, *_arguments: Any, **_options: Any) -> None:
            self._step_s = time.perf_counter()

        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_options: Any) -> None:
            now_s = time.perf_counter()
            self.trainer.report(state.global_step, now_s - self._began_s - self._paused_s, now_s - self._step_s)
            if state.global_step in setup["checkpoints"]:
                self.trainer.model.save_pretrained(Path(setup["out"]) / f"step-{state.global_step}")
            self._paused_s += time.perf_counter() - now_s

    return Stopwatch()


def train(link: Link, setup: dict[str, Any]) -> None:
    """All steps."""
    torch, transformers, trl, datasets = map(import_module, ("torch", "transformers", "trl", "datasets"))
    torch.set_num_threads(setup["threads"])
    tokenizer = text_tokenizer(setup)
    model = transformers.AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.float32)
    rows = min(ROWS, setup["rollouts"])
    config = trl.GRPOConfig(
        output_dir=setup["out"],
        seed=setup["seed"],
        max_steps=setup["steps"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=setup["rollouts"] // rows,
        gradient_checkpointing=False,
        num_generations=setup["group_size"],
        shuffle_dataset=False,
        max_completion_length=setup["max_length"],
        generation_kwargs={"max_new_tokens": setup["max_tokens_per_turn"]},
        max_tool_calling_iterations=setup["max_turns"] - 1,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        router_aux_loss_coef=0.0,
        max_grad_norm=setup["clip_norm"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=setup["learning_rate"], betas=setup["betas"], weight_decay=0.0, fused=True
    )
    shares = setup["rate_shares"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: shares[min(step, len(shares) - 1)])
    prompts = json.loads(Path(setup["prompts"]).read_text(encoding="utf-8"))
    watch = stopwatch(link, setup)
    watch.trainer = measured_trainer(link)(
        model=model,
        args=config,
        reward_funcs=grader(link, tokenizer.eos_token_id),
        environment_factory=environment(link),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}], "index": index} for index, text in enumerate(prompts)]
        ),
        processing_class=tokenizer,
        optimizers=(optimiser, schedule),
        callbacks=[watch],
    )
    versions = {package: import_module(package).__version__ for package in ("trl", "transformers", "torch")}
    link.tell(verb="ready", settings=versions | {"rows": rows, "threads": setup["threads"]})
    watch.trainer.train()


def main() -> None:
    """Train, and tell of it on standard output; libraries print to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        train(Link(answers), json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
