"""From an engine's completion to a turn: checked, and light enough to be kept.

Owns what is asked of an engine beyond tokens (its routes), the proof that its record fits the turn before anybody
builds on it, and that the bulky part of it lies in a file before the turn exists. A record that is missing or does not
fit is the engine's fault, not the model's: the rollout fails as infrastructure and is tried again, never grouped.
"""

import asyncio
from dataclasses import replace

from etude.errors import CaptureError
from etude.ledger.payloads import Payloads
from etude.protocols import Completion, SamplingParams, turn_of
from etude.types import Finish, RouteSpace, SamplingMask, TokenIds, Turn


class Recorder:
    """Makes turns of what engines sampled, and writes their payloads.

    ``space`` is what routes the model can have, where a trainer wants to replay them; ``None`` asks for none. Without
    ``payloads`` the turns are for no trainer, so kept sets are not kept either.
    """

    def __init__(self, payloads: Payloads | None, space: RouteSpace | None = None) -> None:
        if payloads is None and space is not None:
            raise ValueError("routes are wanted but there is no folder for them: give one for payloads")
        self._payloads = payloads
        self._space = space

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same parameters, asking for what is to be recorded."""
        return replace(params, want_routes=self._space is not None)

    async def turn(
        self, prompt_ids: TokenIds, params: SamplingParams, completion: Completion, session_id: str, reused: int = 0
    ) -> Turn:
        """One turn; its routes and kept sets, if there are any, are on disk.

        ``reused`` tokens of the prompt are an earlier turn of the session, prompt and completion: its routes, which are
        of all of them but the last, are not written again. Raises :class:`~etude.errors.CaptureError` for a record that
        does not fit.
        """
        wanted = replace(
            completion,
            routes=completion.routes if self._space is not None else None,
            sampling_mask=completion.sampling_mask if self._payloads is not None else None,
        )
        if wanted.routes is None and wanted.sampling_mask is None:
            return self._checked(prompt_ids, params, wanted)
        # To check megabytes of routes takes longer than a loop that serves others may be kept from them.
        known = max(reused - 1, 0)
        return await asyncio.to_thread(self._stowed, prompt_ids, params, wanted, session_id, known)

    def _stowed(
        self, prompt_ids: TokenIds, params: SamplingParams, completion: Completion, session_id: str, known: int
    ) -> Turn:
        assert self._payloads is not None, "what is bulky is only wanted where there is a folder for it"
        return self._payloads.stow(self._checked(prompt_ids, params, completion), session_id, known)

    def _checked(self, prompt_ids: TokenIds, params: SamplingParams, completion: Completion) -> Turn:
        try:
            turn = turn_of(prompt_ids, params, completion)
            self._check(turn, params)
        except ValueError as error:
            raise CaptureError(f"the engine's record of a turn does not fit it: {error}") from error
        return turn

    def _check(self, turn: Turn, params: SamplingParams) -> None:
        if self._space is not None:
            if turn.routes is None:
                raise ValueError("it has no routes although they were asked for; does the engine serve them at all?")
            self._space.check(turn.routes, turn.length - 1)
        if params.truncates and turn.sampling_mask is None and self._payloads is not None:
            raise ValueError(f"it has no kept sets although top_p={params.top_p:g} and top_k={params.top_k} cut")


def cut(completion: Completion, tokens: int) -> Completion:
    """The first ``tokens`` sampled tokens of a completion and what was recorded of them.

    What a caller's stop string ended did not end with the model's own stop token: its finish is ``LENGTH``. Raises
    ``ValueError`` unless 0 ≤ ``tokens`` ≤ the number there are.
    """
    lost = len(completion.token_ids) - tokens
    if not 0 <= lost <= len(completion.token_ids):
        raise ValueError(f"a completion of {len(completion.token_ids)} tokens cannot be cut to {tokens}")
    if not lost:
        return completion
    routes, kept = completion.routes, completion.sampling_mask
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        versions=completion.versions[:tokens],
        finish=Finish.LENGTH,
        routes=None if routes is None else routes[: len(routes) - lost],  # a row for each token but the last one
        sampling_mask=None if kept is None else _first_sets(kept, tokens),
    )


def _first_sets(mask: SamplingMask, tokens: int) -> SamplingMask:
    offsets = mask.offsets[: tokens + 1]
    return SamplingMask(offsets=offsets, token_ids=mask.token_ids[: offsets[-1]])
