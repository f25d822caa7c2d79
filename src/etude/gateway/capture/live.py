"""Live sessions: conversations of production users who consented to training, stored permanently as they happen.

    first call of a session   consent ─▶ recorded, under its own id; none ─▶ not recorded, whatever follows
    each answer               its turns are on disk before the caller gets it (of a stream: its last event)
    a call with none          consent is withdrawn: everything recorded of the session is deleted, also if another
                              gateway recorded it, or this one before it was idle
    closed, or idle           the session ends

    X-Etude-Consent: train | none     default: that of the key, which is none unless created with train
    X-Etude-User      the product's name of its user; stored only as a pseudonym
    X-Etude-Template  the kind of request       X-Etude-Region  where the user is

Owns which conversations are recorded and their metadata. A :class:`LiveJournal`, supplied by ``run``, stores them.
While the journal is unavailable users are still served: such a session ends with the turns stored so far, and is
counted. Only a call that withdraws consent from a session in progress is refused, since its answer is a promise.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

from etude.clock import unix_s
from etude.errors import InfrastructureError
from etude.gateway.api.calls import Answer, ApiError
from etude.gateway.capture.conversations import Conversation
from etude.gateway.capture.sessions import name_in, new_session_id
from etude.types import LiveAnswer, LiveSession

CONSENT, USER, TEMPLATE, REGION = "X-Etude-Consent", "X-Etude-User", "X-Etude-Template", "X-Etude-Region"
TRAIN, NONE = "train", "none"
"""Values of ``X-Etude-Consent``."""
MAX_USER = 256
"""Longest user name, in characters."""
WORD = re.compile(r"[A-Za-z0-9._:/-]{0,128}")
"""Templates and regions: they appear in reports."""
KEEP_S = 5.0
"""Longest time that an answer waits to be written to disk; a sync takes milliseconds."""

logger = logging.getLogger(__name__)

Pseudonym = Callable[[str], str]
"""Maps a user to a pseudonym."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCall:
    """Properties of a production call besides the call itself."""

    user: str = ""
    """Pseudonym of the user; empty if the client names none."""
    template: str = ""
    region: str = ""
    consent: bool | None = None
    """``None``: the call does not specify it."""


class LiveJournal(Protocol):
    """Storage of live sessions."""

    async def keep(self, answer: LiveAnswer) -> None:
        """Store an answer; return once it is on disk. Raises :class:`~etude.errors.InfrastructureError`."""
        ...

    def end(self, session_id: str) -> None:
        """Mark a session as complete: no turn follows."""
        ...

    async def withdraw(self, session_id: str) -> None:
        """Delete everything stored for a session; return once that is on disk. It is deleted as soon as possible even
        if the caller stops waiting. Raises :class:`~etude.errors.InfrastructureError`.
        """
        ...

    async def withdraw_named(self, owner: str, name: str, user: str) -> None:
        """The same for the newest session with a name that the client ``owner`` has of a user, if there is one."""
        ...


def live_call(headers: Mapping[str, str], pseudonym: Pseudonym) -> LiveCall:
    """Parse the headers of a production call. Raises :class:`~etude.gateway.api.calls.ApiError`."""
    consent = headers.get(CONSENT)
    if consent not in (None, TRAIN, NONE):
        raise ApiError(400, "invalid_request", f"{CONSENT}: expected {TRAIN!r} or {NONE!r}", param=CONSENT)
    user = headers.get(USER, "")
    if len(user) > MAX_USER:
        raise ApiError(400, "invalid_request", f"{USER}: expected at most {MAX_USER} characters", param=USER)
    words = {name: headers.get(name, "") for name in (TEMPLATE, REGION)}
    for name, word in words.items():
        if not WORD.fullmatch(word):
            message = f"{name}: expected at most 128 letters, digits and ._:/-"
            raise ApiError(400, "invalid_request", message, param=name)
    return LiveCall(
        user=pseudonym(user) if user else "",
        template=words[TEMPLATE],
        region=words[REGION],
        consent=None if consent is None else consent == TRAIN,
    )


@final
class LiveRecorder:
    """Records the live sessions of a gateway in ``journal``; ``pseudonym`` maps a client's users to pseudonyms. With
    ``regions``, users elsewhere are not recorded.
    """

    def __init__(
        self,
        journal: LiveJournal,
        pseudonym: Pseudonym,
        *,
        regions: Collection[str] = (),
        now: Callable[[], float] = unix_s,
    ) -> None:
        self.unkept = 0
        """Sessions that ended because an answer could not be stored in time."""
        self._journal = journal
        self._pseudonym = pseudonym
        self._regions = regions
        self._now = now

    def call(self, headers: Mapping[str, str]) -> LiveCall:
        """Parse the headers of a production call. Raises :class:`~etude.gateway.api.calls.ApiError`."""
        return live_call(headers, self._pseudonym)

    async def admit(
        self, conversation: Conversation, call: LiveCall, owner: str, *, by_default: bool, arm: str = ""
    ) -> None:
        """Decide at its first call whether a conversation is recorded; a later call may withdraw consent.

        ``owner`` is the id of the client's key, ``by_default`` its consent if a call specifies none, ``arm`` the arm of
        the routing table that serves the user. Raises :class:`~etude.gateway.api.calls.ApiError` (503) if consent is
        withdrawn and the journal is unavailable.
        """
        if call.consent is False and conversation.stored_as:
            await self._withdraw(conversation)
        if conversation.admitted:
            return
        conversation.admitted = True
        name = name_in(conversation.session_id, owner)
        if call.consent is False and name:
            await self._withdraw_earlier(owner, name, call.user)
        if not (by_default if call.consent is None else call.consent):
            return
        if self._regions and call.region not in self._regions:
            return
        conversation.live = LiveSession(
            # A client may reuse a name; a generated id is unique already.
            session_id=new_session_id() if name else conversation.session_id,
            owner=owner,
            name=name,
            user=call.user,
            template=call.template,
            region=call.region,
            consent=True,
            opened_at=self._now(),
            ended_at=None,
            arm=arm,
            first_version=None,
            last_version=None,
            turns=0,
        )
        conversation.stored_as = conversation.live.session_id
        conversation.on_close = partial(self._end, conversation)

    async def keep(self, conversation: Conversation, answer: Answer) -> None:
        """Wait until a recorded answer of a live session is on disk; for any other session, return at once.

        An answer that is repeated is not stored again, since its session may be deleted by now.
        """
        live = conversation.live
        if live is None or (placed := conversation.placement(answer)).first < conversation.stored_turns:
            return
        live_answer = LiveAnswer(
            session=live,
            first=placed.first,
            turns=placed.turns,
            completion=answer.answer_id,
            follows=placed.follows,
            earlier=placed.earlier,
            message=placed.message,
        )
        try:
            async with asyncio.timeout(KEEP_S):
                await self._journal.keep(live_answer)
        except (TimeoutError, InfrastructureError):
            self._give_up(conversation)
        except Exception:
            self._give_up(conversation)
            raise
        else:
            conversation.stored_turns = placed.first + len(placed.turns)

    def _give_up(self, conversation: Conversation) -> None:
        """End a session of which an answer was not stored: later ones continue it."""
        if conversation.live is not None:
            self.unkept += 1
            self._end(conversation)

    async def _withdraw(self, conversation: Conversation) -> None:
        """Delete the live session that records a conversation, or has recorded it."""
        live, conversation.live = conversation.live, None  # first, so that no answer on its way is stored afterwards
        try:
            async with asyncio.timeout(KEEP_S):
                await self._journal.withdraw(conversation.stored_as)
        except (TimeoutError, InfrastructureError) as error:
            conversation.live = live
            message = "what is stored of this session cannot be deleted now: send the call again"
            raise ApiError(503, "feedback_unavailable", message) from error
        conversation.stored_as = ""

    async def _withdraw_earlier(self, owner: str, name: str, user: str) -> None:
        """Delete what is stored of the session of this name that this gateway does not know, or no longer."""
        try:
            async with asyncio.timeout(KEEP_S):
                await self._journal.withdraw_named(owner, name, user)
        except (TimeoutError, InfrastructureError) as error:
            # Most such sessions were never recorded, so their users are served; the journal goes on trying.
            logger.warning("session %r of key %s: consent is withdrawn, and not stored yet: %s", name, owner, error)

    def _end(self, conversation: Conversation) -> None:
        live, conversation.live = conversation.live, None
        if live is not None:
            self._journal.end(live.session_id)
