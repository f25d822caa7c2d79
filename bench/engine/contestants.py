"""Everyone who samples in `bench engine` and `bench numerics`, behind one call each.

Each runs in a process of its own (``engine_worker.py``), with its own libraries: this file is also imported by the
Python of vLLM's environment, in which étude is not installed, so what only one contestant needs is imported when it is
made. All of them give the logprob of every sampled token, since without it there is no reinforcement learning.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, final

Settings: TypeAlias = dict[str, str | int | float | bool]
"""Setup of a contestant, for reports."""

PAGE_TOKENS = 256
"""Positions per page of transformers' cache: its own default."""
BATCH_TOKENS = 512
"""Tokens of one step of transformers' continuous batching: the fastest of 64 … 4096 at batch 64."""
RUNNING = 64
"""Sequences at a time that every contestant has room for."""
LENGTH = 512
"""Tokens of one sequence that every contestant has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Start parameters of a contestant; sent to its process as JSON."""

    contestant: str
    folder: str
    """The Hugging Face checkpoint."""
    dtype: str
    """``float32`` or ``bfloat16``: of weights and cache."""
    cores: tuple[int, ...]
    """The processors it may use, with a thread on each."""
    experts: str = "plain"
    """Number format of expert matrices, as ``[numerics] experts``; only the native engine has others than ``plain``."""
    routes: bool = False
    """True if requests will ask for routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Completions to sample, all at once, each to its full length."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    temperature: float
    """0 or 1."""
    seed: int
    stamped: bool = False
    """True if ``first_token_s`` is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion."""

    token_ids: list[int]
    logprobs: list[float]
    first_token_s: float | None = None
    """From the order to the first token."""
    routes: list[list[list[int]]] | None = None
    """[P + C − 1][sparse layers][k] experts of every token that was read."""


class Contestant(Protocol):
    """One way to sample."""

    @property
    def settings(self) -> Settings:
        """Settings, with versions."""
        ...

    def generate(self, order: Order) -> list[Sampled]:
        """Fill an order."""
        ...


# ── étude ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@final
class Native:
    """Our engine, in one of its arithmetics, with the event loop it has in a run."""

    def __init__(self, setup: Setup) -> None:
        import torch

        from bench.engine.models import load_served
        from etude.config.inference import EngineConfig, NativeOptions, NumericsConfig
        from etude.engines.native.engine import NativeEngine, Weights

        torch.set_num_threads(len(setup.cores))
        arithmetic = setup.contestant.removeprefix("native-")
        numerics = {"arithmetic": arithmetic, "dtype": setup.dtype, "experts": setup.experts}
        model = load_served(Path(setup.folder), NumericsConfig.model_validate(numerics))
        options = NativeOptions(threads=len(setup.cores))
        config = EngineConfig(max_running=RUNNING, max_length=LENGTH, options=options)
        self.engine = NativeEngine(Weights(model, 0, ""), config, seed=0, record_routes=setup.routes)
        self.settings: Settings = {"arithmetic": arithmetic, "experts": setup.experts, "torch": torch.__version__}
        self._routes = setup.routes
        self._loop = asyncio.new_event_loop()

    def generate(self, order: Order) -> list[Sampled]:
        """Fill an order."""
        return self._loop.run_until_complete(self._generate(order))

    async def _generate(self, order: Order) -> list[Sampled]:
        from etude.aio import background_task

        async with background_task(self.engine.run()):
            started_s = time.perf_counter()
            calls = (self._call(order, index, started_s) for index in range(len(order.prompts)))
            return list(await asyncio.gather(*calls))

    async def _call(self, order: Order, index: int, started_s: float) -> Sampled:
        from etude.protocols import SamplingParams

        params = SamplingParams(
            max_tokens=order.new_tokens,
            temperature=order.temperature,
            seed=order.seed + index,
            want_routes=self._routes,
        )
        prompt, session = order.prompts[index], f"{order.seed}-{index}"
        first_s: float | None = None
        if order.stamped:
            async for chunk in self.engine.stream(prompt, params, session=session):
                first_s = first_s or time.perf_counter() - started_s
                completion = chunk.completion
            assert completion is not None
        else:
            completion = await self.engine.generate(prompt, params, session=session)
        return Sampled(
            token_ids=completion.token_ids.tolist(),
            logprobs=completion.logprobs.tolist(),
            first_token_s=first_s,
            routes=None if completion.routes is None else completion.routes.tolist(),
        )


# ── vLLM ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@final
class Vllm:
    """vLLM's offline engine, all of it in one process so that the CPU seconds are all its own."""

    def __init__(self, setup: Setup) -> None:
        vllm: Any = import_module("vllm")
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=setup.folder,
            dtype=setup.dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=LENGTH,
            max_num_seqs=RUNNING,
            enable_prefix_caching=False,  # no prompt comes twice: it would only cost
            disable_log_stats=False,  # has the time of the first token
            logprobs_mode="processed_logprobs",
            seed=0,
        )
        self.settings: Settings = {
            "version": vllm.__version__,
            "torch": import_module("torch").__version__,
            "enforce_eager": True,
            "prefix_caching": False,
            "processes": 1,
        }

    def generate(self, order: Order) -> list[Sampled]:
        """Fill an order."""
        params = self._vllm.SamplingParams(  # without a seed of its own per call, which would be slower
            max_tokens=order.new_tokens,
            temperature=order.temperature,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,  # faster than a dictionary per token
        )
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in order.prompts]
        answers = self._llm.generate(prompts, params, use_tqdm=False)
        return [self._sampled(answer) for answer in answers]

    def _sampled(self, answer: Any) -> Sampled:
        output = answer.outputs[0]
        starts = output.logprobs.start_indices
        return Sampled(
            token_ids=list(output.token_ids),
            logprobs=[output.logprobs.logprobs[start] for start in starts],
            first_token_s=answer.metrics.first_token_latency,
        )


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────────────


def _transformers_model(setup: Setup) -> Any:
    """The checkpoint as transformers loads it: sdpa attention, grouped matmul of experts, which are its fastest."""
    import torch

    torch.set_num_threads(len(setup.cores))
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        setup.folder, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa"
    )
    return loaded.eval()


def _transformers_settings(model: Any) -> Settings:
    return {
        "version": import_module("transformers").__version__,
        "torch": import_module("torch").__version__,
        "attention": str(model.config._attn_implementation),
        "experts": str(getattr(model.config, "_experts_implementation", None)),
    }


def _generation_config(order: Order) -> Any:
    transformers: Any = import_module("transformers")
    drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if order.temperature else {}
    return transformers.GenerationConfig(max_new_tokens=order.new_tokens, eos_token_id=-1, pad_token_id=0, **drawing)


@final
class Generate:
    """transformers' ``generate``: one batch with a dynamic cache; can say which experts it used."""

    def __init__(self, setup: Setup) -> None:
        self._model = _transformers_model(setup)
        self.settings = _transformers_settings(self._model)
        self._routers = RouterTap(self._model) if setup.routes else None

    def generate(self, order: Order) -> list[Sampled]:
        """Fill an order; prompts must have one length."""
        import torch

        torch.manual_seed(order.seed)
        stamp = FirstStamp()
        with torch.inference_mode():
            answer = self._model.generate(
                torch.tensor(order.prompts),
                generation_config=_generation_config(order),
                stopping_criteria=[stamp],
                return_dict_in_generate=True,
                output_logits=True,
            )
            tokens_BC = answer.sequences[:, len(order.prompts[0]) :]
            logprobs_BCV = torch.stack(answer.logits, 1).float().log_softmax(-1)
            logprobs_BC = logprobs_BCV.gather(2, tokens_BC.unsqueeze(2)).squeeze(2)
        routes = [None] * len(order.prompts) if self._routers is None else self._routers.take(len(order.prompts))
        rows = zip(tokens_BC.tolist(), logprobs_BC.tolist(), routes, strict=True)
        return [
            Sampled(token_ids=tokens, logprobs=logprobs, first_token_s=stamp.seconds, routes=route)
            for tokens, logprobs, route in rows
        ]


@final
@dataclass(slots=True)
class FirstStamp:
    """A stopping criterion that stops nothing: transformers calls it after each token."""

    started_s: float = field(default_factory=time.perf_counter)
    seconds: float | None = None

    def __call__(self, ids: Any, scores: Any, **_others: Any) -> Any:
        """Never stop."""
        import torch

        if self.seconds is None:
            self.seconds = time.perf_counter() - self.started_s
        return torch.zeros(ids.shape[0], dtype=torch.bool)


@final
class RouterTap:
    """The experts that transformers' routers choose, seen as they choose them."""

    def __init__(self, model: Any) -> None:
        routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        self._seen: list[list[Any]] = [[] for _ in routers]
        for seen, router in zip(self._seen, routers, strict=True):
            router.register_forward_hook(_tap(seen))

    def take(self, batch: int) -> list[list[list[list[int]]]]:
        """[B][tokens][layers][k] of everything since the last call, which must have been ``batch`` equal rows."""
        import torch

        layers = [torch.cat([chosen_Nk.unflatten(0, (batch, -1)) for chosen_Nk in seen], 1) for seen in self._seen]
        for seen in self._seen:
            seen.clear()
        routes: list[list[list[list[int]]]] = torch.stack(layers, 2).tolist()
        return routes


def _tap(seen: list[Any]) -> Callable[..., None]:
    def see(_router: Any, _inputs: Any, outputs: tuple[Any, ...]) -> None:
        seen.append(outputs[-1])  # logits, scores, indices

    return see


@final
class ContinuousBatching:
    """transformers' continuous batching, with a cache that holds every sequence at once."""

    def __init__(self, setup: Setup) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model = _transformers_model(setup)
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=RUNNING * -(-LENGTH // PAGE_TOKENS),
            max_batch_tokens=BATCH_TOKENS,
            allow_block_sharing=False,  # no prompt comes twice: it would only cost
            return_logprobs=True,
        )
        self.settings = _transformers_settings(self._model) | {
            "page_size": PAGE_TOKENS,
            "max_batch_tokens": BATCH_TOKENS,
        }

    def generate(self, order: Order) -> list[Sampled]:
        """Fill an order."""
        import torch

        torch.manual_seed(order.seed)
        started_s = time.perf_counter()
        answers = self._model.generate_batch(
            [list(prompt) for prompt in order.prompts],
            generation_config=_generation_config(order),
            continuous_batching_config=self._config,
            record_timestamps=order.stamped,
        )
        return [
            Sampled(
                token_ids=list(answer.generated_tokens),
                logprobs=list(answer.logprobs),
                first_token_s=answer.timestamps[0] - started_s if order.stamped else None,
            )
            for answer in answers.values()
        ]


CONTESTANTS: Mapping[str, Callable[[Setup], Contestant]] = MappingProxyType(
    {
        "native-fast": Native,
        "native-invariant": Native,
        "vllm": Vllm,
        "transformers-continuous": ContinuousBatching,
        "transformers-generate": Generate,
    }
)
"""Everyone, ours first."""


def as_json(sampled: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Completions as a worker sends them."""
    return [asdict(one) for one in sampled]
