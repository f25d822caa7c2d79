"""Mid-training: next-token prediction over a stream of document batches.

Owns the optimiser, the schedule and the progress of this phase. What is read comes from outside, batch by batch.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from etude.config import MidtrainConfig
from etude.models.decoder import Decoder
from etude.telemetry.events import MidtrainProgress
from etude.trainer.padding import pad_rows
from etude.trainer.schedule import rate_share
from etude.types import Document

REPORT_EVERY_STEPS = 20
"""Steps between progress events: about one a second on a laptop."""


@dataclass(frozen=True, slots=True)
class _StepLoss:
    """Losses of one step in nats; ``action`` is NaN where the batch has no agent's token."""

    weighted: float
    action: float
    tokens: int


def midtrain(
    model: Decoder,
    batches: Iterator[Sequence[Document]],
    config: MidtrainConfig,
    on_progress: Callable[[MidtrainProgress], None],
) -> int:
    """Train ``model`` in place until ``config.tokens`` are spent; returns the tokens really processed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    steps = max(1, config.tokens // config.batch_tokens)
    tokens, recent, since_s = 0, list[_StepLoss](), time.perf_counter()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = config.learning_rate * rate_share(
                step, steps, warmup_steps=config.warmup_steps, decay_share=config.decay_share
            )
        recent.append(_train_step(model, optimiser, next(batches), config))
        tokens += recent[-1].tokens
        if (step + 1) % REPORT_EVERY_STEPS == 0 or step + 1 == steps:
            now_s = time.perf_counter()
            on_progress(_progress(step + 1, steps, tokens, recent, now_s - since_s))
            recent, since_s = [], now_s
    return tokens


def _train_step(
    model: Decoder, optimiser: torch.optim.Optimizer, documents: Sequence[Document], config: MidtrainConfig
) -> _StepLoss:
    device = model.embedding.device
    ids_BT = torch.from_numpy(pad_rows([document.token_ids for document in documents])).to(device)
    weights_BT = torch.from_numpy(pad_rows([document.weights for document in documents])).to(device)[:, 1:]
    counted = weights_BT > 0
    hidden_NH = model.forward_padded(ids_BT)[:, :-1][counted]
    losses_N = functional.cross_entropy(model.logits(hidden_NH), ids_BT[:, 1:][counted].long(), reduction="none")
    weights_N: Tensor = weights_BT[counted]
    loss = (losses_N * weights_N).sum() / weights_N.sum()
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    own = losses_N.detach()[weights_N == 1.0]
    is_session = bool((weights_N != 1.0).any())
    return _StepLoss(float(loss.detach()), float(own.mean()) if is_session and len(own) else math.nan, ids_BT.numel())


def _progress(step: int, steps: int, tokens: int, recent: Sequence[_StepLoss], seconds: float) -> MidtrainProgress:
    actions = [loss.action for loss in recent if not math.isnan(loss.action)]
    return MidtrainProgress(
        step=step,
        steps=steps,
        tokens=tokens,
        loss=sum(loss.weighted for loss in recent) / len(recent),
        action_loss=sum(actions) / len(actions) if actions else 0.0,
        tokens_per_s=sum(loss.tokens for loss in recent) / seconds,
    )
