"""From an engine's completion to a turn: checked, and light enough to be kept.

Owns what is asked of the engine beyond tokens (its routes), the proof that its record fits the turn before anybody
builds on it, and that the bulky part of it lies in a file before the turn exists. A record that is missing or does not
fit is the engine's fault, not the model's: the rollout fails as infrastructure and is tried again, never grouped.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from etude.errors import CaptureError
from etude.ledger.payloads import Payloads
from etude.protocols import Completion, Engine, SamplingParams
from etude.types import RouteSpace, Turn


class Recorder:
    """Samples turns from ``engine`` and writes their payloads.

    ``space`` is what routes the model can have, where a trainer wants to replay them; ``None`` asks for none.
    """

    def __init__(self, engine: Engine, payloads: Payloads, space: RouteSpace | None = None) -> None:
        self.engine = engine
        self._payloads = payloads
        self._space = space

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams, session_id: str) -> Turn:
        """One turn; its routes and kept sets, if there are any, are on disk.

        Raises what the engine raises, and :class:`~etude.errors.CaptureError` for a record that does not fit.
        """
        params = replace(params, want_routes=self._space is not None)
        completion = await self.engine.generate(prompt_ids, params, session=session_id)
        try:
            turn = self._turn(prompt_ids, params, completion)
        except ValueError as error:
            raise CaptureError(f"the engine's record of a turn does not fit it: {error}") from error
        if turn.routes is None and turn.kept is None:
            return turn
        return await asyncio.to_thread(self._payloads.stow, turn, session_id)

    def _turn(self, prompt_ids: Sequence[int], params: SamplingParams, completion: Completion) -> Turn:
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish=completion.finish,
            temperature=params.temperature,
            routes=completion.routes if self._space is not None else None,
            kept=completion.kept,
        )
        if self._space is not None:
            if turn.routes is None:
                raise ValueError("it has no routes although they were asked for; does the engine serve them at all?")
            self._space.check(turn.routes, len(turn.prompt_ids) + len(turn.completion_ids) - 1)
        cuts = params.top_p < 1 or params.top_k > 0
        if cuts and params.temperature > 0 and turn.kept is None:
            raise ValueError(f"it has no kept sets although top_p={params.top_p:g} and top_k={params.top_k} cut")
        return turn
