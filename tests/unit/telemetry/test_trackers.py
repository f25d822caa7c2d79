"""A run's data for trackers; TensorBoard's is read back from its own files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event as TensorboardEvent

from etude.config.log import TensorboardOptions
from etude.telemetry.events import HeldoutLoss, ImitationProgress, Logged
from etude.telemetry.log import EventReader
from etude.telemetry.public import HIDDEN, public
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.sinks.tensorboard import open_tensorboard
from etude.telemetry.sinks.trackers import Cell, TrackerSink
from run_events import evaluation, rollout, small_run, step, write


@dataclass
class Recorded:
    points: list[tuple[str, int, Mapping[str, float]]] = field(default_factory=list)
    tables: dict[str, Sequence[Sequence[Cell]]] = field(default_factory=dict)
    texts: dict[tuple[str, int], str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    closed: bool = False

    def log(self, axis: str, step: int, at_s: float, values: Mapping[str, float]) -> None:
        self.points.append((axis, step, values))

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.tables[name] = rows

    def text(self, name: str, step: int, at_s: float, text: str) -> None:
        self.texts[name, step] = text

    def describe(self, facts: Mapping[str, str]) -> None:
        self.facts.update(facts)

    def artefact(self, file: Path) -> None:
        self.files.append(file)

    def close(self) -> None:
        self.closed = True


def logged_of(folder: Path, steps: int = 2) -> list[Logged]:
    write(folder / "events", list(small_run(steps)))
    return EventReader(folder / "events").new()


def context_of(folder: Path) -> SinkContext:
    return SinkContext(
        run="tiny",
        id="1f",
        folder=folder,
        config={"seed": 7, "engine": {"max_length": 64}},
        read_rollout=lambda rollout_id: f"<script>{rollout_id}",
        samples=1,
    )


def test_a_tracker_gets_curves_tables_lineage_texts_and_the_report(tmp_path: Path) -> None:
    tracker, context = Recorded(), context_of(tmp_path)
    sink = TrackerSink(tracker, context)
    for logged in logged_of(tmp_path):
        sink.emit(logged)
    context.report.write_text("<html>")
    sink.close()
    axes = [(axis, number) for axis, number, _ in tracker.points]
    assert axes == [
        ("midtrain/step", 20),
        ("midtrain/step", 20),
        ("heldout/step", 0),
        ("train/step", 1),
        ("train/step", 2),
    ]
    values = tracker.points[-1][2]
    assert values["train/reward_mean"] == 0.2
    assert values["reward/tests"] == 0.5
    assert values["ended/length"] == 0.25
    assert tracker.points[2][2]["heldout/sampled_pass"] == 0.5
    assert tracker.tables == {"heldout/tasks/before": [["sort", 1.0, True, 1.0, True], ["a|b", 0.0, False, None, None]]}
    assert tracker.facts["lineage/midtrain/digest"] == "d1"
    assert tracker.texts == {
        ("rollouts/before-sampled/1", 0): "<script>rollout100",
        ("rollouts/train/1", 1): "<script>rollout0",
    }
    assert (tracker.files, tracker.closed) == ([context.report], True)


def test_a_loss_that_was_not_measured_is_no_point(tmp_path: Path) -> None:
    """Regression: it was sent as 0, the best possible loss."""
    tracker = Recorded()
    sink = TrackerSink(tracker, context_of(tmp_path))
    progress = ImitationProgress(
        phase="midtrain", step=5, steps=9, tokens=10, loss=2.0, action_loss=None, tokens_per_s=1.0
    )
    for event in (progress, HeldoutLoss(phase="midtrain", step=5, tokens=10, loss=2.5, action_loss=None)):
        sink.emit(Logged(at_s=1.0, process="midtrain", event=event))
    assert [sorted(values) for _, _, values in tracker.points] == [
        ["midtrain/loss", "midtrain/tokens", "midtrain/tokens_per_s"],
        ["heldout/midtrain_loss"],
    ]


def test_a_step_that_is_done_again_is_sent_once_also_after_a_restart(tmp_path: Path) -> None:
    events, tracker = logged_of(tmp_path), Recorded()
    context = replace(context_of(tmp_path), past=lambda: events)
    sink = TrackerSink(tracker, context)
    for number in (2, 3, 3, 2, 4):  # 2 was sent before the restart; 3 is done again after a crash
        sink.emit(Logged(at_s=1.0, process="train", event=step(number)))
    assert [number for _, number, _ in tracker.points] == [3, 4]


def test_samples_are_the_newest_of_an_evaluation_and_of_every_tenth_step(tmp_path: Path) -> None:
    tracker = Recorded()
    sink = TrackerSink(tracker, replace(context_of(tmp_path), samples=2))
    for number in range(4):
        sink.emit(Logged(at_s=1.0, process="rollouts", event=rollout(number, "step-8-sampled")))
    sink.emit(Logged(at_s=2.0, process="rollouts", event=evaluation("step-8", 8)))
    assert list(tracker.texts.values()) == ["<script>rollout2", "<script>rollout3"]


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("environment", {"OPENAI_API_KEY": "sk-1"}, {"OPENAI_API_KEY": HIDDEN}),
        ("api_key", "sk-1", HIDDEN),
        ("webhook", "https://hooks.example/T0/secret", HIDDEN),
        ("url", "https://me:pw@host:5000/path?sig=1#x", "https://host:5000/path"),
        ("max_tokens", 64, 64),
        ("kind", "coding", "coding"),
        ("to", [{"options": {"token": "t"}}], [{"options": {"token": HIDDEN}}]),
    ],
)
def test_no_secret_is_shown(key: str, value: object, shown: object) -> None:
    assert public({"section": {key: value}}) == {"section": {key: shown}}  # type: ignore[dict-item]  # JSON of any form


def test_tensorboard_goes_on_in_the_same_folder_and_has_each_step_once(tmp_path: Path) -> None:
    events, context = logged_of(tmp_path, steps=3), context_of(tmp_path)
    context.report.write_text("<html>report")
    for start, end in ((0, len(events) // 2), (len(events) // 2, len(events))):
        sink = open_tensorboard(TensorboardOptions(), replace(context, past=events[:start].copy))
        for logged in events[start:end]:
            sink.emit(logged)
        sink.close()
    folder = tmp_path / "tensorboard"
    values = [value for file in sorted(folder.glob("events.*")) for value in scalars(file)]
    assert sorted(number for tag, number, _ in values if tag == "train/reward_mean") == [1, 2, 3]
    assert {tag: round(value, 3) for tag, number, value in values if number == 3}["train/reward_mean"] == 0.3
    texts = b"".join(file.read_bytes() for file in folder.glob("events.*"))
    assert texts.count(b'"max_length": 64') == 1  # the configuration
    assert b"a\\|b" in texts  # a row of a held-out table
    assert b"    <script>rollout0" in texts  # indented: Markdown takes it for what it is
    assert (folder / "report.html").read_text() == "<html>report"


def scalars(file: Path) -> list[tuple[str, int, float]]:
    """The scalars of an event file: records of an 8-byte length, 4 bytes of checksum, an event, 4 bytes more."""
    data, place, values = file.read_bytes(), 0, []
    while place < len(data):
        size = int.from_bytes(data[place : place + 8], "little")
        event = TensorboardEvent.FromString(data[place + 12 : place + 12 + size])
        values += [
            (each.tag, event.step, each.simple_value) for each in event.summary.value if not each.HasField("tensor")
        ]
        place += 12 + size + 4
    return values
