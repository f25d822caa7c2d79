"""The judge: asks an endpoint for votes on one aspect of one text, and counts them.

    exhibit ──▶ cached votes ──▶ circuit ──▶ purse ──▶ endpoint ──▶ readable? ──▶ tally ──▶ judgement
                                                          ▲            │ no, the first time
                                                          └────────────┘

consumes      an exhibit and a rubric                 produces   a judgement, or JudgeUnavailable
waits for     what calls under way give back of the budget, a seat among them, the endpoint; all within ``timeout_s``
              of the judgement
on shutdown   calls under way are cancelled and counted as if they had used all they might

Owns the order of these steps. Every decision is in a pure part: what is asked (prompts), what is believed (verdicts),
what it comes to (votes), what may be spent (budget). Nothing here turns trouble into a score.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from etude.aio import together
from etude.errors import JudgeDeclined, JudgeLost, JudgeUnavailable
from etude.protocols import Clock
from etude.rewards.judge.budget import Purse, Spend
from etude.rewards.judge.cache import VoteCache, cache_key
from etude.rewards.judge.drift import Alarm, IdentityWatch
from etude.rewards.judge.endpoint import Answering, Call, Said
from etude.rewards.judge.fingerprint import Manner, pin_of
from etude.rewards.judge.pause import Hold
from etude.rewards.judge.prompts import Asking, Exhibit, Message, Tokens, ask, schema
from etude.rewards.judge.rubrics import Rubric
from etude.rewards.judge.verdicts import Fault, Vote, read_vote
from etude.rewards.judge.votes import Judgement, tally
from etude.types import Json

OPEN, PROBING = "open", "probing"
"""States of a circuit in which nothing, or one judgement at a time, may start."""
MARK_BYTES = 16
"""Randomness of marks and nonces."""
TRIES = 2
"""Of one vote: a reply that cannot be read is asked for once more."""
FRAME_TOKENS = 64
"""What a chat template may add to two messages."""
BYTES_PER_TOKEN = 4
"""About what English and code come to: a call sets aside a token for every byte, and most likely uses a quarter."""

T = TypeVar("T")


class Circuit(Protocol):
    """Says when to leave an endpoint alone (:class:`etude.rollouts.breaker.Breaker` is one)."""

    @property
    def gave_up(self) -> bool:
        """Whether none could be had for so long that nobody should wait any more."""
        ...

    def ask(self, now: float) -> str:
        """The state at ``now``."""
        ...

    def succeeded(self) -> None:
        """A judgement was had."""
        ...

    def failed(self, now: float, *, probe: bool = False) -> None:
        """None could be had."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a judge works with."""

    endpoint: Answering
    cache: VoteCache
    purse: Purse
    """The run's."""
    circuit: Circuit
    clock: Clock
    identity: IdentityWatch
    alarm: Callable[[Alarm], None]
    hold: Hold | None
    """Where an alarm stops all judging; ``None``: it is only told."""
    record: Callable[[Spend], Spend]
    """Told what was spent so far, after every call; says what other processes of the run have spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a judge keeps to."""

    timeout_s: float = 60.0
    """For one judgement: all its votes, pauses and second tries."""
    concurrency: int = 16
    """Calls under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a reply shall look like."""

    about: str
    """For errors."""
    schema: Json
    """For endpoints that hold a reply to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One vote that is wanted."""

    rubric: Rubric
    exhibit: Exhibit
    number: int
    key: bytes

    @property
    def descending(self) -> bool:
        return self.number % 2 == 1


class Judge:
    """Judges one aspect at a time."""

    def __init__(self, means: Means, manner: Manner, bounds: Bounds) -> None:
        self.manner = manner
        self.purse = means.purse
        self._means = means
        self._bounds = bounds
        self._seats = asyncio.Semaphore(bounds.concurrency)
        self._settled = asyncio.Event()  # set for a moment whenever a call gives back what it did not use
        self._is_probing = False
        self._trouble = ""

    async def judge(self, rubric: Rubric, exhibit: Exhibit, purse: Purse, *, fresh: bool = False) -> Judgement:
        """Have one aspect judged, out of ``purse``; ``fresh``: no cached vote counts.

        Raises :class:`~etude.errors.JudgeUnavailable` when the endpoint is down, refuses or is late, and its kind
        :class:`~etude.errors.JudgeLost` when it has been down for too long, when the budget is spent, and after an
        alarm that holds.
        """
        questions = [self._question(rubric, exhibit, number) for number in range(self.manner.votes)]
        kept = [None if fresh else self._means.cache.get(question.key) for question in questions]
        missing = [question for question, vote in zip(questions, kept, strict=True) if vote is None]
        asked = iter(await self._ask_all(missing, purse) if missing else ())
        return tally(rubric, [next(asked) if vote is None else vote for vote in kept])

    async def converse(self, messages: Sequence[Message], wanted: Wanted, purse: Purse, *, seed: int) -> Said:
        """One call that is no vote, under the same bounds. Raises like :meth:`judge`."""
        with self._admitted():
            return await self._in_time(self._call(messages, wanted, purse, seed=seed), wanted.about)

    def sound(self, alarm: Alarm) -> None:
        """Tell of an alarm, and hold from then on where the recipe wants that."""
        self._means.alarm(alarm)
        if self._means.hold is not None:
            self._means.hold.begin(alarm.detail)

    def _check_hold(self) -> None:
        if self._means.hold is not None and (reason := self._means.hold.reason):
            raise JudgeLost(reason)

    def _question(self, rubric: Rubric, exhibit: Exhibit, number: int) -> _Question:
        parts = (pin_of(rubric, self.manner), exhibit.task, exhibit.work, str(number))
        return _Question(rubric=rubric, exhibit=exhibit, number=number, key=cache_key(*parts))

    async def _ask_all(self, questions: Sequence[_Question], purse: Purse) -> Sequence[Vote | Fault]:
        """All of these votes; where the purse has not enough for all, those that it had enough for are cached."""
        with self._admitted():
            votes = together(self._vote(question, purse) for question in questions)
            replies = await self._in_time(votes, questions[0].rubric.aspect)
            for reply in replies:
                if isinstance(reply, JudgeLost):
                    raise reply
        return [reply for reply in replies if not isinstance(reply, JudgeLost)]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """What the circuit lets pass; it learns how that ended, unless that is not the endpoint's fault."""
        self._check_hold()
        circuit, clock = self._means.circuit, self._means.clock
        state = circuit.ask(clock.now())
        if state == OPEN or (state == PROBING and self._is_probing):
            kind = JudgeLost if circuit.gave_up else JudgeUnavailable
            raise kind(f"the judge is left alone for a while, for it was down the last times: {self._trouble}")
        probe = self._is_probing = state == PROBING
        try:
            yield
        except JudgeLost:
            raise
        except JudgeUnavailable as error:
            self._trouble = str(error)
            circuit.failed(clock.now(), probe=probe)
            raise
        else:
            circuit.succeeded()
        finally:
            self._is_probing = self._is_probing and not probe

    async def _in_time(self, work: Coroutine[None, None, T], about: str) -> T:
        timeout_s = self._bounds.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            trouble = self._means.endpoint.trouble or "it answers slowly, or judge.concurrency is low for so many"
            raise JudgeUnavailable(f"no judgement of {about!r} within {timeout_s:g} s: {trouble}") from None

    async def _vote(self, question: _Question, purse: Purse) -> Vote | Fault | JudgeLost:
        """One vote, asked for a second time if it cannot be read, as far as the purse allows."""
        reply: Vote | Fault | None = None
        wanted = Wanted(about=question.rubric.aspect, schema=schema(question.rubric))
        for attempt in range(TRIES):
            tokens = draw_tokens(question.exhibit)
            asking = Asking(
                limit=self.manner.text_characters,
                descending=question.descending,
                fault=reply if isinstance(reply, Fault) else None,
            )
            messages = ask(question.rubric, question.exhibit, tokens, asking)
            try:
                said = await self._call(messages, wanted, purse, seed=TRIES * question.number + attempt)
            except JudgeLost as spent:
                return spent
            reply = read_vote(said.text, question.rubric, tokens.nonce, descending=question.descending)
            if isinstance(reply, Vote):
                if self._means.identity.vouches_for(said.identity):
                    self._means.cache.put(question.key, reply)
                return reply
            reply = Fault.CUT if said.was_cut else reply
        assert isinstance(reply, Fault)
        return reply

    async def _call(self, messages: Sequence[Message], wanted: Wanted, purse: Purse, *, seed: int) -> Said:
        """One call, paid for; a call that was cut short is counted as if it had used all it might."""
        manner = self.manner
        most = _most(messages, manner)
        call = Call(
            messages=messages,
            schema=wanted.schema,
            max_tokens=manner.max_tokens,
            temperature=manner.temperature,
            seed=seed,
        )
        await self._set_aside(most, purse)
        used = Spend()
        try:
            async with self._seats:
                used = most
                said = await self._means.endpoint.ask(call)
                used = said.used or most
        except JudgeUnavailable:
            used = Spend(calls=1)
            raise
        finally:
            purse.settle(most, used)
            self._settled.set()
            self._settled.clear()
            self.purse.elsewhere = self._means.record(self.purse.spent)
        if self._means.identity.observe(said.identity):
            self.sound(Alarm(kind="model", aspect="", detail=f"the endpoint says that it is {said.identity!r} now"))
        self._check_hold()  # whatever has come since an alarm may be of the model that raised it
        return said

    async def _set_aside(self, most: Spend, purse: Purse) -> None:
        """Take out of the purse what a call may use, as soon as calls under way have left enough of it."""
        while not purse.reserve(most):
            if shortage := purse.shortage(most):
                kind = JudgeLost if self.purse.shortage(most) else JudgeDeclined
                raise kind(f"the budget of judging is spent: {shortage}")
            await self._settled.wait()


def needed_for(rubrics: Iterable[Rubric], manner: Manner) -> Spend:
    """What a budget must hold for one judgement on each aspect, of texts of full length that are English or code: one
    call as dear as can be, which is what is set aside for the last of them, and of every other what it uses then.
    """
    exhibit = Exhibit(task="x" * manner.text_characters, work="x" * manner.text_characters)
    tokens, asking = draw_tokens(exhibit), Asking(limit=manner.text_characters)
    calls = [_most(ask(rubric, exhibit, tokens, asking), manner) for rubric in rubrics for _ in range(manner.votes)]
    likely = sum(call.prompt_tokens // BYTES_PER_TOKEN for call in calls)
    dearest = max((call.prompt_tokens for call in calls), default=0)
    return Spend(
        calls=len(calls),
        prompt_tokens=likely + dearest - dearest // BYTES_PER_TOKEN,
        completion_tokens=len(calls) * manner.max_tokens,
    )


def _most(messages: Sequence[Message], manner: Manner) -> Spend:
    """The most that a call can use: no token is less than a byte."""
    read = sum(len(message["content"].encode()) for message in messages) + FRAME_TOKENS
    return Spend(calls=1, prompt_tokens=read, completion_tokens=manner.max_tokens)


def draw_tokens(exhibit: Exhibit) -> Tokens:
    """A mark that does not occur in what it will stand around, and a nonce."""
    while True:
        mark = secrets.token_hex(MARK_BYTES)
        if mark not in exhibit.task and mark not in exhibit.work:
            return Tokens(mark=mark, nonce=secrets.token_hex(MARK_BYTES))
