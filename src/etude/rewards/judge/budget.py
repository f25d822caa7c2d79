"""Judge budgets: calls and tokens for a rollout and for the run, the amounts spent, a pause after an alarm.

    reserve the most that a call can take ──▶ call ──▶ settle what it took; the rest is free again

Because the maximum is reserved first, a limit is never exceeded by any number of concurrent calls. Most calls use far
less, so a call without enough budget waits until calls in progress have settled, and is rejected only if their releases
could not be enough either: the cost is that the last part of a budget cannot be spent. A rollout's budget is a portion
of the run's. Processes know each other's settled spending: together they may exceed the limit by the calls in progress
elsewhere. When a budget is empty the judge is *unavailable*, as when it is down: no rollout gets a zero for that.

Spend and pause are files of the run folder, so that a restarted process neither starts with a full budget nor uses a
judge that raised an alarm. Each judging process has its own spend file and reads those of the others; all share one
pause file, which a person removes. Both are written atomically.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from etude.errors import DamagedError
from etude.fsync import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Calls and tokens: spent ones, or a limit of them."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.calls, self.prompt_tokens, self.completion_tokens) < 0:
            raise ValueError(f"{self}: expected no number below 0")

    @property
    def tokens(self) -> int:
        """Tokens of both kinds."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Spend") -> "Spend":
        return Spend(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )

    def __sub__(self, other: "Spend") -> "Spend":
        return Spend(
            calls=self.calls - other.calls,
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            completion_tokens=self.completion_tokens - other.completion_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a million judge tokens, in any one currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def cost(self, spend: Spend) -> float:
        """Price of ``spend``."""
        return (self.prompt * spend.prompt_tokens + self.completion * spend.completion_tokens) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimit:
    """The upper limit of a judge budget."""

    per: Literal["rollout", "run"] = "run"
    """Scope of the limit; the recipe's keys end with it."""
    calls: int
    tokens: int
    cost: float = float("inf")

    def holds(self, spend: Spend, prices: Prices) -> bool:
        """True if ``spend`` is within the limit."""
        return spend.calls <= self.calls and spend.tokens <= self.tokens and prices.cost(spend) <= self.cost

    def __str__(self) -> str:
        limits = {"calls": self.calls, "tokens": self.tokens, "cost": self.cost}
        return ", ".join(f"judge.options.{name}_per_{self.per} = {limit:.15g}"
                         for name, limit in limits.items() if limit != float("inf"))  # fmt: skip


class JudgeBudget:
    """The remaining part of a judge budget, which may be a portion of a larger one."""

    def __init__(
        self, allowance: BudgetLimit, prices: Prices, *, spent: Spend | None = None, out_of: "JudgeBudget | None" = None
    ) -> None:
        self.spent = spent or Spend()
        """Settled use."""
        self.elsewhere = Spend()
        """Use by other processes under the same limit, as of their last save."""
        self._allowance = allowance
        self._prices = prices
        self._out_of = out_of
        self._reserved = Spend()

    def portion(self, allowance: BudgetLimit) -> "JudgeBudget":
        """A budget with its own limit that also counts against this one, at the same prices."""
        return JudgeBudget(allowance, self._prices, out_of=self)

    def reserve(self, most: Spend) -> bool:
        """Reserve the maximum that a call may use; false, without a reservation, if there is not enough now."""
        whole = self.spent + self.elsewhere + self._reserved + most
        fits = self._allowance.holds(whole, self._prices)
        if not fits or (self._out_of is not None and not self._out_of.reserve(most)):
            return False
        self._reserved += most
        return True

    def shortage(self, most: Spend) -> str:
        """The reason why ``most`` cannot be reserved even after all reservations are released; empty if it can."""
        spent = self.spent + self.elsewhere
        if not self._allowance.holds(spent + most, self._prices):
            return (
                f"{self._allowance}; {spent.calls} calls and {spent.tokens} tokens are spent, {self._reserved.calls} "
                f"and {self._reserved.tokens} set aside, and the next call may take {most.tokens} tokens"
            )
        return "" if self._out_of is None else self._out_of.shortage(most)

    def settle(self, most: Spend, used: Spend) -> None:
        """Release the reservation ``most``, and charge the actual use ``used``."""
        self._reserved -= most
        self.spent += used
        if self._out_of is not None:
            self._out_of.settle(most, used)

    @property
    def cost(self) -> float:
        """Settled use, in the currency of the prices."""
        return self._prices.cost(self.spent)


class SpendFile:
    """Saves a :class:`~etude.rewards.judge.budget.Spend` to a file; with ``None`` nothing is saved."""

    def __init__(self, folder: Path | None, worker_id: int = 0) -> None:
        """``worker_id`` distinguishes the processes of a run."""
        self._folder = folder
        self._name = f"judge-spend-{worker_id}.json"

    def load(self) -> Spend:
        """Spend of this process so far. Raises :class:`~etude.errors.DamagedError` for a file that is not valid."""
        return Spend() if self._folder is None else _read(self._folder / self._name)

    def save(self, spent: Spend) -> Spend:
        """Save, and return the spend of all other processes. Raises like :meth:`load`, about their files."""
        if self._folder is None:
            return Spend()
        write_whole(self._folder / self._name, orjson.dumps(asdict(spent)))
        return self.others()

    def others(self) -> Spend:
        """Spend of the other processes. Raises like :meth:`load`, about their files."""
        files = [] if self._folder is None else self._folder.glob("judge-spend-*.json")
        return sum((_read(file) for file in files if file.name != self._name), Spend())


def _read(file: Path) -> Spend:
    if not file.exists():
        return Spend()
    try:
        return Spend(**orjson.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{file} does not say what was spent: {error}; remove it to begin at 0") from error


class JudgePause:
    """A pause of all judging, with its reason."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def reason(self) -> str:
        """Reason of the pause, and the way to end it; empty if judging is not paused."""
        try:
            why = self._file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return f"the judge is held after an alarm: {why}; look at it, calibrate it again, then remove {self._file}"

    def begin(self, why: str) -> None:
        """Pause from now on."""
        write_whole(self._file, why.encode(errors="replace"))
