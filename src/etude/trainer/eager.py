"""torch's optimisers without its compiler: étude does not use it, and its import takes two seconds.

torch wraps some methods of its optimisers to hide them from the compiler, and the wrappers import it. These classes
have the methods themselves, which compute the same numbers.
"""

from inspect import unwrap

import torch


class EagerOptimiser(torch.optim.Optimizer):
    """torch's base class of optimisers."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class EagerAdamW(EagerOptimiser, torch.optim.AdamW):
    """torch's AdamW."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
