"""What an engine can serve at all, checked before a request leaves us.

Owns nothing else. It matters most for engines of others: one token id outside the vocabulary ends vLLM's engine process
(seen in 0.32 without a tokenizer), so no such request may ever reach it.
"""

from dataclasses import dataclass

from etude.protocols import SamplingParams
from etude.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of one engine."""

    vocab_size: int
    max_length: int
    """Tokens of one sequence, prompt and completion."""

    def check(self, prompt_ids: TokenIds, params: SamplingParams) -> None:
        """Raise ``ValueError`` for a request that could never be served, with the offending value."""
        if len(prompt_ids) == 0 or min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            raise ValueError(f"prompt ids must be in 0 … {self.vocab_size - 1} and not empty")
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens={params.max_tokens}: expected at least 1")
        if len(prompt_ids) + params.max_tokens > self.max_length:
            raise ValueError(
                f"{len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} exceed {self.max_length}"
            )
        if outside := [token for token in params.stop_ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"stop id {outside[0]} is not in 0 … {self.vocab_size - 1}")
