"""A part of the reward: how many different letters an answer has. ``source = "@reward.py:variety"``."""

from etude.protocols import RewardInput


def variety(rollout: RewardInput) -> float:
    answer = rollout.result.answer
    return len(set(answer)) / len(answer) if answer else 0.0
