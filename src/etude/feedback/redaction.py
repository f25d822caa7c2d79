"""Redaction: sensitive parts of a live session are replaced before any of it is written.

    answer ─▶ text of the new tokens ─▶ redactors ─▶ spans ─┬─ in input of users and tools: filler, token for token
                                                            └─ in the model's output: the session is not kept

A redactor finds the spans of a text that must not be stored, such as keys and addresses. A token that overlaps such a
span becomes a filler, so that all other tokens keep their positions and sampled logprobs. The completion is then
trained on with a context that differs in the fillers; the probability ratio with which losses correct for old weights
also corrects for that. A model's reply with such a span cannot be corrected, because training would use its tokens:
then nothing of the session is kept, and it is counted.

Owns this replacement. A recipe selects the redactors (``feedback.redactors``). A span across two calls of a session is
not detected. Pure.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from etude.tokens.vocabulary import Spelling
from etude.types import Ids, LiveAnswer

Span: TypeAlias = tuple[int, int]
"""Character range of a text: start, end (exclusive)."""
Redactor: TypeAlias = Callable[[str], Iterable[Span]]
"""Function that finds the spans of a text that must not be stored."""

BLACKOUT = "█"
"""Replacement for each redacted character of a message."""
SECRETS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\betude-[a-z]+-[A-Za-z0-9_-]{20,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bey[JK][\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",
)
"""Private keys, keys of well-known services by their prefixes, JSON web tokens, and passwords in URLs."""
EMAILS = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}\.[A-Za-z]{2,24}")


def secrets(text: str) -> Iterable[Span]:
    """Spans of keys and passwords that have a recognisable format; others are not found."""
    return [match.span() for match in SECRETS.finditer(text)]


def emails(text: str) -> Iterable[Span]:
    """Spans of e-mail addresses."""
    return [match.span() for match in EMAILS.finditer(text)]


class Redaction:
    """Filter of a store that applies ``redactors``; ``filler`` is the token that replaces a redacted one."""

    def __init__(self, redactors: Sequence[Redactor], spelling: Spelling, filler: int) -> None:
        self._redactors = redactors
        self._spelling = spelling
        self._filler = filler

    def __call__(self, answer: LiveAnswer) -> LiveAnswer | None:
        """The redacted answer; ``None``: nothing of its session may be stored."""
        if any(self._hidden(turn.completion_ids).any() for turn in answer.turns):
            return None
        message = answer.message
        for start, end in self._spans(message):
            message = message[:start] + BLACKOUT * (end - start) + message[end:]
        if not answer.turns:
            return replace(answer, message=message)
        first, earlier = answer.turns[0], answer.earlier
        shared = earlier.length if earlier is not None and first.continues(earlier) else 0
        hidden = self._hidden(first.prompt_ids[shared:])
        if not hidden.any():
            return replace(answer, message=message)
        prompt_ids = first.prompt_ids.copy()
        prompt_ids[shared:][hidden] = self._filler
        turns = tuple(replace(turn, prompt_ids=prompt_ids) for turn in answer.turns)
        return replace(answer, turns=turns, message=message)

    def _spans(self, text: str) -> list[Span]:
        return [span for redactor in self._redactors for span in redactor(text)]

    def _hidden(self, token_ids: Ids) -> npt.NDArray[np.bool_]:
        """[L] true for tokens that overlap a span of their text; one that ends within a character counts as it."""
        stream = self._spelling.stream()
        state, ids = stream.state(), token_ids.tolist()
        text = stream.feed(ids) + stream.finish()
        spans = self._spans(text)
        hidden = np.zeros(len(ids), bool)
        if spans:
            ends = list(accumulate(stream.lengths(state, ids)))
            starts = [0, *ends[:-1]]
            for start, end in spans:
                hidden |= [
                    begin < end and max(stop, begin + 1) > start for begin, stop in zip(starts, ends, strict=True)
                ]
        return hidden
