"""The events of a long run, written by the real writers: what the page's curves are measured and looked at with.

    python -m bench.ui.events FOLDER --steps 10000 --rollouts 100000

Owns a made-up training: a pass rate that rises and levels off, noise, a few cheats, failures of machines. It is the
same for the same seed. Nothing was trained.
"""

import argparse
import math
import random
import time
from contextlib import ExitStack
from pathlib import Path

import orjson

from etude.config.loading import default_recipe
from etude.dashboard.statistics import mean_of
from etude.run.folder import RunFolder
from etude.telemetry.events import (
    EngineStats,
    EvalDone,
    HeldoutLoss,
    ImitationProgress,
    MemoryUsed,
    PhaseEnded,
    PhaseStarted,
    RolloutClosed,
    RunStarted,
    StepDone,
    WeightsPublished,
    WeightsSwapped,
)
from etude.telemetry.log import EventLog
from etude.types import RolloutStatus

TEMPLATES = ("off_by_one", "wrong_operator", "missing_return", "swapped_arguments", "shadowed_name", "stale_cache",
             "lost_update", "bad_default")  # fmt: skip
HELDOUT = 256
"""Held-out tasks, in templates of equal size."""
GROUPS, SIZE = 16, 8
IMITATION = (("midtrain", 400, 2.9, 1.1), ("sft", 120, 1.2, 0.6))
"""Phase, steps, loss at its begin, loss at its end."""


def main() -> None:
    """Write the events of a run into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evals", type=int, default=40, help="held-out evaluations on the way")
    options = parser.parse_args()
    folder = RunFolder(options.folder)
    if not folder.config_file.exists():
        RunFolder.create(options.folder, default_recipe([f"trainer.steps={options.steps}", f"seed={options.seed}"]))
    write_events(folder, options.steps, options.rollouts, seed=options.seed, evals=options.evals)


def write_events(folder: RunFolder, steps: int, rollouts: int, *, seed: int = 0, evals: int = 40) -> None:
    """Write a whole run of ``steps`` and ``rollouts``."""
    with ExitStack() as stack:
        names = ("supervisor", "train", "rollouts", "serve")
        logs = {name: stack.enter_context(EventLog(folder.events, name)) for name in names}
        run = SyntheticRun(steps, random.Random(seed), logs)
        run.begin()
        for step in range(1, steps + 1):
            run.step(step, rollouts * step // steps - rollouts * (step - 1) // steps)
            if step % max(1, steps // evals) == 0 and step < steps:
                run.evaluate(f"step-{step}", step)
        run.end()


def stretch_time(folder: RunFolder, hours: float) -> None:
    """Write the times of all events anew, so that the run took so long and has just ended."""
    lines = {file: [orjson.loads(line) for line in file.read_bytes().splitlines()] for file in folder.events.glob("*")}
    times = [line["at_s"] for of_file in lines.values() for line in of_file]
    first_s, pace, end_s = min(times), hours * 3600 / (max(times) - min(times)), time.time()
    for file, of_file in lines.items():
        for line in of_file:
            line["at_s"] = end_s - hours * 3600 + pace * (line["at_s"] - first_s)
        file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in of_file))


class SyntheticRun:
    """Writes the events of one run, step by step."""

    def __init__(self, steps: int, chance: random.Random, logs: dict[str, EventLog]) -> None:
        self._steps, self._chance, self._logs = steps, chance, logs
        self._pace, self._top = chance.uniform(0.8, 1.25), chance.uniform(0.72, 0.84)
        self._skills = {name: chance.uniform(0.75, 1.2) for name in TEMPLATES}

    def begin(self) -> None:
        """All events before the first step of RL."""
        logs, chance = self._logs, self._chance
        logs["supervisor"].write(RunStarted(resumed=False))
        for phase, steps, first, last in IMITATION:
            logs["supervisor"].write(PhaseStarted(phase=phase))
            for step in range(0, steps + 1, 10):
                loss = last + (first - last) * math.exp(-5 * step / steps)
                if step:
                    logs["train"].write(ImitationProgress(phase=phase, step=step, steps=steps, tokens=step * 2000,
                        loss=loss + chance.gauss(0, 0.03), action_loss=0.6 * loss + chance.gauss(0, 0.02),
                        tokens_per_s=chance.gauss(9000, 400)))  # fmt: skip
                if step % 50 == 0:
                    logs["train"].write(HeldoutLoss(phase=phase, step=step, tokens=step * 2000, loss=loss + 0.02,
                                                    action_loss=0.6 * loss + 0.01))  # fmt: skip
            logs["train"].write(PhaseEnded(phase=phase, steps=steps, tokens=steps * 2000, loss=last,
                                           digest=f"{chance.getrandbits(128):032x}", parent=""))  # fmt: skip
        logs["supervisor"].write(PhaseStarted(phase="eval-before"))
        self.evaluate("before", 0)
        logs["supervisor"].write(PhaseStarted(phase="rl"))

    def step(self, step: int, rollouts: int) -> None:
        """One optimiser step, and the rollouts that closed meanwhile."""
        chance, logs, skill = self._chance, self._logs, self._skill(step)
        reward = min(1.0, max(0.0, skill + chance.gauss(0, 0.04)))
        silent = min(GROUPS, round(GROUPS * (0.1 + 0.5 * abs(reward - 0.5))))
        ages = [chance.randrange(9000, 11000), chance.randrange(3000, 5000), chance.randrange(0, 900)]
        tokens = sum(ages)
        cut = max(0, round(128 * 0.2 * math.exp(-4 * step / self._steps) + chance.gauss(0, 1)))
        metrics = {
            "busy_s": chance.gauss(4, 0.3), "wait_s": chance.expovariate(0.6), "reward_mean": reward,
            "reward_low": 0.0, "reward_high": 1.0, "reward_std": 0.45 * math.sqrt(reward * (1 - reward)),
            "groups": GROUPS, "groups_without_signal": silent, "groups_resampled": chance.randrange(4),
            "epoch": step // 500, "cut_short": cut / 128, "signal_share": 1 - silent / GROUPS,
            "grad_norm": math.exp(chance.gauss(-1.5, 0.3)), "learning_rate": 4e-4, "loss_tokens": tokens,
            "trained_tokens": 3 * tokens,
            "truncated_share": abs(chance.gauss(0, 0.002)), "masked_share": abs(chance.gauss(0, 0.001)),
            "staleness_sum": ages[1] + 2 * ages[2], "staleness_tokens": tokens,
            "staleness_max": 2 if ages[2] else 1, "staleness_mean": (ages[1] + 2 * ages[2]) / tokens,
            "entropy": 0.28 + 0.6 * math.exp(-3 * step / self._steps) + chance.gauss(0, 0.01),
            "mismatch_tokens": 512, "k1": chance.gauss(0, 1e-6), "k3": math.exp(chance.gauss(-14, 0.6)),
            "mismatch_p99": 1e-4, "mismatch_max": 1e-3, "mismatch_equal": 500, "mismatch_pairs": 0, "mismatch_flips": 0,
        }  # fmt: skip
        parts = {"tests": reward, "brevity": -0.05 + 0.03 * step / self._steps}
        ended = {"submit": 128 - cut - 2, "length": cut, "turns": 2}
        logs["train"].write(StepDone(step=step, metrics=metrics, reward_parts=parts, ended=ended, token_ages=ages))
        logs["train"].write(WeightsPublished(version=step, kind="delta", size_bytes=chance.randrange(20_000, 90_000),
                            state_bytes=4_000_000, seconds=0.2, blocked_s=0.01, digest=f"{step:032x}"))  # fmt: skip
        logs["serve"].write(
            WeightsSwapped(version=step, stage_ms=chance.gauss(30, 4), pause_ms=chance.gauss(0.3, 0.05))
        )
        logs["serve"].write(EngineStats(busy_s=chance.uniform(3, 5), window_s=5, generated_tokens=tokens,
                            prefill_tokens=tokens, reused_tokens=2 * tokens, running=100, waiting=4))  # fmt: skip
        logs["supervisor"].write(MemoryUsed(size_bytes=chance.randrange(1_500_000_000, 1_800_000_000)))
        for _ in range(rollouts):
            logs["rollouts"].write(self._closed(step, skill))

    def evaluate(self, label: str, version: int) -> None:
        """A held-out evaluation at a version."""
        clusters = [TEMPLATES[index % len(TEMPLATES)] for index in range(HELDOUT)]
        skills = [min(0.98, self._skill(version) * self._skills[name]) for name in clusters]
        sampled = [self._chance.random() < skill for skill in skills]
        greedy = [self._chance.random() < min(0.99, 1.1 * skill) for skill in skills]
        rates = [mean_of([float(each) for each in passed], clusters) for passed in (sampled, greedy)]
        self._logs["rollouts"].write(
            EvalDone(
                label=label,
                version=version,
                tasks=HELDOUT,
                sampled_pass=rates[0].value,
                sampled_stderr=rates[0].stderr,
                greedy_pass=rates[1].value,
                greedy_stderr=rates[1].stderr,
                clusters=clusters,
                sampled_rewards=[float(each) for each in sampled],
                sampled_passed=[*sampled],
                greedy_rewards=[float(each) for each in greedy],
                greedy_passed=[*greedy],
            )
        )

    def end(self) -> None:
        """All events after the last step."""
        self._logs["supervisor"].write(PhaseStarted(phase="eval-after"))
        self.evaluate("after", self._steps)
        self._logs["supervisor"].write(PhaseStarted(phase="done"))

    def _skill(self, step: int) -> float:
        """The chance to solve a task of middling difficulty."""
        way = step / self._steps * self._pace
        return 0.03 + self._top / (1 + math.exp(-9 * (way - 0.35))) - 0.03 * math.exp(-8 * way)

    def _closed(self, step: int, skill: float) -> RolloutClosed:
        chance = self._chance
        template = chance.choice(TEMPLATES)
        if chance.random() < 0.01:
            status, reason, reward = RolloutStatus.FAILED_INFRA, "sandbox: the machine went away", None
        else:
            status, reason = RolloutStatus.GRADED, chance.choice(("submit", "submit", "submit", "length"))
            reward = float(chance.random() < skill * self._skills[template])
        cheats = reward is not None and chance.random() < 0.01
        return RolloutClosed(
            rollout_id=f"{chance.getrandbits(128):032x}",
            purpose="train",
            group_index=step * GROUPS,
            status=status,
            reason=reason,
            reward=reward,
            turns=max(1, round(chance.gauss(9 - 3 * step / self._steps, 2))),
            sampled_tokens=max(8, round(chance.gauss(320 - 90 * step / self._steps, 80))),
            seconds=max(0.5, chance.gauss(14, 5)),
            template=template,
            version=step - 1,
            flags=["edits_tests"] if cheats else [],
            hacked=cheats,
            disposition="zero" if cheats else "keep",
            cheat_reason="edits_tests" if cheats else "",
            passed=bool(reward),
        )


if __name__ == "__main__":
    main()
