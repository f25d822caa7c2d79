"""Every token that a model samples in a session becomes trainable, exactly once and in its sampling context.

Random harness programs use one session: several agents, edits, summaries, tools, stop strings, truncated replies, ``n``
> 1, retries, and clients that lose or change what they send back. The engine samples random ids, special ones included,
and logs its prompts and samples. Turns and trajectories are compared with that log.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.gateway.api.calls import Answer, Call, FinishReason, Reply, Sampling
from etude.gateway.capture.conversations import Conversation, alike
from etude.gateway.service import truncated
from etude.protocols import Completion, SamplingParams, turn_of
from etude.tokens.chat import ChatTemplate
from etude.tokens.jinja import JinjaFormat, read_checkpoint
from etude.tokens.messages import ChatFormat, ChatMessage, Tool
from etude.trainer.batching.build import build_trajectories
from etude.types import Finish, Ids, Rollout, RolloutStatus, Trajectory, Turn

SOURCE = ["def total(values):\n    return sum(values)\n", '<tool_call>{"name": "read"}</tool_call><think>'] * 4
TEMPLATE = r"""
{%- if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|user|><tool_response>' + message.content + '</tool_response><|end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\n' }}
{%- else %}
{{- '<|' + message.role + '|>' + message.content + '<|end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""In the style of ChatML with Hermes' calls; a line break follows each message, which is not sampled."""
TOOLS = (Tool(name="read", parameters={"type": "object"}),)
SNIPPETS = (
    '<tool_call>{"name": "read", "arguments": {"path": "a", "n": 1.0}}</tool_call>',
    '<tool_call>{"name": "read", "arguments": {broken</tool_call>',
    "<tool_call>",
    " I look. \n",
    "<think>hm</think>ok",
    "return",
    "STOP",
    "é",
)
"""What models say, besides noise."""


@cache
def chat_format(kind: str) -> ChatFormat:
    template = ChatTemplate.train(SOURCE, vocab_size=320)
    if kind == "built-in":
        return template
    with TemporaryDirectory() as name:
        folder = Path(name)
        template.save(folder)
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(config | {"chat_template": TEMPLATE}), encoding="utf-8")
        return JinjaFormat(read_checkpoint(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReply:
    """A conversation as a client remembers it."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]


@dataclass(slots=True)
class SimulatedSession:
    """One session, a client that plays many agents, and the engine's log."""

    chat: ChatFormat
    data: st.DataObject
    conversation: Conversation
    log: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """What the engine saw and said, of each reply that was recorded."""
    recorded: list[RecordedReply] = field(default_factory=list)
    """With each turn, what its caller knows after it."""
    requests: int = 0

    def draw(self, *chances: object) -> object:
        return self.data.draw(st.sampled_from(chances))

    def play(self) -> None:
        """One call of some agent, maybe tried more than once."""
        request = self._request()
        sampling = Sampling(count=self.data.draw(st.integers(1, 3)), stops=("STOP",) if self.draw(True, False) else ())
        call = Call(
            messages=request.messages, tools=request.tools, sampling=sampling, single_call=bool(self.draw(True, False))
        )
        self.requests += 1
        request_id = f"r{self.requests}" if self.draw(True, False) else ""
        attempts = [self._sampled(call, number) for number in range(self.data.draw(st.sampled_from([1, 1, 2])))]
        lost = self.draw(False, False, False, True)
        for answer in attempts[1:] if lost else attempts:
            before = self.conversation.answered(request_id, call)
            counted = self.conversation.record(call, answer, request_id)
            again = self.conversation.last_answer(call)
            assert again is not None
            assert counted.answer_id == again.answer_id == (before or answer).answer_id
            for one, other in zip(counted.replies, again.replies, strict=True):
                assert one.turn.prompt_ids.tolist() == other.turn.prompt_ids.tolist()
            if before is None:
                self._keep(request, answer)

    def _request(self) -> RecordedReply:
        """A conversation that waits for an answer: a new agent's, or one that continues, edited or not."""
        if not self.recorded or self.draw(False, False, False, True):
            system = ChatMessage(role="system", content=str(self.draw("main", "sub-agent")))
            tools = TOOLS if self.draw(True, False) else ()
            return RecordedReply(messages=(system, self._user()), tools=tools)
        before = self.recorded[self.data.draw(st.integers(0, len(self.recorded) - 1))]
        messages = tuple(self._sent_back(message) for message in before.messages)
        match self.draw("go on", "go on", "go on", "edit", "summarise", "ask again"):
            case "edit":
                place = self.data.draw(st.integers(0, len(messages) - 1))
                edited = replace(messages[place], content=messages[place].content + "~")
                messages = (*messages[:place], edited, *messages[place + 1 :])
            case "summarise":
                messages = (messages[0], ChatMessage(role="user", content="so far: " + messages[-1].content))
                return replace(before, messages=messages)
            case "ask again":
                return replace(before, messages=messages[:-1])
        outputs = [
            ChatMessage(role="tool", content="ok", tool_call_id=call.call_id) for call in messages[-1].tool_calls
        ]
        return replace(before, messages=(*messages, *(outputs or [self._user()])))

    def _user(self) -> ChatMessage:
        return ChatMessage(role="user", content=str(self.draw("go", "on <|end|>", " \n", "é")))

    def _sent_back(self, message: ChatMessage) -> ChatMessage:
        """A reply as a client sends it back."""
        if message.role != "assistant":
            return message
        match self.draw("as it is", "as it is", "stripped", "renamed"):
            case "stripped":
                return replace(message, content=message.content.strip(), thinking="")
            case "renamed":
                calls = [
                    replace(call, call_id="other", arguments=json.dumps(json.loads(call.arguments), indent=1))
                    for call in message.tool_calls
                ]
                return replace(message, tool_calls=tuple(calls))
        return message

    def _sampled(self, call: Call, number: int) -> Answer:
        prompt = self.conversation.prompt(call)
        self._check_prompt(call, prompt.token_ids.tolist(), prompt.reused)
        return Answer(
            answer_id=f"{self.requests}-{number}",
            created=0,
            model="policy",
            replies=tuple(self._reply(call, prompt.token_ids) for _ in range(call.sampling.count)),
            reused_tokens=prompt.reused,
        )

    def _reply(self, call: Call, prompt_ids: Ids) -> Reply:
        ids = self._ids()
        reader = self.chat.reader(call.tools, stops=call.sampling.stops, single_call=call.single_call)
        middle = self.data.draw(st.integers(0, len(ids)))
        for part in (ids[:middle], ids[middle:]):
            reader.feed(part)
        reader.finish()
        completion = Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), self.requests, np.int32),
            finish=Finish.STOP if ids and ids[-1] in self.chat.stop_ids else Finish.LENGTH,
        )
        if reader.stopped_after is not None:
            completion = truncated(completion, reader.stopped_after)
        turn = turn_of(prompt_ids, SamplingParams(max_tokens=99), completion)
        return Reply(message=reader.message(), finish_reason=FinishReason.STOP, stop_text=reader.stop_text, turn=turn)

    def _ids(self) -> list[int]:
        """Noise and words, up to the first id that stops."""
        noise = st.lists(st.integers(0, self.chat.vocab_size - 1), max_size=4)
        words = st.sampled_from(SNIPPETS).map(self.chat.encode)
        ids = [token for part in self.data.draw(st.lists(noise | words, max_size=3)) for token in part]
        ids += self.data.draw(st.sampled_from([[], [self.chat.stop_ids[0]]]))
        end = next((place for place, token in enumerate(ids) if token in self.chat.stop_ids), len(ids))
        return ids[: end + 1]

    def _keep(self, request: RecordedReply, answer: Answer) -> None:
        for reply in answer.replies:
            self.log.append((reply.turn.prompt_ids.tolist(), reply.turn.completion_ids.tolist()))
            self.recorded.append(replace(request, messages=(*request.messages, reply.message)))

    def _check_prompt(self, call: Call, prompt_ids: list[int], reused: int) -> None:
        """The prompt begins with all tokens of the longest earlier turn whose conversation it continues."""
        begun = [
            (len(recorded.messages), [*prompt, *output])
            for recorded, (prompt, output) in zip(self.recorded, self.log, strict=True)
            if recorded.tools == call.tools and begins_with(call.messages, recorded.messages)
        ]
        longest = max((length for length, _ in begun), default=0)
        continued = [ids for length, ids in begun if length == longest and prompt_ids[: len(ids)] == ids]
        assert continued or not begun
        assert reused in {len(ids) for ids in continued} | ({0} if not begun else set())
        if not begun:
            assert prompt_ids == self.chat.open(call.messages, call.tools)


def begins_with(messages: Sequence[ChatMessage], start: Sequence[ChatMessage]) -> bool:
    return len(start) <= len(messages) and all(map(alike, messages, start))


def trained(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The trained parts: the context and the sampled tokens of each turn."""
    ids, mask, turns = trajectory.token_ids.tolist(), trajectory.loss_mask.tolist(), []
    for start, bound in pairwise((*trajectory.turn_starts, len(ids))):
        end = next((place for place in range(start, bound) if not mask[place]), bound)
        turns.append((tuple(ids[:start]), tuple(ids[start:end])))
    assert sum(len(output) for _, output in turns) == sum(mask)
    return turns


def trajectories_of(turns: Sequence[Turn]) -> tuple[Trajectory, ...]:
    return build_trajectories(
        Rollout(
            rollout_id="r",
            group_index=0,
            slot=0,
            attempt=0,
            status=RolloutStatus.GRADED,
            reward=1.0,
            turns=tuple(turns) or (EMPTY,),
        ),
        1.0,
    )


NONE = np.array([], np.int32)
EMPTY = Turn(prompt_ids=NONE, completion_ids=NONE, logprobs=NONE.astype(np.float32), versions=NONE, finish=Finish.STOP)


@pytest.mark.parametrize("kind", ["built-in", "jinja"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_an_engine_saw_and_said_is_trained_exactly_once(kind: str, data: st.DataObject) -> None:
    chat = chat_format(kind)
    session = SimulatedSession(chat, data, Conversation("s", chat))
    for _ in range(data.draw(st.integers(1, 6))):
        session.play()
    turns = session.conversation.turns
    assert [(turn.prompt_ids.tolist(), turn.completion_ids.tolist()) for turn in turns] == session.log
    output = Counter((tuple(prompt), tuple(ids)) for prompt, ids in session.log if ids)
    assert Counter(turn for trajectory in trajectories_of(turns) for turn in trained(trajectory)) == output


@pytest.mark.parametrize("kind", ["built-in", "jinja"])
def test_an_undisturbed_conversation_is_one_trajectory(kind: str) -> None:
    chat = chat_format(kind)
    conversation, messages = Conversation("s", chat), [ChatMessage(role="user", content="go")]
    for number in range(5):
        call = Call(messages=tuple(messages), tools=TOOLS)
        prompt = conversation.prompt(call)
        ids = np.array([*chat.encode(SNIPPETS[number % 4]), *chat.stop_ids[: number % 2]], np.int32)
        reader = chat.reader(TOOLS)
        reader.feed(ids.tolist())
        reader.finish()
        logprobs, versions = -np.ones(len(ids), np.float32), np.full(len(ids), number, np.int32)
        completion = Completion(token_ids=ids, logprobs=logprobs, versions=versions, finish=Finish.STOP)
        turn = turn_of(prompt.token_ids, SamplingParams(max_tokens=9), completion)
        reply = Reply(message=reader.message(), finish_reason=FinishReason.STOP, stop_text=None, turn=turn)
        answer = Answer(answer_id=str(number), created=0, model="policy", replies=(reply,), reused_tokens=prompt.reused)
        conversation.record(call, answer)
        messages += [reply.message, ChatMessage(role="tool", content="<|end|>", tool_call_id="x")]
    (trajectory,) = trajectories_of(conversation.turns)
    assert len(trajectory.turn_starts) == 5
    assert int(trajectory.loss_mask.sum()) == sum(len(turn.completion_ids) for turn in conversation.turns)
