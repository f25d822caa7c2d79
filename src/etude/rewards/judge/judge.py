"""The judge: requests votes on one aspect of one text from an endpoint, and counts them.

    text ──▶ cached votes ──▶ circuit ──▶ budget ──▶ endpoint ──▶ readable? ──▶ tally ──▶ judgement
                                                          ▲            │ no, the first time
                                                          └────────────┘

consumes      a text and a rubric                 produces   a judgement, or JudgeUnavailable
waits for     budget that running calls release, a free call slot, the endpoint; all within ``timeout_s``
on shutdown   running calls are cancelled and charged their whole reservation

Owns the order of these steps. Decisions are in pure modules: the prompts, the votes and their tally, the budget. A
failure never becomes a score.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from etude.aio import gather_or_cancel
from etude.errors import JudgeDeclined, JudgeLost, JudgeUnavailable
from etude.protocols import Clock
from etude.rewards.judge.budget import JudgeBudget, JudgePause, Spend
from etude.rewards.judge.calibration import Alarm, IdentityWatch
from etude.rewards.judge.endpoint import ChatEndpoint, ChatReply, JudgeCall
from etude.rewards.judge.prompts import (
    Asking,
    JudgeInput,
    JudgeParams,
    Message,
    ReplyFault,
    Rubric,
    Tokens,
    ask,
    judge_fingerprint,
    schema,
)
from etude.rewards.judge.votes import Judgement, Vote, VoteCache, cache_key, read_vote, tally
from etude.types import Json

OPEN, PROBING = "open", "probing"
"""States of a circuit in which nothing, or one judgement at a time, may start."""
MARK_BYTES = 16
"""Randomness of marks and nonces."""
TRIES = 2
"""Attempts of one vote: after an unparseable reply it is requested once more."""
FRAME_TOKENS = 64
"""Upper bound of the tokens that a chat template adds to two messages."""
BYTES_PER_TOKEN = 4
"""Typical ratio for English and code: a call reserves one token per byte, and most likely uses a quarter of that."""

T = TypeVar("T")


class CircuitBreaker(Protocol):
    """Decides when an endpoint is not called (:class:`etude.rollouts.breaker.Breaker` is one)."""

    @property
    def gave_up(self) -> bool:
        """True if the endpoint has failed for so long that waiting is pointless."""
        ...

    def ask(self, now: float) -> str:
        """The state at ``now``."""
        ...

    def succeeded(self) -> None:
        """Record a success."""
        ...

    def failed(self, now: float, *, probe: bool = False) -> None:
        """Record a failure."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeDeps:
    """Dependencies of a judge."""

    endpoint: ChatEndpoint
    cache: VoteCache
    budget: JudgeBudget
    """The budget of the run."""
    circuit: CircuitBreaker
    clock: Clock
    identity: IdentityWatch
    alarm: Callable[[Alarm], None]
    pause: JudgePause | None
    """Pause of all judging after an alarm; ``None``: it is only reported."""
    record: Callable[[Spend], Spend]
    """Stores this process's spending, after every call; returns the spending of the run's other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeLimits:
    """Limits of a judge."""

    timeout_s: float = 60.0
    """Limit of one judgement, including all votes, pauses and second tries."""
    concurrency: int = 16
    """Maximum number of concurrent calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """Format of a judge's reply."""

    about: str
    """Its subject, for error messages."""
    schema: Json
    """JSON schema, for endpoints that enforce one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One vote to request."""

    rubric: Rubric
    judged: JudgeInput
    number: int
    key: bytes

    @property
    def descending(self) -> bool:
        return self.number % 2 == 1


def vote_key(rubric: Rubric, params: JudgeParams, judged: JudgeInput, number: int) -> bytes:
    """Key of one vote in a cache."""
    return cache_key(judge_fingerprint(rubric, params), judged.task, judged.work, str(number))


class Judge:
    """Judges one aspect at a time."""

    def __init__(self, deps: JudgeDeps, params: JudgeParams, limits: JudgeLimits) -> None:
        self.params = params
        self.budget = deps.budget
        self._deps = deps
        self._limits = limits
        self._permits = asyncio.Semaphore(limits.concurrency)
        self._settled = asyncio.Event()  # set for a moment whenever a call releases unused budget
        self._is_probing = False
        self._trouble = ""

    async def judge(self, rubric: Rubric, judged: JudgeInput, budget: JudgeBudget, *, fresh: bool = False) -> Judgement:
        """Judge one aspect, paid from ``budget``; with ``fresh`` cached votes are ignored.

        Raises :class:`~etude.errors.JudgeUnavailable` if the endpoint is down, rejects the request or exceeds the time
        limit, and its subclass :class:`~etude.errors.JudgeLost` if it has been down for too long, if the budget is
        spent, or while judging is paused after an alarm.
        """
        questions = [self._question(rubric, judged, number) for number in range(self.params.votes)]
        cached = [None if fresh else self._deps.cache.get(question.key) for question in questions]
        missing = [question for question, vote in zip(questions, cached, strict=True) if vote is None]
        fresh_votes = iter(await self._ask_all(missing, budget) if missing else ())
        return tally(rubric, [next(fresh_votes) if vote is None else vote for vote in cached])

    async def converse(
        self, messages: Sequence[Message], reply_format: ResponseFormat, budget: JudgeBudget, *, seed: int
    ) -> ChatReply:
        """Make a call other than a vote, under the same limits. Raises like :meth:`judge`."""
        with self._admitted():
            return await self._in_time(self._call(messages, reply_format, budget, seed=seed), reply_format.about)

    def sound(self, alarm: Alarm) -> None:
        """Report an alarm, and pause judging if the recipe says so."""
        self._deps.alarm(alarm)
        if self._deps.pause is not None:
            self._deps.pause.begin(alarm.detail)

    def _check_pause(self) -> None:
        if self._deps.pause is not None and (reason := self._deps.pause.reason):
            raise JudgeLost(reason)

    def _question(self, rubric: Rubric, judged: JudgeInput, number: int) -> _Question:
        key = vote_key(rubric, self.params, judged, number)
        return _Question(rubric=rubric, judged=judged, number=number, key=key)

    async def _ask_all(self, questions: Sequence[_Question], budget: JudgeBudget) -> Sequence[Vote | ReplyFault]:
        """Request all of these votes; if the budget does not suffice, the votes that were paid for are cached."""
        with self._admitted():
            votes = gather_or_cancel(self._vote(question, budget) for question in questions)
            replies = await self._in_time(votes, questions[0].rubric.aspect)
            for reply in replies:
                if isinstance(reply, JudgeLost):
                    raise reply
        return [reply for reply in replies if not isinstance(reply, JudgeLost)]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Permit calls if the circuit breaker is closed, and report successes and the endpoint's failures to it."""
        self._check_pause()
        circuit, clock = self._deps.circuit, self._deps.clock
        state = circuit.ask(clock.now())
        if state == OPEN or (state == PROBING and self._is_probing):
            kind = JudgeLost if circuit.gave_up else JudgeUnavailable
            raise kind(f"the judge failed repeatedly and is not called for a while: {self._trouble}")
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
        timeout_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            slow = "it answers slowly, or judge.options.concurrency is too low"
            trouble = self._deps.endpoint.trouble or slow
            raise JudgeUnavailable(f"no judgement of {about!r} within {timeout_s:g} s: {trouble}") from None

    async def _vote(self, question: _Question, budget: JudgeBudget) -> Vote | ReplyFault | JudgeLost:
        """Request one vote, and a second time if the reply cannot be parsed and the budget allows it."""
        reply: Vote | ReplyFault | None = None
        reply_format = ResponseFormat(about=question.rubric.aspect, schema=schema(question.rubric))
        for attempt in range(TRIES):
            tokens = draw_tokens(question.judged)
            asking = Asking(
                limit=self.params.text_characters,
                descending=question.descending,
                fault=reply if isinstance(reply, ReplyFault) else None,
            )
            messages = ask(question.rubric, question.judged, tokens, asking)
            try:
                completion = await self._call(messages, reply_format, budget, seed=TRIES * question.number + attempt)
            except JudgeLost as spent:
                return spent
            reply = read_vote(completion.text, question.rubric, tokens.nonce, descending=question.descending)
            if isinstance(reply, Vote):
                if self._deps.identity.vouches_for(completion.identity):
                    self._deps.cache.put(question.key, reply)
                return reply
            reply = ReplyFault.CUT if completion.was_cut else reply
        assert isinstance(reply, ReplyFault)
        return reply

    async def _call(
        self, messages: Sequence[Message], reply_format: ResponseFormat, budget: JudgeBudget, *, seed: int
    ) -> ChatReply:
        """Make one call and charge it; an interrupted call is charged its whole reservation."""
        params = self.params
        most = _most(messages, params)
        call = JudgeCall(
            messages=messages,
            schema=reply_format.schema,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=seed,
        )
        await self._set_aside(most, budget)
        used = Spend()
        try:
            async with self._permits:
                used = most
                completion = await self._deps.endpoint.ask(call)
                used = completion.used or most
        except JudgeUnavailable:
            used = Spend(calls=1)
            raise
        finally:
            budget.settle(most, used)
            self._settled.set()
            self._settled.clear()
            self.budget.elsewhere = self._deps.record(self.budget.spent)
        if self._deps.identity.observe(completion.identity):
            self.sound(
                Alarm(kind="model", aspect="", detail=f"the endpoint says that it is {completion.identity!r} now")
            )
        self._check_pause()  # a reply that came after an alarm may be from the model that raised it
        return completion

    async def _set_aside(self, most: Spend, budget: JudgeBudget) -> None:
        """Reserve the maximum that a call may use, as soon as running calls leave enough budget."""
        while not budget.reserve(most):
            if shortage := budget.shortage(most):
                kind = JudgeLost if self.budget.shortage(most) else JudgeDeclined
                raise kind(f"the budget of judging is spent: {shortage}")
            await self._settled.wait()


def needed_for(rubrics: Iterable[Rubric], params: JudgeParams) -> Spend:
    """The budget for one judgement on each aspect, for texts of full length in English or code: the largest reservation
    of one call, needed for the last one, plus the likely usage of each of the others.
    """
    judged = JudgeInput(task="x" * params.text_characters, work="x" * params.text_characters)
    tokens, asking = draw_tokens(judged), Asking(limit=params.text_characters)
    calls = [_most(ask(rubric, judged, tokens, asking), params) for rubric in rubrics for _ in range(params.votes)]
    likely = sum(call.prompt_tokens // BYTES_PER_TOKEN for call in calls)
    dearest = max((call.prompt_tokens for call in calls), default=0)
    return Spend(
        calls=len(calls),
        prompt_tokens=likely + dearest - dearest // BYTES_PER_TOKEN,
        completion_tokens=len(calls) * params.max_tokens,
    )


def _most(messages: Sequence[Message], params: JudgeParams) -> Spend:
    """The maximum that a call can use: a token is at least one byte."""
    read = sum(len(message["content"].encode()) for message in messages) + FRAME_TOKENS
    return Spend(calls=1, prompt_tokens=read, completion_tokens=params.max_tokens)


def draw_tokens(judged: JudgeInput) -> Tokens:
    """Draw the mark of a call, which occurs in none of its texts, and a nonce."""
    while True:
        mark = secrets.token_hex(MARK_BYTES)
        if mark not in judged.task and mark not in judged.work:
            return Tokens(mark=mark, nonce=secrets.token_hex(MARK_BYTES))
