"""Notices about releases while users are served: the product's URL, and the state of each release.

    releases of the ledger ──▶ lines, once each: going live with the product's URL and key; every move with its reason

This module owns the texts. :mod:`etude.releases` decides on releases; no code depends on these lines.
"""

import time

from etude.config.recipe import RunConfig
from etude.errors import EtudeError, UserError
from etude.releases.states import ReleaseState
from etude.releases.store import RecordedMove, ReleaseStore
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.process_name import PRODUCT

LOOK_S = 2.0
"""Interval at which moves are polled."""


class LiveNotices:
    """Reports new moves; a run without releases has none."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self._folder = folder
        self._config = config
        self._shown = 0
        self._looked_s = 0.0

    def lines(self) -> list[str]:
        """The new lines, usually none. Raises :class:`~etude.errors.UserError` if nothing can ever be released."""
        now_s = time.monotonic()
        if not self._config.release.enabled or now_s - self._looked_s < LOOK_S:
            return []
        self._looked_s = now_s
        try:
            with ReleaseStore.open(self._folder.ledger, self._config.ledger) as store:
                moves = store.moves()
        except EtudeError:
            return []  # processes that need the database report it
        self._check_bar(moves)
        new, self._shown = moves[self._shown :], len(moves)
        return [line for move in new for line in self._words(move, is_first=move is self._first_release(moves))]

    def _check_bar(self, moves: tuple[RecordedMove, ...]) -> None:
        """Raise if no user will ever be served: the trainer waits for users, and its last version was rejected."""
        after, states = self._config.live.after_steps, {move.version: move for move in moves}
        last = states.get(max(states, default=-1))
        if last is None or any(move.to_state == ReleaseState.RELEASED for move in moves):
            return
        if last.to_state == ReleaseState.REJECTED and last.version + self._config.release.every_steps > after:
            raise UserError(
                f"no version was good enough for users, so that there are none to learn from: version {last.version} "
                f"is rejected ({last.reason}). Continue with more simulated steps, --set live.after_steps="
                f"{2 * after or 32} and as many more trainer.steps, or lower release.minimum_bar in a new run"
            )

    def _words(self, move: RecordedMove, *, is_first: bool) -> list[str]:
        line = f"version {move.version} is {move.to_state}: {move.reason}" + (f" ({move.by})" if move.by else "")
        return [line, *self._going_live()] if is_first else [line]

    def _going_live(self) -> list[str]:
        url, key = self._folder.endpoints.url(PRODUCT), self._folder.key(KeyRole.PRODUCT)
        return [f"live: users are served at {url}/v1", f"      key {key}", f"      signals: POST {url}/feedback"]

    @staticmethod
    def _first_release(moves: tuple[RecordedMove, ...]) -> RecordedMove | None:
        return next((move for move in moves if move.to_state == ReleaseState.RELEASED), None)
