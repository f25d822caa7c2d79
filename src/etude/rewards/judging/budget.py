"""What judging may still cost: calls and tokens, of a rollout and of the whole run. Pure.

    reserve the most that a call can take ──▶ call ──▶ settle what it took; the rest is free again

Because the most is set aside first, a limit is never overstepped, however many calls are under way; what it costs is
that the last bit of a budget cannot be spent. A rollout's purse is filled out of the run's. Several processes know of
each other what was settled: together they may overstep by what is under way in the others.

When a purse is empty the judge is *unavailable*, as when it is down: nothing is worth zero for it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """What was used, or may be."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.calls, self.prompt_tokens, self.completion_tokens) < 0:
            raise ValueError(f"{self}: nobody uses less than nothing")

    @property
    def tokens(self) -> int:
        """Of both kinds."""
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
    """Money for a million tokens, in whatever currency the recipe thinks in."""

    prompt: float = 0.0
    completion: float = 0.0

    def cost(self, spend: Spend) -> float:
        """What some use costs."""
        return (self.prompt * spend.prompt_tokens + self.completion * spend.completion_tokens) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The most that may be used."""

    calls: int
    tokens: int
    cost: float = float("inf")


class Purse:
    """What is left of an allowance, and of the purse that it comes out of."""

    def __init__(
        self, allowance: Allowance, prices: Prices, *, spent: Spend | None = None, out_of: "Purse | None" = None
    ) -> None:
        self.spent = spent or Spend()
        """What was used, settled."""
        self.elsewhere = Spend()
        """What others who live on the same allowance have used, as far as is known."""
        self._allowance = allowance
        self._prices = prices
        self._out_of = out_of
        self._reserved = Spend()

    def reserve(self, most: Spend) -> bool:
        """Set aside the most that is about to be used; false, and nothing is, where there is not enough."""
        whole = self.spent + self.elsewhere + self._reserved + most
        fits = whole.calls <= self._allowance.calls and whole.tokens <= self._allowance.tokens
        fits = fits and self._prices.cost(whole) <= self._allowance.cost
        if not fits or (self._out_of is not None and not self._out_of.reserve(most)):
            return False
        self._reserved += most
        return True

    def settle(self, most: Spend, used: Spend) -> None:
        """What was really ``used`` of the ``most`` that was set aside; nothing, where the call came to nothing."""
        self._reserved -= most
        self.spent += used
        if self._out_of is not None:
            self._out_of.settle(most, used)

    @property
    def cost(self) -> float:
        """What was used, in money."""
        return self._prices.cost(self.spent)
