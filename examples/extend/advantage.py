"""An advantage: by rank, whatever the distances. ``loss.baseline = "@advantage.py:by_rank"``."""

import numpy as np
import numpy.typing as npt


def by_rank(rewards_G: npt.NDArray[np.floating], penalties_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[G] from -1 for the worst of a group to 1 for the best; equal ones have the mean of their ranks."""
    values_G = rewards_G - penalties_G
    lower_G = (values_G[:, None] > values_G[None, :]).sum(axis=1)
    higher_G = (values_G[:, None] < values_G[None, :]).sum(axis=1)
    ranks_G: npt.NDArray[np.float64] = (lower_G - higher_G) / max(1, len(values_G) - 1)
    return ranks_G
