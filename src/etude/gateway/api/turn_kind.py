"""What a call is asked for: the next thing to do, or a summary of its conversation. Pure.

Owns the two ways by which a harness says so: a header with the call, or, where it cannot send one, words that stand in
its requests for summaries and nowhere else. What is recorded as a summary is sampled like anything else.
"""

from collections.abc import Mapping

from etude.gateway.api.calls import Call, Refusal
from etude.types import TurnKind

TURN = "X-Etude-Turn"
"""Header with the kind of a call; it counts more than the mark."""
KINDS = tuple(kind.value for kind in TurnKind)
"""What the header may say."""


def kind_of(call: Call, headers: Mapping[str, str], mark: str = "") -> TurnKind:
    """The kind of a call: what its header says, else whether its last message is the user's and contains ``mark``.

    Without a mark, or with a raw prompt, which has no messages, it takes a header to ask for a summary. Raises
    :class:`~etude.gateway.api.calls.Refusal` on a header that names no kind.
    """
    said = headers.get(TURN)
    if said is not None:
        if said not in KINDS:
            raise Refusal(400, "invalid_request", f"{TURN}: expected {' or '.join(KINDS)}", param=TURN)
        return TurnKind(said)
    last = call.messages[-1] if call.messages else None
    marked = bool(mark) and last is not None and last.role == "user" and mark in last.content
    return TurnKind.SUMMARY if marked else TurnKind.ACT
