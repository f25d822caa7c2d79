"""The audit: finds nothing where there is no difference, and names a difference where there is one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from etude.errors import ConfigError
from etude.harnesses.actions import Action
from etude.regression import fit_logistic
from etude.taskgen.fidelity.audit import audit, render, to_json
from etude.taskgen.fidelity.classifier import area, assign_folds, held_out_scores
from etude.taskgen.fidelity.features import bucket, features_of
from etude.taskgen.fidelity.sessions import ToolObservation, observations_of, read_sessions, write_sessions

WORDS = ("parser", "matrix", "window", "colour", "budget", "ledger", "planet", "window", "socket", "branch")
LINES = (
    "/usr/lib/python3/dist-packages/{word}.py:{n}: in {word}",
    "PATH=/usr/bin:/bin",
    "uid=1000(agent) gid=1000(agent)",
    "{word}Error: no {word} in {other}",
    "Python 3.11.{n}",
    "listening on 127.0.0.1:80{n}",
    "-rw-r--r-- 1 agent agent {n} Nov 22 00:10 {word}.py",
)


def session(name: str, rng: Random) -> list[ToolObservation]:
    """Calls that are alike within a session: each has its own words and its own pace."""
    words, pace = rng.sample(WORDS, 3), rng.uniform(0.01, 1.0)
    return [
        ToolObservation(
            session=name,
            tool="bash",
            arguments={"command": "ls"},
            observation="\n".join(
                rng.choice(LINES).format(word=rng.choice(words), other=rng.choice(words), n=rng.randint(1, 40))
                for _ in range(rng.randint(1, 6))
            ),
            exit_code=rng.choice((0, 0, 0, 1)),
            seconds=pace * rng.uniform(0.5, 2),
        )
        for _ in range(rng.randint(2, 9))
    ]


def side(seed: int, sessions: int = 30) -> list[ToolObservation]:
    return [one for index in range(sessions) for one in session(f"s{index}", Random(f"{seed}|{index}"))]


def with_line(observations: list[ToolObservation], line: str, every: int = 3) -> list[ToolObservation]:
    return [
        replace(one, observation=f"{one.observation}\n{line}") if index % every == 0 else one
        for index, one in enumerate(observations)
    ]


def slower(observations: list[ToolObservation]) -> list[ToolObservation]:
    return [replace(one, seconds=(one.seconds or 0) * 40) for one in observations]


def with_crlf(observations: list[ToolObservation]) -> list[ToolObservation]:
    return [replace(one, observation=one.observation.replace("\n", "\r\n")) for one in observations]


def test_equal_sandboxes_cannot_be_told_apart() -> None:
    reports = [audit(side(2 * seed), side(2 * seed + 1)) for seed in range(8)]
    covered = [report.auc.low <= 0.5 <= report.auc.high for report in reports]
    assert sum(covered) >= 7
    assert 0.44 < np.mean([report.auc.value for report in reports]) < 0.56


@pytest.mark.parametrize(
    ("plant", "feature"),
    [
        (lambda rows: with_line(rows, "Starting gVisor..."), "word:starting"),
        (lambda rows: with_line(rows, "/opt/sim/bin/tool: not found"), "path:/opt/sim"),
        (lambda rows: with_line(rows, "SIMULATED=1"), "env:SIMULATED"),
        (lambda rows: with_line(rows, "Linux box7 4.4.0 #1 SMP"), "kernel:4.4"),
        (lambda rows: with_line(rows, "root@sim-box:/work# "), "host:sim-box"),
        (lambda rows: with_line(rows, "ls: Operation not permitted"), "error:Operation not permitted"),
        (with_crlf, "ending:CRLF"),
        (slower, "latency:2^3 s"),
    ],
)
def test_a_planted_tell_is_found_and_named_first(
    plant: Callable[[list[ToolObservation]], list[ToolObservation]], feature: str
) -> None:
    report = audit(side(1), plant(side(2)))
    assert report.is_distinguishable
    first = [tell.feature for tell in report.tells[:3]]
    assert feature in first or (feature.startswith("latency") and any(name.startswith("latency") for name in first))
    tell = report.tells[0]
    assert tell.weight < 0
    assert tell.simulated_share > tell.production_share
    assert tell.feature in render(report)


def test_an_example_shows_the_tell() -> None:
    report = audit(with_line(side(1), "uid=0(root) gid=0(root)"), side(2))
    tell = next(tell for tell in report.tells if tell.feature == "user:uid=0(root)")
    assert (tell.production_example, tell.simulated_example) == ("uid=0(root) gid=0(root)", "")


def test_what_tells_sessions_apart_does_not_tell_sides_apart() -> None:
    """Rows of a session share a mark. Whoever scores rows by models that saw their session is fooled; we are not."""
    rng = np.random.default_rng(3)
    labels_S = np.repeat([1, 0], 20)
    sessions_N = np.repeat(np.arange(40), 8)
    matrix_ND = np.eye(40)[sessions_N] + (rng.random((320, 40)) < 0.02)
    labels_N = labels_S[sessions_N]
    by_session_S = assign_folds(labels_S, 5, rng)
    scores_N, _ = held_out_scores(matrix_ND, labels_N, sessions_N, by_session_S)
    grouped = area([(scores_N, by_session_S)], labels_N, sessions_N, rng)
    rows_N = np.arange(320)
    by_row_N = assign_folds(labels_N, 5, rng)
    leaked_N, _ = held_out_scores(matrix_ND, labels_N, rows_N, by_row_N)
    leaked = area([(leaked_N, by_row_N)], labels_N, rows_N, rng)
    assert grouped.low <= 0.5 <= grouped.high
    assert leaked.value > 0.8


def test_the_interval_is_wider_when_rows_are_alike() -> None:
    rng = np.random.default_rng(0)
    sessions_N, labels_S = np.repeat(np.arange(20), 50), np.repeat([0, 1], 10)
    scores_N = rng.normal(size=20)[sessions_N] + 0.1 * rng.normal(size=1000)
    folds_S = np.zeros(20, np.int64)
    clustered = area([(scores_N, folds_S)], labels_S[sessions_N], sessions_N, rng)
    assert clustered.high - clustered.low > 0.3


def test_logistic_regression_finds_what_made_the_labels() -> None:
    rng = np.random.default_rng(1)
    matrix_ND = rng.normal(size=(2000, 3))
    labels_N = (rng.random(2000) < 1 / (1 + np.exp(-(2 * matrix_ND[:, 0] - matrix_ND[:, 1] + 0.5)))).astype(np.int64)
    coefficients_D, intercept = fit_logistic(matrix_ND, labels_N, np.ones(2000), ridge=0.0)
    assert coefficients_D == pytest.approx([2, -1, 0], abs=0.25)
    assert intercept == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_too_little_is_refused_with_the_number(count: int) -> None:
    with pytest.raises(ConfigError, match=f"simulated side has {count} sessions"):
        audit(side(1, 10), side(2, count))


def test_sessions_without_any_shared_feature_are_not_told_apart() -> None:
    rows = [ToolObservation(session=f"s{index}", observation="same\n") for index in range(12)]
    report = audit(rows, rows)
    assert (report.auc.value, report.tells) == (0.5, ())


def test_the_same_sessions_give_the_same_report() -> None:
    assert to_json(audit(side(1, 12), side(2, 12))) == to_json(audit(side(1, 12), side(2, 12)))


def test_a_file_of_sessions_comes_back(tmp_path: Path) -> None:
    rows = [
        ToolObservation(
            session="a", observation="é\r\n", tool="bash", arguments={"command": "x"}, exit_code=1, seconds=0.5
        ),
        ToolObservation(session="a", observation=""),
    ]
    write_sessions(tmp_path / "s.jsonl", rows)
    assert read_sessions(tmp_path / "s.jsonl") == rows


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting"),
        ("[]", r"\[\] is no JSON object"),
        ('{"session": "a"}', "observation is missing"),
        ('{"session": "a", "observation": "", "latency": 3}', "unknown latency"),
        ('{"session": "a", "observation": "", "seconds": "3"}', "not a number"),
        ('{"session": "a", "observation": 3}', "not a text"),
        ('{"session": "a", "observation": "", "arguments": "ls"}', "not an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f'{{"session": "a", "observation": ""}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"s\.jsonl:2: .*{complaint}"):
        read_sessions(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jsonl"):
        read_sessions(tmp_path / "gone.jsonl")


def test_our_rollouts_are_sessions_too() -> None:
    actions = [Action(tool="read", arguments={"path": "a"}, output="1 x", turn=0), Action(tool="submit", turn=1)]
    assert observations_of("r1", actions) == [
        ToolObservation(session="r1", tool="read", arguments={"path": "a"}, observation="1 x")
    ]


def test_what_an_observation_shows() -> None:
    shown = features_of(
        ToolObservation(
            session="a",
            observation="HOME=/home/agent\nTue 10:11:12 UTC\nen_US.UTF-8 numpy 1.26.4\n10.0.3.7 localhost:5432\t\x1b[",
            exit_code=2,
            seconds=0.3,
        )
    )
    assert {
        "env:HOME", "path:/home", "zone:UTC", "locale:en_US.UTF-8", "version:numpy 1.26.4", "address:10.0.*",
        "port:5432", "form:tabs", "form:escape codes", "exit:2", "latency:2^-2 s", "ending:none",
    } <= shown  # fmt: skip


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(value) for value in (0, 0.3, 1, 7, 8)] == ["0", "2^-2", "2^0", "2^2", "2^3"]
