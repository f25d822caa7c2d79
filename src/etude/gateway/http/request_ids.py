"""Ids that nobody else has: a random beginning, drawn once, and a count.

They are unique and no secret. Random bits for each would cost a system call, which is more than all else that a call
needs to be told from others.
"""

import itertools
import secrets
from typing import final

BEGINNING_BYTES = 8
"""Randomness of a beginning: two gateways do not draw the same."""


@final
class Serials:
    """Draws ids of 24 hex digits."""

    def __init__(self) -> None:
        self._beginning = secrets.token_hex(BEGINNING_BYTES)
        self._count = itertools.count()

    def draw(self) -> str:
        """The next id."""
        return f"{self._beginning}{next(self._count):08x}"
