"""A task, and rollouts of it, for tests to which their content is all the same."""

from collections.abc import Sequence

import numpy as np

from etude.types import Case, Finish, FunctionChecks, Rollout, RolloutStatus, Split, Task, Turn, Verdict

CHECKS = FunctionChecks(path="a.py", function="f", visible=(), hidden=(Case(arguments=(), expected=0),))
TASK = Task(task_id="a", family="f", template="t", split=Split.TRAIN, prompt="", files={}, checks=CHECKS)


def make_turn(prompt: Sequence[int], completion: Sequence[int], versions: Sequence[int] | None = None) -> Turn:
    """A call and its reply, each token sampled with probability 1/e by weights of version 0, if not by others."""
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.full(len(completion), -1.0, np.float32),
        versions=np.array([0] * len(completion) if versions is None else versions, np.int32),
        finish=Finish.STOP,
    )


def make_rollout(
    name: str, *turns: Turn, group: int = 0, slot: int = 0, reward: float = 1.0, verdict: Verdict | None = None
) -> Rollout:
    """A graded rollout."""
    return Rollout(
        rollout_id=name,
        group_index=group,
        slot=slot,
        attempt=0,
        status=RolloutStatus.GRADED,
        reward=reward,
        turns=turns,
        verdict=verdict,
    )
