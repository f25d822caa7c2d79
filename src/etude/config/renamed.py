"""Keys of earlier recipes: each gets an error that names the key, or says what took its place."""

from collections.abc import Mapping
from types import MappingProxyType

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "eval.document_one_in": "eval.heldout_every",
        "ledger.patience_s": "ledger.retry_timeout_s",
        "tasks.heldout_one_in": "tasks.heldout_every",
    }
)
"""Old ``section.key``, or a whole old section → the new key, or a clause with a space in it that says what is done now:
``a constant: why``.
"""


def renamed(key: str) -> str:
    """The advice for an old key; empty for one that never was."""
    new = RENAMED.get(key, "")
    return f"it is {new} now" if new else ""
