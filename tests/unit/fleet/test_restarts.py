"""Deaths, stalls and full disks: the reaction to each; no process restarts for ever or is given up early."""

from hypothesis import example, given
from hypothesis import strategies as st

from etude.errors import ExitCode
from etude.fleet.restarts import (
    DEATHS_WINDOW_S,
    LONGEST_LOOK_S,
    MAX_DEATHS,
    MAX_SILENCES,
    ROOM_PAUSES,
    SILENCES_WINDOW,
    START_S,
    Outcome,
    Restarts,
    Silence,
)

PAUSES = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40)


@given(PAUSES, st.sampled_from([None, -9, 1, 143]))
@example([DEATHS_WINDOW_S / MAX_DEATHS] * 20, None)
def test_a_process_is_given_up_exactly_when_it_died_too_often_within_the_window(
    pauses: list[float], status: int | None
) -> None:
    restarts, times_s = Restarts(), list[float]()
    for pause_s in pauses:
        times_s.append((times_s or [0.0])[-1] + pause_s)
        recent = [at_s for at_s in times_s if times_s[-1] - at_s < DEATHS_WINDOW_S]
        expected = Outcome.TOO_MANY_DEATHS if len(recent) > MAX_DEATHS else Outcome.RESTART
        assert restarts.ended(status, times_s[-1], ends=True) is expected


@given(st.integers(-64, 255), st.booleans())
def test_only_what_was_to_end_is_done_and_only_a_users_error_is_never_tried_again(status: int, ends: bool) -> None:
    outcome = Restarts().ended(status, 0.0, ends=ends)
    assert (outcome is Outcome.DONE) == (status == 0 and ends)
    assert (outcome is Outcome.USER_ERROR) == (status == ExitCode.USER_ERROR)
    assert (outcome is Outcome.AWAIT_ROOM) == (status == ExitCode.DISK_FULL)


def test_pauses_double_and_begin_anew_once_it_ran_for_as_long_as_the_longest() -> None:
    restarts = Restarts()
    assert [restarts.room_pause_s(59.0) for _ in range(7)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert restarts.room_pause_s(60.0) == 2.0


@given(st.lists(st.floats(0.0, 200.0), min_size=1, max_size=20))
def test_pauses_before_a_full_disk_is_tried_again_grow_and_are_bounded(lives_s: list[float]) -> None:
    restarts, before_s = Restarts(), 0.0
    for lived_s in lives_s:
        pause_s = restarts.room_pause_s(lived_s)
        assert ROOM_PAUSES.first_s <= pause_s <= ROOM_PAUSES.longest_s
        assert pause_s >= before_s or lived_s >= ROOM_PAUSES.longest_s
        before_s = pause_s
    assert Restarts().ended(ExitCode.DISK_FULL, 0.0, ends=True) is Outcome.AWAIT_ROOM


def test_a_full_disk_is_no_death() -> None:
    restarts = Restarts()
    for second in range(100):
        assert restarts.ended(ExitCode.DISK_FULL, float(second), ends=True) is Outcome.AWAIT_ROOM
    assert restarts.ended(-9, 100.0, ends=True) is Outcome.RESTART


@given(PAUSES, st.floats(1.0, 20.0))
@example([10.0 * SILENCES_WINDOW / MAX_SILENCES] * 20, 10.0)
def test_silences_recur_exactly_when_there_are_too_many_within_their_window(
    pauses: list[float], silent_s: float
) -> None:
    restarts, times_s = Restarts(), list[float]()
    for pause_s in pauses:
        times_s.append((times_s or [0.0])[-1] + pause_s)
        recent = [at_s for at_s in times_s if times_s[-1] - at_s < SILENCES_WINDOW * silent_s]
        assert restarts.record_silence(silent_s, times_s[-1]) == (len(recent) > MAX_SILENCES)
        assert restarts.silences == len(recent)


def test_the_first_heartbeat_may_take_long_and_later_ones_may_not() -> None:
    silence = Silence(0, 0.0)
    assert not silence.is_too_long(START_S, 900.0)
    assert silence.is_too_long(START_S + 1.0, 900.0)
    assert not silence.is_too_long(START_S + 1.0, 2 * START_S)
    silence.look(1, 1.0)
    assert not silence.is_too_long(900.0, 900.0)
    assert silence.is_too_long(901.0, 900.0)


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.booleans()), max_size=50))
def test_silence_is_never_more_than_the_time_that_was_watched(looks: list[tuple[float, bool]]) -> None:
    sign, now_s, watched_s = 7, 1_000.0, 0.0
    silence = Silence(sign, now_s)
    for passed_s, beats in looks:
        now_s += passed_s
        sign += beats
        watched_s = 0.0 if beats else watched_s + min(passed_s, LONGEST_LOOK_S)
        assert abs(silence.look(sign, now_s) - watched_s) < 1e-9
