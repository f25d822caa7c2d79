"""The external APIs that are supported: their names, and the paths of their calls."""

from typing import Literal, TypeAlias

Api: TypeAlias = Literal["openai", "anthropic"]
"""The two supported APIs."""
ANTHROPIC_VERSION = "2023-06-01"
"""Value of the header that Anthropic's API requires."""
COMPLETIONS = ("chat/completions", "completions", "responses", "messages")
"""Paths below ``/v1/`` of calls that sample."""
PATHS = (*COMPLETIONS, "messages/count_tokens")
"""Paths that agents may call: code in a sandbox must not reach the files, batches or keys of an account."""
