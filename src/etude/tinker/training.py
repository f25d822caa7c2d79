"""The training state of one client: a model, the gradients that have added up, an optimiser.

    forward_backward ──▶ logprobs out, gradients add up          optim_step ──▶ one AdamW step, gradients are gone

All weights are trained: there is no LoRA. Losses are :mod:`etude.trainer.losses`'s, summed over tokens as the Tinker
API has it. Legend: n tokens of a datum, T those of a pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.config.inference import NumericsConfig
from etude.config.training import Aggregation, GspoOptions, LossConfig, OptimiserConfig
from etude.errors import DivergedError, UserError
from etude.models.checkpoint import load_checkpoint, load_state
from etude.models.decoder import Decoder
from etude.run.numerics import load_published, published_state, serving_model, training_model
from etude.tinker.messages import BatchRequest, Datum
from etude.trainer.corrections import trajectory_means
from etude.trainer.losses import LossTokens, Totals, policy_loss
from etude.trainer.optimisation import Optimisation, RateSchedule, build_optimiser
from etude.trainer.parallel import clip_gradients
from etude.trainer.scores import SampledTokens, sampled_logprobs
from etude.types import Floats

PASS_TOKENS = 8192
"""Tokens of one pass; longer data goes through alone."""
SUM: Aggregation = "seq_mean_token_sum"
"""The average that is a sum where the batch counts as one trajectory."""
UNCLIPPED = 1e9
"""Above any ratio."""
THRESHOLDS: Mapping[str, tuple[float, float]] = {
    "ppo": (0.8, 1.2),
    "cispo": (0.8, 1.2),
    "gspo": (1 - GspoOptions().clip_low, 1 + GspoOptions().clip_high),
}
"""Ratios at which a loss clips, unless ``loss_fn_config`` says so."""
OPTIONS: Mapping[str, frozenset[str]] = {
    "cross_entropy": frozenset(),
    "importance_sampling": frozenset(),
    **dict.fromkeys(THRESHOLDS, frozenset({"clip_low_threshold", "clip_high_threshold"})),
    "dro": frozenset({"beta"}),
}
"""The losses, and what ``loss_fn_config`` may say of each."""
SAMPLED_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
"""Inputs of a datum that was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """Parameters of one optimiser step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: not clipped."""


@dataclass(frozen=True, slots=True)
class _NamedLoss:
    """A loss of the Tinker API as one of étude's."""

    config: LossConfig
    inputs: frozenset[str] = SAMPLED_INPUTS
    """All that it takes of a datum, no more and no less."""

    @property
    def weighting(self) -> str:
        """The input that has what each token is weighted with."""
        return "advantages" if "advantages" in self.inputs else "weights"


def loss_of(name: str, config: Mapping[str, float]) -> _NamedLoss:
    """The loss of a name, with the options of ``loss_fn_config``. Raises :class:`~etude.errors.UserError`."""
    if name not in OPTIONS:
        why = ", for it needs what Tinker keeps to itself" if name == "stable_reinforce" else ""
        raise UserError(f"loss_fn={name!r} is not one of this server's{why}: set one of {', '.join(OPTIONS)}")
    if unknown := sorted(config.keys() - OPTIONS[name]):
        raise UserError(f"loss_fn_config has {unknown[0]!r}, which would have no effect on {name!r}: leave it out")
    match name:
        case "cross_entropy":
            return _NamedLoss(_config("policy_gradient", correction="none"), frozenset({"target_tokens", "weights"}))
        case "dro":
            return _NamedLoss(_penalised(config))
        case "importance_sampling":
            return _NamedLoss(_config("ppo_clip", options={"clip_low": 1.0, "clip_high": UNCLIPPED}))
        case "gspo":
            return _NamedLoss(_clipped("ppo_clip", name, config), SAMPLED_INPUTS | {"sequence_ratio_mask"})
        case _:
            return _NamedLoss(_clipped("cispo" if name == "cispo" else "ppo_clip", name, config))


def _penalised(config: Mapping[str, float]) -> LossConfig:
    """DRO: −Σ (A·log π − β/2 · (log π/μ)²)."""
    beta = config.get("beta", -1.0)
    if not 0 < beta < float("inf"):
        raise UserError("loss_fn='dro' needs loss_fn_config={'beta': …}, above 0: there is no default here")
    return _config("policy_gradient", correction="none", kl_coef=beta, kl_estimator="k2", kl_to="engine")


def _clipped(kind: str, name: str, config: Mapping[str, float]) -> LossConfig:
    """A loss by the ratio to the policy that sampled, which is clipped at two thresholds."""
    low, high = THRESHOLDS[name]
    low, high = config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    if not 0 <= low <= 1 < high:
        raise UserError(f"loss_fn_config: clip_low_threshold={low:g}, clip_high_threshold={high:g}: they are ratios, "
                        f"the one from 0 to 1, the other above 1")  # fmt: skip
    return _config(kind, options={"clip_low": 1 - low, "clip_high": high - 1})


def _config(kind: str, **keys: object) -> LossConfig:
    return LossConfig.model_validate({"kind": kind, "aggregation": SUM, **keys})


def _moved(logprobs_N: Tensor, engine_logprobs_N: Tensor, mask_N: Tensor, trajectories_N: Tensor) -> Tensor:
    """[N] log μ, moved so that each token's ratio is that of its datum: the geometric mean where the mask is not 0.

    What clips ratios by token is GSPO-token then (arXiv 2507.18071, section 4.3): the value of the datum's ratio, with
    the gradient of the token's own logprob. Every datum needs a token in its mask.
    """
    own_N, marked_N = logprobs_N.detach(), (mask_N != 0).float()
    gaps_N = torch.where(mask_N != 0, own_N - engine_logprobs_N, 0.0)
    return own_N - trajectory_means(gaps_N, trajectories_N) / trajectory_means(marked_N, trajectories_N)


class TrainingState:
    """A model that is trained call by call. Not to be shared between threads."""

    def __init__(self, checkpoint: Path, numerics: NumericsConfig, device: str) -> None:
        spec, state = load_checkpoint(checkpoint)
        self._numerics, self._device = numerics, device
        self.model = training_model(spec, numerics, device)
        load_state(self.model, state)
        self._optimiser = build_optimiser(
            self.model, OptimiserConfig(kind="adamw"), learning_rate=0.0, betas=(0.9, 0.95)
        )
        self._tensors = Optimisation(
            self.model, self._optimiser, RateSchedule(steps=1, warmup_steps=1), clip_norm=float("inf")
        )

    def forward_backward(self, request: BatchRequest) -> tuple[list[Floats], dict[str, float]]:
        """Compute the loss of a batch and add its gradient to those that are there; ``forward_only`` adds none.

        Returns the logprobs of each datum's targets, [n] each, and metrics. Raises :class:`~etude.errors.UserError` for
        a loss that there is not, and for data that does not go with it.
        """
        loss = loss_of(request.loss_fn, request.loss_config)
        for datum in request.data:
            self._check(datum, loss)
        logprobs: list[Floats] = []
        total = 0.0
        for part in _passes(request.data):
            with torch.set_grad_enabled(not request.forward_only):
                tokens = self._tokens(part, loss)
                scores_T = sampled_logprobs(self.model, tokens)
                of_loss = LossTokens(
                    logprobs_N=scores_T,
                    engine_logprobs_N=self._engine_logprobs(part, loss, tokens, scores_T),
                    advantages_N=tokens.advantages_N,
                    trajectories_N=tokens.trajectories_N,
                )
                value = policy_loss(of_loss, loss.config, Totals(tokens=len(scores_T), trajectories=1)).loss
            if not request.forward_only:
                value.backward()
            total += float(value.detach())
            ends = np.cumsum(tokens.lengths)[:-1]
            logprobs += np.split(scores_T.detach().cpu().numpy(), ends)
        return logprobs, {"loss:sum": total}

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Take one AdamW step with the gradients that have added up, and forget them; returns metrics.

        Raises :class:`~etude.errors.DivergedError`, before anything changed, when the gradient is not finite.
        """
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise UserError("optim_step without a gradient: call forward_backward before it")
        norm = float(clip_gradients(self.model, params.grad_clip_norm or float("inf")))
        if not norm < float("inf"):
            self._optimiser.zero_grad()
            raise DivergedError(f"the gradient's norm is {norm}; nothing was changed, the gradient is dropped")
        for group in self._optimiser.param_groups:
            group["lr"], group["betas"], group["eps"] = params.learning_rate, (params.beta1, params.beta2), params.eps
            group["weight_decay"] = params.weight_decay
        self._optimiser.step()
        self._optimiser.zero_grad()
        return {"grad_norm": norm}

    def snapshot(self) -> Decoder:
        """A copy of the weights as they are now, as an engine serves them."""
        model = serving_model(self.model.spec, self._numerics, self._device)
        load_published(model, published_state(self.model, self._numerics), self._numerics)
        return model

    def save(self, file: Path) -> None:
        """Write weights and moments, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file({name: tensor.detach().clone() for name, tensor in self._tensors.tensors().items()}, partial)
        partial.replace(file)

    def load(self, file: Path, *, optimiser: bool) -> None:
        """Go on from what :meth:`save` wrote, with its moments if ``optimiser``, else without any; gradients so far are
        dropped.
        """
        saved = load_file(file)
        self._tensors.restore({name: value for name, value in saved.items() if optimiser or name.startswith("model/")})
        self._optimiser.zero_grad()

    def _check(self, datum: Datum, loss: _NamedLoss) -> None:
        if missing := sorted(loss.inputs - datum.inputs.keys()):
            raise UserError(f"a datum has no {missing[0]!r} in loss_fn_inputs, which the loss needs")
        if unused := sorted(datum.inputs.keys() - loss.inputs):
            raise UserError(f"a datum has {unused[0]!r} in loss_fn_inputs, which the loss does not use: leave it out")
        if not len(datum.token_ids):
            raise UserError("a datum has no token")
        for ids in (datum.token_ids, datum.inputs["target_tokens"]):
            if int(ids.min()) < 0 or int(ids.max()) >= self.model.spec.vocab_size:
                raise UserError(f"a token id is outside of the vocabulary of {self.model.spec.vocab_size}")
        mask = datum.inputs.get("sequence_ratio_mask")
        if mask is not None and not mask.any():
            raise UserError("a datum's sequence_ratio_mask is 0 everywhere: set it to 1 on the sampled tokens")

    def _engine_logprobs(
        self, part: Sequence[Datum], loss: _NamedLoss, tokens: SampledTokens, scores_T: Tensor
    ) -> Tensor:
        """[T] log μ of what a loss makes its ratios of; the model's own where it makes none."""
        if "logprobs" not in loss.inputs:
            return scores_T.detach()
        if "sequence_ratio_mask" not in loss.inputs:
            return tokens.engine_logprobs_N
        mask_T = self._joined(part, "sequence_ratio_mask")
        return _moved(scores_T, tokens.engine_logprobs_N, mask_T, tokens.trajectories_N)

    def _joined(self, part: Sequence[Datum], name: str, kind: torch.dtype = torch.float32) -> Tensor:
        """[T] an input of every datum."""
        return torch.from_numpy(np.concatenate([datum.inputs[name] for datum in part])).to(self._device, kind)

    def _tokens(self, part: Sequence[Datum], loss: _NamedLoss) -> SampledTokens:
        lengths = tuple(len(datum.token_ids) for datum in part)
        token_ids_T = torch.from_numpy(np.concatenate([datum.token_ids for datum in part])).to(self._device).long()
        zeros_T = torch.zeros(len(token_ids_T), device=self._device)
        return SampledTokens(
            lengths=lengths,
            token_ids_T=token_ids_T,
            places_N=torch.arange(1, len(token_ids_T) + 1, device=self._device),  # target i is predicted at token i
            scored_ids_N=self._joined(part, "target_tokens", torch.int64),
            trajectories_N=torch.arange(len(part)).repeat_interleave(torch.tensor(lengths)).to(self._device),
            engine_logprobs_N=self._joined(part, "logprobs") if "logprobs" in loss.inputs else zeros_T,
            versions_N=zeros_T.int(),
            advantages_N=self._joined(part, loss.weighting),
            temperatures_N=zeros_T + 1,
            sampling_mask=None,
        )


def _passes(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """The data in order, in passes of at most ``PASS_TOKENS``."""
    part: list[Datum] = []
    for datum in data:
        if part and sum(len(one.token_ids) for one in part) + len(datum.token_ids) > PASS_TOKENS:
            yield part
            part = []
        part.append(datum)
    if part:
        yield part
