"""How a turn that was handed out in part goes on when its engine fails.

    pieces of the first engine ──▶ prompt + their tokens ──▶ pieces of the second one ──▶ one completion of both

Owns what the next engine is asked and how the parts become one record. Every token keeps the log-probability and the
version that it was sampled with; routes are the last engine's, which read all tokens but the last, also those that
another one sampled. Two things go down with an engine and cannot be had elsewhere: from which sets top-p and top-k let
the tokens so far be drawn, and the end of a turn whose last token is out. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from etude.errors import EngineUnavailable
from etude.protocols import Completion, SamplingParams, TokenChunk

MAX_SEED = 2**63 - 1
"""What every random generator takes."""


class StreamedTurn:
    """What was handed out of a turn, and what an engine has to be asked for the rest of it."""

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt = prompt
        """What the present engine is asked to continue."""
        self.params = params
        """How it is to sample the rest."""
        self.complete = False
        """Whether the last piece was added."""
        self._asked = prompt, params
        self._pieces: list[TokenChunk] = []
        self._earlier = 0  # of ``_pieces``, those that an engine before the present one sampled

    def add(self, piece: TokenChunk) -> TokenChunk:
        """The piece as it is to be handed out: the last one of all has the completion of the whole turn."""
        earlier = self._pieces[: self._earlier]
        self._pieces.append(piece)
        if piece.completion is None:
            return piece
        self.complete = True
        return replace(piece, completion=_stitched(earlier, piece.completion)) if earlier else piece

    def resume(self, error: EngineUnavailable | None) -> bool:
        """Prepare for another engine after ``error``; says whether it continues what was handed out.

        Raises :class:`~etude.errors.EngineUnavailable` for a turn that cannot be continued.
        """
        told = [token for piece in self._pieces for token in piece.token_ids.tolist()]
        if not told:
            return False
        prompt, params = self._asked
        if params.truncates:
            lost = "what top-p and top-k left to draw from"
        elif len(told) == params.max_tokens or told[-1] in params.stop_ids:
            lost = "the record of its end"
        else:
            self.prompt = prompt + told
            self.params = replace(params, max_tokens=params.max_tokens - len(told), seed=_next_seed(params.seed, told))
            self._earlier = len(self._pieces)
            return True
        raise EngineUnavailable(f"a turn broke off after {len(told)} tokens; {lost} is lost, ask again") from error


def _stitched(earlier: Sequence[TokenChunk], rest: Completion) -> Completion:
    """One completion of what several engines sampled; routes cover all of it, as the last engine read it."""
    return Completion(
        token_ids=np.concatenate([*(piece.token_ids for piece in earlier), rest.token_ids]),
        logprobs=np.concatenate([*(piece.logprobs for piece in earlier), rest.logprobs]),
        versions=np.concatenate([*(piece.versions for piece in earlier), rest.versions]),
        finish=rest.finish,
        routes=rest.routes,
    )


def _next_seed(seed: int | None, told: Sequence[int]) -> int | None:
    """The seed of a continuation. The old one would draw the first random numbers of the turn a second time."""
    if seed is None:
        return None
    digest = blake2b(f"{seed} {told}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED
