"""Targets of the fuzzer: every reader of bytes that étude did not make, or that were on a disk meanwhile.

A row is the reader, the errors that its docstring names, and the files of the saved run (`tests/compatibility`) that
are inputs of it. Further inputs are in ``corpus/NAME/``, among them those that a reader once broke on.
"""

import asyncio
import base64
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
from prometheus_client.parser import text_string_to_metric_families

from etude.config.loading import apply_override, load_fleet, load_recipe, load_suite
from etude.config.log import Condition
from etude.config.tasks import DatasetOptions
from etude.dashboard.suite_results import read_results
from etude.engines.api_client import event_data
from etude.engines.http import decode_completion, decode_request
from etude.engines.sglang.engine import SglangFeatures
from etude.engines.sglang.engine import read_answer as read_sglang_answer
from etude.engines.vllm import answers as vllm
from etude.errors import ConfigError, DamagedError, EngineUnavailable, SandboxError, UserError
from etude.feedback.signals import NoReport, read_report
from etude.feedback.turns import decode_records
from etude.fleet.state import Desired, Observed
from etude.gateway.api import chat, completions, messages, responses
from etude.gateway.api.calls import ApiError
from etude.gateway.http.keyfile import KeyFile
from etude.gateway.upstream.calls import read_usage
from etude.gateway.upstream.translation import Untranslatable, completion_of, error_of, request_of
from etude.gateway.upstream.words import CallTranscript
from etude.harnesses.actions import read_calls
from etude.harnesses.shell import read_command
from etude.harnesses.summaries import read_summary
from etude.harnesses.tools import parse_call
from etude.ledger.archive import parse_comparison
from etude.ledger.records import decode_observed, decode_rollout, decode_task
from etude.ledger.turns import decode_turns
from etude.models.checkpoint import load_spec
from etude.protocols import SamplingParams
from etude.rewards.graders.queries import read_answers
from etude.rewards.graders.script import read_reward
from etude.rewards.judge.calibration import parse_calibration, parse_items
from etude.rewards.judge.endpoint import read_answer
from etude.rewards.judge.hints import read_hints
from etude.rewards.judge.prompts import Rubric, parse_rubric
from etude.rewards.judge.votes import read_vote
from etude.rewards.monitor.acts import code_acts, shell_acts
from etude.rewards.shaping.comments import parse_source
from etude.routing_table import RoutingTable
from etude.run.gpu_machine import parse_size
from etude.run.lending import first_tokens
from etude.run.process_name import ProcessName
from etude.sandboxes.images.archives import read_archive
from etude.sandboxes.qemu.guest.frames import FrameError, Inbox
from etude.sandboxes.remote import wire
from etude.sandboxes.remote.principals import read_clients
from etude.simulation.split import parse_goal
from etude.taskgen.failures import NoTestsError, SourceError
from etude.taskgen.fidelity.sessions import read_sessions
from etude.taskgen.history.progress import read_progress
from etude.taskgen.history.records import read_records
from etude.taskgen.projects import read_project
from etude.taskgen.survey import Survey
from etude.taskgen.testruns import read_report as read_test_report
from etude.tasks.corpora import conversations
from etude.tasks.datasets.family import read_questions
from etude.tasks.harbor.compose import parse_compose
from etude.tasks.harbor.dockerfile import plain_dockerfile
from etude.tasks.harbor.settings import TaskFolderError, parse_settings
from etude.tasks.openenv import read_action
from etude.tasks.requests import read_requests
from etude.tasks.suites import read_retired
from etude.telemetry.log import EventReader
from etude.tinker import protobuf
from etude.tinker.messages import decode_batch
from etude.tokens.argument_values import read_object
from etude.tokens.chat import ChatTemplate
from etude.tokens.grammars import GRAMMARS
from etude.tokens.jinja import load_format
from etude.tokens.messages import Tool
from etude.tokens.reader import read_text
from etude.tokens.templates import JinjaTemplate
from etude.tokens.toolcalls import Grammar, ReplyMarks
from etude.trainer.checkpoint import Checkpoints
from etude.types import Json, WeightVersion
from etude.weights import frames
from etude.weights.chunks import Layout
from etude.weights.interop.checkpoint import INDEX_FILE, parse_tensor_file, read_checkpoint, read_index
from etude.weights.interop.version_folder import read_delta_index, read_version
from etude.weights.packs import read_pack
from etude.weights.records import Announcement, Link, LogStart, ReaderLease, parse_record
from tests.fuzz.fuzzing import Target

HERE = Path(__file__).parent
SAVED = max((HERE.parent / "compatibility").glob("*.tar.xz"))
"""The newest saved run."""
SCRATCH = tempfile.TemporaryDirectory(prefix="etude-fuzz-")
"""Folder of files that a reader opens by itself."""
MOST_NUMBERS = 1 << 20
"""A larger chunk takes a base that is as large."""
DELTAS = HERE.parent / "unit/weights/fixtures/slime-xor-xxh3-128"
"""Versions that slime wrote."""
NONCE = "0123456789abcdef"
"""What marks the text of a judge's own reply."""
RUBRIC = """
aspect = "style"
version = "1"
about = "answer"
tie = "median"
question = "How plain is it?"
[[scale]]
score = 1
anchor = "not"
[[scale]]
score = 2
anchor = "plain"
"""
TOOL = Tool(name="edit", parameters={"type": "object", "properties": {"path": {"type": "string"}}})


def text(data: bytes) -> str:
    """Bytes as text, as the readers of files and of models' replies get it."""
    return data.decode("utf-8", "replace")


def texts(read: Callable[[str], object]) -> Callable[[bytes], object]:
    """A reader of text."""
    return lambda data: read(text(data))


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of a file with a given name."""

    def write_and_read(data: bytes) -> object:
        place = Path(SCRATCH.name) / Path(name).stem / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        return drained(read(place))

    return write_and_read


def folder(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of a folder with a file of that name."""
    return file(name, lambda place: read(place.parent))


def drained(value: object) -> object:
    """All items of a result, since a generator has read nothing before."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else value


def objects(read: Callable[[dict[str, Any]], object]) -> Callable[[bytes], object]:
    """A reader of a JSON object that its caller has parsed; other inputs do not get to it."""

    def parse_and_read(data: bytes) -> object:
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None
        return read(value) if isinstance(value, dict) else None

    return parse_and_read


def _transcript(data: bytes) -> object:
    request, _, answer = data.partition(b"\n")
    transcript = CallTranscript()
    objects(lambda value: transcript.add(value, answer))(request)
    return transcript


def _events(data: bytes) -> object:
    """Events of a server's stream that arrives in parts."""

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1 + len(data) // 3):
            yield data[at : at + 1 + len(data) // 3]

    async def read() -> list[bytes]:
        return [event async for event in event_data(chunks())]

    return asyncio.run(read())


def _delta(place: Path) -> object:
    """A version that is a delta of a checkpoint, with the checkpoint's index."""
    shutil.copy(DELTAS / "weight_v000001" / INDEX_FILE, place)
    return read_version(place.parent, 1, base=read_checkpoint(DELTAS / "base"))


def _vllm_answer(answer: object) -> object:
    choice = vllm.read_choice(answer)
    token_ids, _ = vllm.tokens_of(choice, greedy=False)
    vllm.finish_of(choice)
    vllm.versions_of(choice, len(token_ids))
    return vllm.decode_routes(choice, len(token_ids) + 1, (0, 1))


def _sglang_answer(event: object) -> object:
    params = SamplingParams(max_tokens=4, want_routes=True)
    return read_sglang_answer(
        event, params, 1, SglangFeatures(sparse_layers=(0,), hidden_layers=1, experts_per_token=1)
    )


def _frames(data: bytes) -> object:
    """Every frame of a pack, with its changes to a chunk of zeros."""
    changes = []
    for _, view in read_pack(data):
        frame = frames.parse(view)
        if frame.elements <= MOST_NUMBERS:
            changes.append(frames.decode(frame, [np.zeros(frame.elements, f"u{frame.element.size_bytes}")]))
    return changes


def _record(kind: type[Any], name: str) -> Callable[[bytes], object]:
    return lambda data: parse_record(data, kind, name)


def _template(source: str) -> object:
    template = JinjaTemplate(
        source, {"bos_token": "<s>", "eos_token": "</s>"}, lambda: datetime(2026, 1, 2, tzinfo=UTC)
    )
    spoken: list[Json] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    return template.render(spoken, [{"type": "function", "function": {"name": "edit"}}], opening=True)


def _chat_format(place: Path) -> object:
    """The chat format of another project's checkpoint with a plain template, and the token ids of a text."""
    settings = {"eos_token": "<|end|>", "chat_template": "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"}
    (place / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    return load_format(place).encode("a word, 12 é")


def _grammar(grammar: Grammar) -> Target:
    marks = ReplyMarks(grammar=grammar)
    return Target(read=texts(lambda reply: read_text(reply, marks, [TOOL])))


def _guest(data: bytes) -> object:
    """Frames of a virtual machine that arrive in parts."""
    inbox, middle = Inbox(), len(data) // 2
    return [*inbox.feed(data[:middle]), *inbox.feed(data[middle:])]


def _wire(kind: type[wire.WireMessage]) -> Target:
    return Target(read=partial(wire.read_message, kind), errors=(ValueError,))


@cache
def _rubric() -> Rubric:
    return parse_rubric(RUBRIC, "rubric")


ENGINE_ANSWERS = {
    "engine request": Target(read=decode_request, errors=(ValueError,)),
    "engine completion": Target(read=decode_completion, errors=(ValueError,)),
    "server events": Target(read=_events),
    "vllm answer": Target(read=objects(_vllm_answer), errors=(EngineUnavailable,)),
    "sglang answer": Target(read=objects(_sglang_answer), errors=(EngineUnavailable,)),
}
REQUESTS = {
    "chat request": Target(read=chat.parse, errors=(ApiError,)),
    "completion request": Target(read=completions.parse, errors=(ApiError,)),
    "message request": Target(read=messages.parse, errors=(ApiError,)),
    "message count": Target(read=messages.parse_count, errors=(ApiError,)),
    "response request": Target(read=responses.parse, errors=(ApiError,)),
    "feedback report": Target(read=lambda data: read_report(data, str), errors=(NoReport,)),
    "tinker batch": Target(read=decode_batch, errors=(ValueError,)),
    "tinker fields": Target(read=protobuf.decode, errors=(ValueError,)),
    "key file": Target(read=file("keys.json", lambda place: KeyFile(place, 0.0).load()), errors=(DamagedError,)),
}
UPSTREAM = {
    "upstream usage": Target(read=read_usage),
    "upstream words": Target(read=_transcript),
    "upstream error": Target(read=error_of),
    "upstream request": Target(read=objects(request_of), errors=(Untranslatable,)),
    "upstream answer": Target(read=partial(completion_of, stream=True), errors=(Untranslatable,)),
    "judge answer": Target(read=objects(read_answer), errors=(LookupError, TypeError, ValueError)),
    "judge vote": Target(read=texts(lambda reply: read_vote(reply, _rubric(), NONCE))),
    "judge hints": Target(read=texts(lambda reply: read_hints(reply, 4, NONCE))),
}
SETTINGS = {
    "recipe": Target(
        read=file("run.toml", load_recipe),
        errors=(ConfigError,),
        saved=("recipes/quick*/run.toml", "recipes/t*/run.toml"),
    ),
    "fleet": Target(read=file("fleet.toml", load_fleet), errors=(ConfigError,), saved=("fleets/*.toml",)),
    "suite": Target(read=folder("suite.toml", load_suite), errors=(ConfigError,), saved=("suite/suite.toml",)),
    "sandbox clients": Target(
        read=file("clients.toml", lambda place: read_clients(place, None)), errors=(ConfigError,)
    ),
    "rubric": Target(
        read=texts(lambda rubric: parse_rubric(rubric, "rubric")),
        errors=(ConfigError,),
        saved=("recipes/summaries/factuality.toml", "recipes/summaries/style.toml"),
    ),
    "calibration": Target(
        read=texts(lambda report: parse_calibration(report, "calibration")),
        errors=(ConfigError,),
        saved=("recipes/summaries/*.json",),
    ),
    "labelled items": Target(read=texts(lambda lines: parse_items(lines, _rubric(), "items")), errors=(ConfigError,)),
    "setting": Target(read=texts(lambda setting: apply_override({}, setting)), errors=(ConfigError,)),
    "alert": Target(read=texts(Condition.parse), errors=(ValueError,)),
    "comparison": Target(read=texts(parse_comparison), errors=(ConfigError,)),
    "memory size": Target(read=texts(parse_size), errors=(ConfigError,)),
    "goal": Target(read=texts(parse_goal), errors=(ConfigError,)),
    "process name": Target(read=texts(ProcessName.parse), errors=(ValueError,)),
}
TASKS = {
    "harbor task": Target(read=texts(lambda task: parse_settings(task, source="task")), errors=(TaskFolderError,)),
    "compose file": Target(read=texts(lambda services: parse_compose(services, source="c")), errors=(TaskFolderError,)),
    "dockerfile": Target(read=texts(plain_dockerfile)),
    "data set": Target(
        read=file("rows.jsonl", lambda place: read_questions(DatasetOptions(path=str(place)), place, "path")),
        errors=(ConfigError,),
    ),
    "user requests": Target(read=file("requests.jsonl", read_requests), errors=(ConfigError,)),
    "conversation": Target(read=conversations.parse, errors=(ValueError,)),
    "retired tasks": Target(read=folder("retired.json", read_retired), errors=(DamagedError,)),
    "openenv action": Target(read=texts(read_action)),
    "history records": Target(read=folder("records.jsonl", read_records), errors=(DamagedError,)),
    "history progress": Target(read=folder("histories.json", read_progress), errors=(DamagedError,)),
    "sessions": Target(read=file("sessions.jsonl", read_sessions), errors=(ConfigError,)),
    "survey": Target(read=Survey.decode, errors=(ValueError,)),
    "test report": Target(
        read=lambda report: read_test_report(base64.b64encode(zlib.compress(report, 1)).decode()),
        errors=(SandboxError,),
    ),
    "project": Target(
        read=texts(
            lambda settings: read_project({"pyproject.toml": settings, "a/__init__.py": "", "tests/test_a.py": ""})
        ),
        errors=(SourceError, NoTestsError),
    ),
    "verifier reward": Target(read=texts(lambda written: read_reward(written, None)), errors=(ValueError,)),
    "query answers": Target(read=texts(read_answers)),
    "suite results": Target(read=file("results.json", read_results), errors=(ConfigError,), saved=("results/*.json",)),
}
REPLIES = {
    "tool call": Target(read=texts(parse_call)),
    "calls of a reply": Target(read=texts(lambda reply: read_calls(reply, bare_shell=True))),
    "shell command": Target(read=texts(read_command)),
    "summary": Target(read=texts(read_summary)),
    "call arguments": Target(read=texts(read_object)),
    "shell acts": Target(read=texts(lambda command: list(shell_acts(command)))),
    "python acts": Target(read=texts(lambda code: list(code_acts(code)))),
    "comments": Target(read=texts(parse_source), saved=("recipes/arithmetic/make.py",)),
    **{f"calls of {grammar.name}": _grammar(grammar) for grammar in GRAMMARS},
}
MODELS = {
    "chat template": Target(read=texts(_template), errors=(DamagedError, ValueError)),
    "tokenizer": Target(
        read=folder("tokenizer.json", ChatTemplate.load),
        errors=(DamagedError,),
        saved=("run/model/tokenizer.json",),
        native=True,
    ),
    "chat format": Target(
        read=folder("tokenizer.json", _chat_format),
        errors=(DamagedError,),
        saved=("run/model/tokenizer.json",),
        native=True,
    ),
    "model config": Target(
        read=folder("config.json", load_spec), errors=(DamagedError, UserError), saved=("run/model/config.json",)
    ),
    "tensor file": Target(
        read=lambda data: parse_tensor_file(data, "file"), errors=(DamagedError,), saved=("run/model/*.safetensors",)
    ),
    "training checkpoint": Target(
        read=folder("step-00000001/manifest.json", lambda place: Checkpoints(place.parent).load(1)),
        errors=(DamagedError,),
    ),
    "tensor index": Target(read=folder("model.safetensors.index.json", read_index), errors=(DamagedError,)),
}
WEIGHTS = {
    "pack": Target(read=_frames, errors=(DamagedError,), saved=("run/store/packs/*",)),
    "layout": Target(read=Layout.from_bytes, errors=(DamagedError,), saved=("run/store/layouts/*",)),
    "weight version": Target(
        read=_record(WeightVersion, "commits/00000002.json"),
        errors=(DamagedError,),
        saved=("run/store/commits/*2.json",),
    ),
    "log start": Target(read=_record(LogStart, "log.json"), errors=(DamagedError,), saved=("run/store/log.json",)),
    "weight link": Target(read=_record(Link, "links/00000001-00000003.json"), errors=(DamagedError,)),
    "reader lease": Target(read=_record(ReaderLease, "leases/a/00000001.json"), errors=(DamagedError,)),
    "announcement": Target(read=_record(Announcement, "staged/00000001/a/000001.json"), errors=(DamagedError,)),
    "delta": Target(
        read=folder("weight_v000001/model-00000-of-00001.safetensors", _delta), errors=(DamagedError, UserError)
    ),
    "delta index": Target(
        read=folder("weight_v000001/model.safetensors.index.json", lambda place: read_delta_index(place.parent, 1)),
        errors=(DamagedError, UserError),
    ),
}
STATE = {
    "turns": Target(read=decode_turns, errors=(ValueError,)),
    "live records": Target(read=lambda data: decode_records([(data, None, 0)], "session"), errors=(DamagedError,)),
    "stored task": Target(read=decode_task, errors=(DamagedError,)),
    "stored rollout": Target(read=decode_rollout, errors=(DamagedError,)),
    "stored session": Target(read=decode_observed, errors=(DamagedError,)),
    "events": Target(
        read=folder("train.jsonl", lambda place: EventReader(place).new()),
        errors=(DamagedError,),
        saved=("run/events/serve.jsonl", "run/events/train.jsonl", "run/events/supervisor.jsonl"),
    ),
    "routing table": Target(read=RoutingTable.from_json, errors=(ValueError,)),
    "desired state": Target(read=Desired.parse, errors=(ValueError,)),
    "observed state": Target(read=Observed.parse, errors=(ValueError,)),
    "production metrics": Target(
        read=texts(lambda page: first_tokens(text_string_to_metric_families(page))), errors=(ValueError,)
    ),
}
SANDBOXES = {
    "archive": Target(read=read_archive, errors=(ValueError,)),
    "guest frames": Target(read=_guest, errors=(FrameError,)),
    **{f"sandbox {kind.__name__}": _wire(kind) for kind in (wire.CreateRequest, wire.ExecRequest, wire.ExecReply)},
    **{f"sandbox {kind.__name__}": _wire(kind) for kind in (wire.HostReply, wire.BurstRequest, wire.ErrorReply)},
}
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        **REQUESTS,
        **ENGINE_ANSWERS,
        **UPSTREAM,
        **SETTINGS,
        **TASKS,
        **REPLIES,
        **MODELS,
        **WEIGHTS,
        **STATE,
        **SANDBOXES,
    }
)
"""Name → the reader."""


@cache
def _saved_files() -> dict[str, bytes]:
    with tarfile.open(SAVED) as archive:
        members = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
        return {name: member.read() for name, member in members.items() if member is not None}


def seeds_of(name: str) -> list[bytes]:
    """The inputs of a target from which others are made."""
    corpus = [place.read_bytes() for place in sorted((HERE / "corpus" / name.replace(" ", "-")).glob("*"))]
    patterns = TARGETS[name].saved
    return corpus + [data for file, data in _saved_files().items() if any(fnmatch(file, each) for each in patterns)]
