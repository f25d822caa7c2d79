"""How good a rollout was, compared with the others of its group."""

import numpy as np

from etude.types import Floats


def group_advantages(rewards_G: Floats) -> Floats:
    """A = R − mean(R), [G].

    Not divided by the group's standard deviation: where nearly all rollouts do equally well, that would blow tiny
    differences of behaviour up to the size of real ones (Dr. GRPO, arXiv 2503.20783, and the Composer 2 report).
    """
    advantages_G: Floats = (rewards_G - rewards_G.mean(dtype=np.float64)).astype(np.float32)
    return advantages_G
