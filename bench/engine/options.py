"""Options of `bench engine`: all contestants on all models, or a few measurements in a few seconds."""

from dataclasses import dataclass, field

from bench.engine.contestants import CONTESTANTS, LENGTH, RUNNING
from bench.engine.drafts import DraftPlan
from bench.engine.models import MODELS, QUICK_MODEL, BenchModel
from bench.engine.swaps import SwapPlan
from bench.engine.worker import available_cores
from etude.errors import UserError

NATIVE = ("native-fast", "native-invariant")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of the measurement."""

    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    models: tuple[BenchModel, ...] = MODELS
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1, 16, 64)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """0 is greedy."""
    prompt_tokens: int = 64
    new_tokens: int = 64
    threads: int = 1
    """Threads of each contestant, on a core each."""
    rounds: int = 3
    least_s: float = 0.5
    """Seconds of work of each round at least."""
    swaps: SwapPlan = field(default_factory=SwapPlan)
    drafts: DraftPlan = field(default_factory=DraftPlan)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.contestants) - set(CONTESTANTS)):
            raise UserError(f"bench engine: no contestant {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
        if min(self.threads, self.rounds, self.prompt_tokens) < 1 or self.threads > len(available_cores()):
            raise UserError(f"bench engine: {self.rounds} rounds with {self.threads} threads cannot be measured here")
        if max(self.batches) > RUNNING or self.prompt_tokens + self.new_tokens > LENGTH:
            raise UserError(f"bench engine: at most {RUNNING} sequences of {LENGTH} tokens")


def engine_options(
    contestants: tuple[str, ...] | None = None, *, quick: bool = False, threads: int = 1
) -> EngineOptions:
    """Options of a call; ``None`` stands for all contestants, or only ours if ``quick``.

    A quick call checks that everything runs, not its speed. Raises :class:`~etude.errors.UserError` for invalid
    options.
    """
    if not quick:
        return EngineOptions(contestants=contestants or tuple(CONTESTANTS), threads=threads)
    return EngineOptions(
        contestants=contestants or NATIVE,
        models=(QUICK_MODEL,),
        dtypes=("float32",),
        batches=(1, 16),
        temperatures=(1.0,),
        new_tokens=8,
        threads=threads,
        rounds=1,
        least_s=0.0,
        swaps=SwapPlan(shares=(0.01,), repeats=1),
        drafts=DraftPlan(batches=(2,), draft_tokens=(2,), new_tokens=8, steps=1, rollouts=2, rounds=1),
    )
