"""The judge: requests votes on one aspect of one text from an endpoint, and counts them.

    text ──▶ cached votes ──▶ circuit ──▶ budget ──▶ endpoint ──▶ readable? ──▶ tally ──▶ judgement
                                                          ▲            │ no, the first time
                                                          └────────────┘

consumes      a text and a rubric                 produces   a judgement, or JudgeUnavailable
waits for     what calls under way give back of the budget, its turn among the calls, the endpoint; all within
              ``timeout_s`` of the judgement
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
"""Tries of one vote: an unreadable reply is requested once more."""
FRAME_TOKENS = 64
"""Most that a chat template adds to two messages."""
BYTES_PER_TOKEN = 4
"""About what English and code come to: a call sets aside a token for every byte, and most likely uses a quarter."""

T = TypeVar("T")


class CircuitBreaker(Protocol):
    """Decides when an endpoint is not called (:class:`etude.rollouts.breaker.Breaker` is one)."""

    @property
    def gave_up(self) -> bool:
        """True if none could be had for so long that waiting is pointless."""
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
class JudgeDeps:
    """Dependencies of a judge."""

    endpoint: ChatEndpoint
    cache: VoteCache
    budget: JudgeBudget
    """The run's."""
    circuit: CircuitBreaker
    clock: Clock
    identity: IdentityWatch
    alarm: Callable[[Alarm], None]
    pause: JudgePause | None
    """Pause of all judging after an alarm; ``None``: it is only reported."""
    record: Callable[[Spend], Spend]
    """Told what was spent so far, after every call; says what other processes of the run have spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeLimits:
    """Limits of a judge."""

    timeout_s: float = 60.0
    """For one judgement: all its votes, pauses and second tries."""
    concurrency: int = 16
    """Calls under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """Format of a judge's reply."""

    about: str
    """For errors."""
    schema: Json
    """For endpoints that hold a reply to one."""


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
        self._settled = asyncio.Event()  # set for a moment whenever a call gives back what it did not use
        self._is_probing = False
        self._trouble = ""

    async def judge(self, rubric: Rubric, judged: JudgeInput, budget: JudgeBudget, *, fresh: bool = False) -> Judgement:
        """Have one aspect judged, out of ``budget``; ``fresh``: no cached vote counts.

        Raises :class:`~etude.errors.JudgeUnavailable` when the endpoint is down, refuses or is late, and its kind
        :class:`~etude.errors.JudgeLost` when it has been down for too long, when the budget is spent, and after an
        alarm that holds.
        """
        questions = [self._question(rubric, judged, number) for number in range(self.params.votes)]
        cached = [None if fresh else self._deps.cache.get(question.key) for question in questions]
        missing = [question for question, vote in zip(questions, cached, strict=True) if vote is None]
        fresh_votes = iter(await self._ask_all(missing, budget) if missing else ())
        return tally(rubric, [next(fresh_votes) if vote is None else vote for vote in cached])

    async def converse(
        self, messages: Sequence[Message], reply_format: ResponseFormat, budget: JudgeBudget, *, seed: int
    ) -> ChatReply:
        """One call that is no vote, under the same bounds. Raises like :meth:`judge`."""
        with self._admitted():
            return await self._in_time(self._call(messages, reply_format, budget, seed=seed), reply_format.about)

    def sound(self, alarm: Alarm) -> None:
        """Tell of an alarm, and hold from then on where the recipe wants that."""
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
        """All of these votes; where the budget has not enough for all, those that it had enough for are cached."""
        with self._admitted():
            votes = gather_or_cancel(self._vote(question, budget) for question in questions)
            replies = await self._in_time(votes, questions[0].rubric.aspect)
            for reply in replies:
                if isinstance(reply, JudgeLost):
                    raise reply
        return [reply for reply in replies if not isinstance(reply, JudgeLost)]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Calls that the circuit lets pass; it learns how they ended, unless that is not the endpoint's fault."""
        self._check_pause()
        circuit, clock = self._deps.circuit, self._deps.clock
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
        timeout_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            slow = "it answers slowly, or judge.options.concurrency is low for so many"
            trouble = self._deps.endpoint.trouble or slow
            raise JudgeUnavailable(f"no judgement of {about!r} within {timeout_s:g} s: {trouble}") from None

    async def _vote(self, question: _Question, budget: JudgeBudget) -> Vote | ReplyFault | JudgeLost:
        """One vote, asked for a second time if it cannot be read, as far as the budget allows."""
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
        """One call, paid for; a call that was cut short is counted as if it had used all it might."""
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
        self._check_pause()  # whatever has come since an alarm may be of the model that raised it
        return completion

    async def _set_aside(self, most: Spend, budget: JudgeBudget) -> None:
        """Take out of the budget what a call may use, as soon as calls under way have left enough of it."""
        while not budget.reserve(most):
            if shortage := budget.shortage(most):
                kind = JudgeLost if self.budget.shortage(most) else JudgeDeclined
                raise kind(f"the budget of judging is spent: {shortage}")
            await self._settled.wait()


def needed_for(rubrics: Iterable[Rubric], params: JudgeParams) -> Spend:
    """Budget for one judgement on each aspect, of texts of full length that are English or code: one
    call as dear as can be, which is what is set aside for the last of them, and of every other what it uses then.
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
    """The most that a call can use: no token is less than a byte."""
    read = sum(len(message["content"].encode()) for message in messages) + FRAME_TOKENS
    return Spend(calls=1, prompt_tokens=read, completion_tokens=params.max_tokens)


def draw_tokens(judged: JudgeInput) -> Tokens:
    """Draw the delimiter of a call, which occurs in none of its texts, and a nonce."""
    while True:
        mark = secrets.token_hex(MARK_BYTES)
        if mark not in judged.task and mark not in judged.work:
            return Tokens(mark=mark, nonce=secrets.token_hex(MARK_BYTES))
