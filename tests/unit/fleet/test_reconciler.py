"""A supervisor's decisions, with a launcher in memory: after any deaths, all desired processes run in the end."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.errors import EtudeError, ExitCode, InfrastructureError
from etude.fleet.reconciler import LOST_S, PENDING_S, REGISTERED_S, Actions, Reconciler
from etude.fleet.restarts import DEATHS_WINDOW_S, MAX_DEATHS
from etude.fleet.specs import GroupMember, ProcessSpec, ProcessStatus, Resources

TRAINERS = ("train", "train-1")
NAMES = ("serve", "serve-1", "gateway", *TRAINERS)


def spec(name: str) -> ProcessSpec:
    group = None
    if name in TRAINERS:
        group = GroupMember(name="train", rank=TRAINERS.index(name), size=len(TRAINERS), port=29_400)
    return ProcessSpec(name=name, command=("etude", name), region="home", group=group, ends=group is not None)


class Machines:
    """A launcher in memory that executes every action."""

    def __init__(self) -> None:
        self.statuses: dict[str, ProcessStatus] = {}
        self.starts = 0

    def apply(self, actions: Actions) -> None:
        for name in (*actions.kill, *actions.remove):
            self.statuses.pop(name, None)
        for each in actions.place:
            assert each.name not in self.statuses or not self.statuses[each.name].is_running, "it would run twice"
            self.starts += 1
            self.statuses[each.name] = ProcessStatus(incarnation=str(self.starts), pid=self.starts)

    def change(self, name: str, **fields: object) -> None:
        self.statuses[name] = replace(self.statuses[name], **fields)  # type: ignore[arg-type]  # fields of a status

    @property
    def running(self) -> set[str]:
        return {name for name, status in self.statuses.items() if status.is_running}


def begin(*names: str, now_s: float = 0.0) -> tuple[Reconciler, Machines]:
    reconciler, machines = Reconciler([spec(name) for name in names], heartbeat_timeout_s=900.0), Machines()
    machines.apply(reconciler.step(machines.statuses, now_s))
    return reconciler, machines


def test_what_runs_is_taken_over_and_what_is_missing_is_placed() -> None:
    _, machines = begin("serve", "gateway")
    successor = Reconciler([spec("serve"), spec("gateway"), spec("serve-1")], heartbeat_timeout_s=900.0)
    actions = successor.step(machines.statuses, 1_000.0)
    assert [each.name for each in actions.place] == ["serve-1"]
    assert not actions.kill + actions.remove + actions.notices


def test_a_group_of_which_a_part_runs_is_taken_over_and_restarts_if_the_rest_does_not_show() -> None:
    _, machines = begin("train")
    successor = Reconciler([spec(name) for name in TRAINERS], heartbeat_timeout_s=900.0)
    assert successor.step(machines.statuses, 1_000.0) == Actions()
    actions = successor.step(machines.statuses, 1_000.0 + REGISTERED_S)
    assert (actions.kill, [each.name for each in actions.place]) == (["train"], ["train", "train-1"])


def test_what_is_not_planned_is_removed() -> None:
    _, machines = begin("serve", "gateway")
    assert Reconciler([spec("serve")], heartbeat_timeout_s=900.0).step(machines.statuses, 0.0).remove == ["gateway"]


def test_a_group_restarts_whole_and_others_stay() -> None:
    reconciler, machines = begin(*NAMES)
    machines.change("train-1", exit_status=-9)
    actions = reconciler.step(machines.statuses, 10.0)
    assert sorted(actions.kill) == ["train", "train-1"]
    assert [each.name for each in actions.place] == ["train", "train-1"]
    assert actions.notices == [
        "train-1 ended with status -9 and is restarted, and so are train: no output"
    ]  # fmt: skip


def test_a_group_whose_members_all_ended_early_is_placed_anew() -> None:
    reconciler, machines = begin(*TRAINERS)
    for name in TRAINERS:
        machines.change(name, exit_status=-9)
    actions = reconciler.step(machines.statuses, 10.0)
    assert (actions.kill, [each.name for each in actions.place]) == ([*TRAINERS], [*TRAINERS])


def test_a_single_process_that_ended_is_started_where_it_was() -> None:
    reconciler, machines = begin("serve", "gateway")
    machines.change("serve", exit_status=-9)
    actions = reconciler.step(machines.statuses, 10.0)
    assert not actions.kill, "its machine is there, and keeps its place"
    assert [each.name for each in actions.place] == ["serve"]


def test_a_group_is_done_when_all_of_it_is() -> None:
    reconciler, machines = begin(*NAMES)
    machines.change("train", exit_status=0)
    assert not reconciler.step(machines.statuses, 1.0).place
    assert reconciler.done == {"train"}
    machines.change("train-1", exit_status=0)
    reconciler.step(machines.statuses, 2.0)
    assert reconciler.done == {"train", "train-1"}


def test_members_of_a_group_may_end_at_once_and_all_are_to_do_again_if_one_dies() -> None:
    reconciler, machines = begin(*TRAINERS)
    machines.change("train", exit_status=0)
    reconciler.step(machines.statuses, 1.0)
    machines.change("train-1", exit_status=-9)
    machines.apply(reconciler.step(machines.statuses, 2.0))
    assert reconciler.done == frozenset()
    for name in TRAINERS:
        machines.change(name, exit_status=0)
    assert reconciler.step(machines.statuses, 3.0) == Actions()
    assert reconciler.done == {*TRAINERS}


def test_a_lost_machine_gets_its_time_to_come_back() -> None:
    reconciler, machines = begin("serve")
    machines.change("serve", is_lost=True)
    assert not reconciler.step(machines.statuses, 1.0).place
    assert not reconciler.step(machines.statuses, 1.0 + LOST_S).place
    machines.change("serve", is_lost=False)
    assert not reconciler.step(machines.statuses, 2.0 + LOST_S).place, "it came back"
    machines.change("serve", is_lost=True)
    assert not reconciler.step(machines.statuses, 3.0 + LOST_S).place
    actions = reconciler.step(machines.statuses, 3.1 + 2 * LOST_S)
    assert [each.name for each in actions.place] == ["serve"]
    assert actions.notices == ["serve is gone with its machine and is restarted: no output"]
    machines.apply(actions)
    machines.change("serve", is_lost=True)
    assert not reconciler.step(machines.statuses, 4.0 + 2 * LOST_S).place, "so does the next machine"


def test_what_vanishes_is_placed_again_once_the_launcher_had_time_to_show_it() -> None:
    reconciler, _ = begin("serve", now_s=1_000.0)
    assert not reconciler.step({}, 1_000.0 + 0.9 * REGISTERED_S).place
    assert reconciler.step({}, 1_000.0 + REGISTERED_S).place


def test_a_process_that_finds_a_full_disk_starts_again_after_pauses_that_grow() -> None:
    reconciler, machines = begin("serve", now_s=1_000.0)
    now_s = 1_001.0
    for lived_s, pause_s in ((1.0, 2.0), (1.0, 4.0), (1.0, 8.0), (500.0, 2.0)):
        now_s += lived_s
        machines.change("serve", exit_status=int(ExitCode.DISK_FULL))
        assert reconciler.step(machines.statuses, now_s) == Actions(room_pauses={"serve": pause_s})
        assert reconciler.step(machines.statuses, now_s + pause_s - 0.1) == Actions()
        now_s += pause_s
        actions = reconciler.step(machines.statuses, now_s)
        assert actions == Actions(place=[spec("serve")])
        machines.apply(actions)


def test_that_no_machine_has_room_is_said_once() -> None:
    reconciler, machines = begin("serve")
    machines.change("serve", is_pending=True)
    times_s = (1.0, 1.0 + PENDING_S, 2.0 + PENDING_S, 99.0)
    notices = [reconciler.step(machines.statuses, now_s).notices for now_s in times_s]
    assert notices[0] == notices[1] == notices[3] == []
    assert notices[2] == [
        "serve waits: no machine of region 'home' has 1 CPUs and 0 GPUs free; add one, or ask for less in "
        "[resources.serve] of the fleet"
    ]
    machines.change("serve", is_pending=False)
    reconciler.step(machines.statuses, 100.0)
    machines.change("serve", is_pending=True)
    assert not reconciler.step(machines.statuses, 101.0).notices
    assert reconciler.step(machines.statuses, 102.0 + PENDING_S).notices == notices[2], "of a new wait, too"


def test_a_silent_process_is_killed_and_started_again() -> None:
    reconciler, machines = begin("serve")
    for second in range(1, 10_000):
        machines.change("serve", beat=min(second, 10))
        actions = reconciler.step(machines.statuses, float(second))
        if actions.kill:
            assert second == 10 + 901
            assert actions.notices == ["serve gave no sign of life for 901 s and was killed"]
            assert [each.name for each in actions.place] == ["serve"]
            return
    raise AssertionError("it was never killed")


def test_each_start_may_take_longer_than_a_heartbeat() -> None:
    reconciler, now_s = Reconciler([spec("serve")], heartbeat_timeout_s=10.0), 1_000.0
    for incarnation in ("first", "second"):
        for beat in [0] * 100 + [1]:
            now_s += 1.0
            status = ProcessStatus(incarnation=incarnation, beat=beat)
            assert reconciler.step({"serve": status}, now_s) == Actions()


def killed_for_silence(lively_s: int) -> int:
    """How often a process is killed in 1 000 s that has a heartbeat each second, for ``lively_s`` after each start."""
    reconciler, machines = Reconciler([spec("serve")], heartbeat_timeout_s=10.0), Machines()
    started = kills = 0
    for second in range(1_000):
        actions = reconciler.step(machines.statuses, float(second))
        machines.apply(actions)
        kills += len(actions.kill)
        started = second if actions.place else started
        machines.change("serve", beat=min(second - started, lively_s), log="serve.log")
    return kills


def test_silence_soon_after_each_start_ends_the_run_and_rare_silence_does_not() -> None:
    with pytest.raises(InfrastructureError, match=r"was killed, for the 4th time; see serve\.log"):
        killed_for_silence(lively_s=5)
    assert killed_for_silence(lively_s=60) > 10


def test_a_users_error_and_too_many_deaths_end_the_run() -> None:
    reconciler, machines = begin("serve")
    machines.change("serve", exit_status=int(ExitCode.USER_ERROR), last_line="set engine.port")
    with pytest.raises(EtudeError, match=r"serve gave up: set engine\.port"):
        reconciler.step(machines.statuses, 1.0)
    reconciler, machines = begin("serve")
    fault = r"serve died 6 times in 120 s, last with status 1: boom; see serve\.log"
    with pytest.raises(InfrastructureError, match=fault):
        for second in range(10):
            machines.change("serve", exit_status=1, last_line="boom", log="serve.log")
            machines.apply(reconciler.step(machines.statuses, float(second)))


def test_a_drained_process_ends_and_comes_back_when_it_may() -> None:
    reconciler, machines = begin("serve", "serve-1")
    assert reconciler.step(machines.statuses, 1.0, drained={"serve-1"}).remove == ["serve-1"]
    del machines.statuses["serve-1"]
    assert not reconciler.step(machines.statuses, 100.0, drained={"serve-1"}).place
    assert [each.name for each in reconciler.step(machines.statuses, 200.0).place] == ["serve-1"]


def test_a_drained_process_that_may_run_again_before_it_has_ended_is_left_alone() -> None:
    reconciler, machines = begin("serve", "serve-1")
    assert reconciler.step(machines.statuses, 1.0, drained={"serve", "serve-1"}).remove == ["serve", "serve-1"]
    assert reconciler.step(machines.statuses, 2.0) == Actions()


def test_a_changed_fleet_is_followed_and_only_what_differs_is_touched() -> None:
    reconciler, machines = begin("serve", "serve-1", *TRAINERS)
    more = replace(spec("serve-1"), resources=Resources(gpus=1))
    trainers = [spec(name) for name in TRAINERS]
    reconciler.follow([spec("serve"), more, spec("serve-2"), *trainers])
    actions = reconciler.step(machines.statuses, 1.0)
    assert (actions.kill, [each.name for each in actions.place]) == (["serve-1"], ["serve-1", "serve-2"])
    machines.apply(actions)
    reconciler.follow([more, *trainers])
    actions = reconciler.step(machines.statuses, 2.0)
    assert (actions.kill, sorted(actions.remove), actions.place) == ([], ["serve", "serve-2"], [])
    machines.apply(actions)
    reconciler.follow([spec("serve-1"), *(replace(each, port=1) for each in trainers)])
    assert reconciler.step(machines.statuses, 3.0).kill == ["serve-1", *TRAINERS]


class Supervision(RuleBasedStateMachine):
    """Processes die, machines vanish, supervisors are replaced, people drain and change the fleet; rarely enough to be
    borne.
    """

    def __init__(self) -> None:
        super().__init__()
        self.machines, self.now_s = Machines(), 0.0
        self.drained: set[str] = set()
        self.specs = {name: spec(name) for name in NAMES}
        self.successor()

    @rule()
    def successor(self) -> None:
        self.reconciler = Reconciler(list(self.specs.values()), heartbeat_timeout_s=1e9)

    @rule(name=st.sampled_from(NAMES[:3]), gpus=st.integers(0, 2))
    def change_the_fleet(self, name: str, gpus: int) -> None:
        if gpus:
            self.specs[name] = replace(spec(name), resources=Resources(gpus=gpus))
        else:
            self.specs.pop(name, None)
        self.reconciler.follow(list(self.specs.values()))

    @rule(name=st.sampled_from(NAMES), status=st.sampled_from([-9, 1, int(ExitCode.DISK_FULL)]))
    def die(self, name: str, status: int) -> None:
        self.now_s += DEATHS_WINDOW_S / MAX_DEATHS
        if name in self.machines.running:
            self.machines.change(name, exit_status=status)

    @rule(name=st.sampled_from(NAMES))
    def vanish(self, name: str) -> None:
        self.now_s += DEATHS_WINDOW_S / MAX_DEATHS
        self.machines.statuses.pop(name, None)

    @rule(name=st.sampled_from(NAMES[:3]))
    def drain_or_not(self, name: str) -> None:
        self.drained ^= {name}

    @rule(seconds=st.floats(0.01, 5.0))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        self.machines.apply(self.reconciler.step(self.machines.statuses, self.now_s, drained=self.drained))

    @invariant()
    def all_that_is_to_run_runs_in_the_end(self) -> None:
        statuses: Mapping[str, ProcessStatus] = dict(self.machines.statuses)
        for _ in range(20):
            self.step(max(LOST_S, REGISTERED_S) + 1.0)
        assert self.machines.running == self.specs.keys() - self.drained, statuses


TestSupervision = Supervision.TestCase
TestSupervision.settings = settings(max_examples=30, stateful_step_count=20)
