"""How large the steps of a phase are: warm-up, plateau, decay."""

FINAL_RATE_SHARE = 0.05
"""A phase ends at this share of its peak rate: below it the last steps would teach nothing."""


def rate_share(step: int, steps: int, *, warmup_steps: int, decay_share: float) -> float:
    """Learning rate of step 0 … ``steps`` − 1 as a share of its peak.

    Linear warm-up over ``warmup_steps``, a plateau, and over the last ``decay_share`` of the steps a linear decay to
    ``FINAL_RATE_SHARE`` (warmup-stable-decay, arXiv 2404.06395).
    """
    warm = min(1.0, (step + 1) / warmup_steps)
    decay_steps, left = decay_share * steps, steps - step
    return min(warm, max(FINAL_RATE_SHARE, left / decay_steps)) if left < decay_steps else warm
