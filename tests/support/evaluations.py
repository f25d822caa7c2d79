"""Held-out evaluations as the log has them."""

from etude.dashboard.statistics import mean_of
from etude.telemetry.events import EvalDone


def evaluation(label: str, version: int, sampled: int, greedy: int, *, tasks: int = 64, paid: float = 1.0) -> EvalDone:
    """An evaluation of tasks of 8 templates of which the first ``sampled`` and ``greedy`` are ``paid`` and pass."""
    clusters = [f"template-{task % 8}" for task in range(tasks)]
    passed = {way: [task < count for task in range(tasks)] for way, count in (("s", sampled), ("g", greedy))}
    rates = {way: mean_of(list(map(float, tried)), clusters) for way, tried in passed.items()}
    return EvalDone(
        label=label, version=version, tasks=tasks, sampled_pass=rates["s"].value, greedy_pass=rates["g"].value,
        sampled_stderr=rates["s"].stderr, greedy_stderr=rates["g"].stderr, clusters=clusters,
        sampled_rewards=[paid * each for each in passed["s"]], sampled_passed=[*passed["s"]],
        greedy_rewards=[paid * each for each in passed["g"]], greedy_passed=[*passed["g"]],
    )  # fmt: skip
