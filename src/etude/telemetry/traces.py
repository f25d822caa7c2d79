"""One trace per rollout, from admission to the step that consumed it, built from events.

    rollout 3f2a… ├ queue          its group was admitted ──▶ the attempt starts
                  ├ session        a gateway session is opened
                  ├ sandbox        a sandbox starts
                  ├ play           ├ chat policy     a call at the gateway (GenAI conventions)
                  │                │  └ generate     an engine works on it
                  │                └ …
                  ├ grading        hidden tests
                  ├ scoring        turns are fetched; parts of the reward, judges
                  ├ wait           for the other groups of its batch
                  └ train          the step that consumed it; linked with the step's own trace
    step 17       └ links to all its rollouts

The id of a trace is derived from the rollout's id, and a span's id from the trace's id and the span's name: processes
need not exchange ids, and a span that is built twice is identical. Owns the spans. Pure: no clock, no I/O.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from etude.telemetry.events import GroupAdmitted, Logged, ModelCall, RolloutClosed, StepDone
from etude.types import RolloutStage, RolloutStatus

Attribute: TypeAlias = str | int | float | bool | tuple[str, ...] | tuple[int, ...]
STAGES: Mapping[str, tuple[RolloutStage, ...]] = MappingProxyType(
    {
        "session": (RolloutStage.SESSION,),
        "sandbox": (RolloutStage.SANDBOX,),
        "play": (RolloutStage.MODEL, RolloutStage.TOOLS),
        "grading": (RolloutStage.GRADING,),
        "scoring": (RolloutStage.SCORING,),
    }
)
"""Spans of a rollout, in order, with the stages that each covers; model and tools alternate."""
PROCESS_OF = {"session": "gateway", "sandbox": "sandbox", "grading": "grader"}
"""Span → the service that works in it; for other spans, the rollouts process."""
SESSIONS = 20_000
"""Maximum sessions whose calls are stored until their rollout ends; the oldest are removed first."""
MODEL = "policy"
"""Name of the trained model."""
PROVIDER = "etude"
ROOT = "rollout"
"""Name from which the id of a trace's root is derived."""
TRAIN = "train"
"""Purpose of the rollouts that steps consume."""
FAILED = 400
"""Lowest HTTP status of a failure."""
NOTHING: Mapping[str, Attribute] = MappingProxyType({})
GroupKey: TypeAlias = tuple[str, int]
"""Purpose and index of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A unit of work, with start and end in Unix time."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""
    parent_id: int | None
    """``None``: the root of its trace."""
    name: str
    service: str
    """Name of the process that did the work."""
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    links: tuple[tuple[int, int], ...] = ()
    """Trace and span ids of related spans."""
    error: str = ""
    """Empty if it succeeded."""
    is_call: bool = False
    """True for a call of another process."""


def trace_id(name: str) -> int:
    """The trace id of a rollout, by its id, or of a step, by ``RUN/step/NUMBER``."""
    return int.from_bytes(hashlib.sha256(f"etude trace {name}".encode()).digest()[:16]) or 1


def span_id(trace: int, name: str) -> int:
    """The id of a span, by its name, which is unique in its trace."""
    return int.from_bytes(hashlib.sha256(f"{trace:032x} {name}".encode()).digest()[:8]) or 1


class RolloutTraces:
    """Builder of spans from events: those of a rollout when it ends, and the last two when it is trained on."""

    def __init__(self, run: str, share: float = 1.0) -> None:
        """``run`` is the run's id; ``share`` is the share of rollouts to trace."""
        self._run = run
        self._share = share
        self._calls: dict[str, list[Logged]] = {}
        """Session → its calls so far."""
        self._admitted: dict[GroupKey, float] = {}
        """Group not consumed yet → its time of admission."""
        self._waiting: dict[GroupKey, list[tuple[str, float]]] = {}
        """Group not consumed yet → its graded rollouts, each with the time of its end."""

    def add(self, logged: Logged) -> list[Span]:
        """Process one event and return the spans that are now complete."""
        match logged.event:
            case GroupAdmitted() as admitted:
                self._admitted[admitted.purpose, admitted.group_index] = logged.at_s
            case ModelCall(session=session):
                self._calls.setdefault(session, []).append(logged)
                while len(self._calls) > SESSIONS:
                    del self._calls[next(iter(self._calls))]
            case RolloutClosed() as closed:
                return self._closed(closed, logged)
            case StepDone() as done:
                return self._trained(done, logged)
            case _:
                pass
        return []

    def _is_traced(self, rollout_id: str) -> bool:
        return trace_id(rollout_id) < self._share * (1 << 128)

    def _closed(self, closed: RolloutClosed, logged: Logged) -> list[Span]:
        calls = self._calls.pop(closed.session, [])
        group = (closed.purpose, closed.group_index)
        if not self._is_traced(closed.rollout_id):
            return []
        if closed.purpose == TRAIN and closed.status == RolloutStatus.GRADED:
            self._waiting.setdefault(group, []).append((closed.rollout_id, logged.at_s))
        start_s = logged.at_s - closed.seconds
        admitted_s = min(self._admitted.get(group, start_s), start_s)
        trace = trace_id(closed.rollout_id)
        root = Span(
            trace_id=trace,
            span_id=span_id(trace, ROOT),
            parent_id=None,
            name=f"invoke_agent {MODEL}",
            service=logged.process,
            start_s=admitted_s,
            end_s=logged.at_s,
            attributes=_of_rollout(closed),
            error="" if closed.status == RolloutStatus.GRADED else closed.reason,
        )
        spans = [root, *_stages(root, closed, start_s)]
        play = next((span for span in spans if span.name == "play"), root)
        return spans + [span for number, call in enumerate(calls) for span in _call(call, number, play)]

    def _trained(self, done: StepDone, logged: Logged) -> list[Span]:
        """The last spans of the rollouts that a step consumed, and the step's own trace."""
        start_s = logged.at_s - done.metrics.get("busy_s", 0.0)
        own = trace_id(f"{self._run}/step/{done.step}")
        step = (own, span_id(own, "step"))
        last = [
            span
            for index in done.groups
            for rollout_id, ended_s in self._consumed(index)
            for span in _consumption(rollout_id, (ended_s, max(ended_s, start_s), logged.at_s), step, logged)
        ]
        trained = [span for span in last if span.links]
        return [
            *last,
            Span(
                trace_id=own,
                span_id=step[1],
                parent_id=None,
                name=f"step {done.step}",
                service=logged.process,
                start_s=start_s,
                end_s=logged.at_s,
                attributes={
                    "etude.step": done.step,
                    **{f"etude.{name}": value for name, value in done.metrics.items()},
                },
                links=tuple((span.trace_id, span.span_id) for span in trained),
            ),
        ]

    def _consumed(self, index: int) -> list[tuple[str, float]]:
        """Remove and return the graded rollouts of a training group."""
        self._admitted.pop((TRAIN, index), None)
        return self._waiting.pop((TRAIN, index), [])


def _of_rollout(closed: RolloutClosed) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": MODEL,
        "gen_ai.conversation.id": closed.session or closed.rollout_id,
        "gen_ai.usage.output_tokens": closed.sampled_tokens,
        "etude.rollout": closed.rollout_id,
        "etude.purpose": closed.purpose,
        "etude.group": closed.group_index,
        "etude.status": str(closed.status),
        "etude.reason": closed.reason,
        "etude.turns": closed.turns,
        "etude.version": closed.version,
        "etude.template": closed.template,
        "etude.disposition": str(closed.disposition),
    }
    return attributes if closed.reward is None else {**attributes, "etude.reward": closed.reward}


def _stages(root: Span, closed: RolloutClosed, start_s: float) -> Iterator[Span]:
    """The stages of a rollout as consecutive spans."""
    if start_s > root.start_s:
        yield _child(root, "queue", (root.start_s, start_s), root.service)
    for name, stages in STAGES.items():
        seconds = [closed.stage_s[stage] for stage in stages if stage in closed.stage_s]
        if seconds:
            end_s = start_s + sum(seconds)
            tools: dict[str, Attribute] = {"etude.tools_s": seconds[-1]} if len(seconds) > 1 else {}
            yield _child(root, name, (start_s, end_s), PROCESS_OF.get(name, root.service), tools)
            start_s = end_s


def _call(logged: Logged, number: int, play: Span) -> Iterator[Span]:
    """One model call, by OpenTelemetry's conventions for generative AI, and the engine's part of it."""
    call = logged.event
    assert isinstance(call, ModelCall)
    start_s = logged.at_s - call.seconds
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": MODEL,
        "gen_ai.conversation.id": call.session,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.reused_tokens,
        "http.response.status_code": call.status,
        "etude.api": call.api,
        "etude.versions": tuple(call.versions),
    }
    if call.versions:
        attributes["gen_ai.response.model"] = f"{MODEL}@{call.versions[-1]}"
    if call.first_token_s is not None:
        attributes["etude.first_token_s"] = call.first_token_s
    chat = Span(
        trace_id=play.trace_id,
        span_id=span_id(play.trace_id, f"call {number}"),
        parent_id=play.span_id,
        name=f"chat {MODEL}",
        service=logged.process,
        start_s=start_s,
        end_s=logged.at_s,
        attributes=attributes,
        error="" if call.status < FAILED else str(call.status),
        is_call=True,
    )
    yield chat
    if call.engine:
        yield Span(
            trace_id=play.trace_id,
            span_id=span_id(play.trace_id, f"engine {number}"),
            parent_id=chat.span_id,
            name="generate",
            service=call.engine,
            start_s=start_s + call.waited_s,
            end_s=logged.at_s,
            attributes={"gen_ai.usage.output_tokens": call.completion_tokens},
        )


def _consumption(
    rollout_id: str, times_s: tuple[float, float, float], step: tuple[int, int], logged: Logged
) -> Iterator[Span]:
    """The spans of a rollout between its end, the start of the step that trained on it, and that step's end."""
    assert isinstance(logged.event, StepDone)
    trace, (ended_s, begin_s, done_s) = trace_id(rollout_id), times_s
    for name, start_s, end_s in (("wait", ended_s, begin_s), ("train", begin_s, max(begin_s, done_s))):
        yield Span(
            trace_id=trace,
            span_id=span_id(trace, name),
            parent_id=span_id(trace, ROOT),
            name=name,
            service=logged.process,
            start_s=start_s,
            end_s=end_s,
            attributes={"etude.step": logged.event.step},
            links=(step,) if name == "train" else (),
        )


def _child(
    root: Span, name: str, times_s: tuple[float, float], service: str, attributes: Mapping[str, Attribute] = NOTHING
) -> Span:
    return Span(
        trace_id=root.trace_id,
        span_id=span_id(root.trace_id, name),
        parent_id=root.span_id,
        name=name,
        service=service,
        start_s=times_s[0],
        end_s=times_s[1],
        attributes=attributes,
    )
