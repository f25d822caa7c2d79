"""Signals on their way to the product's ``POST /feedback``, by étude's Python client: sent in the background, again
until they are taken, and counted once by their ids.
"""

from collections.abc import Sequence
from typing import final

from backend import Work
from population import Signal

from etude.api.feedback import FeedbackClient


@final
class FeedbackReports:
    """Sends signals to one product; implements :class:`~simulation.Reports`."""

    def __init__(self, client: FeedbackClient) -> None:
        """``client`` stays the caller's to close."""
        self._client = client

    def send(self, work: Work, user: str, signals: Sequence[Signal]) -> None:
        """Report signals of ``user`` about a session."""
        for signal in signals:
            self._client.report(signal.kind, signal.value, session=work.session_id, user=user)
