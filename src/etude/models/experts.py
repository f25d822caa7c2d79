"""Feed-forward layers: dense, or mixture of experts with a router; and the routes of a forward pass.

A trainer whose arithmetic differs from the engine's in the last digits routes some tokens to other experts, and credits
the wrong ones. *Replay* uses the engine's routes; gates are still the live router's, so that it learns. The
plausibility floor limits the difference between a replayed choice and the live router's current choice.

Shape legend: N tokens, H hidden, S sparse layers, E experts, k experts per token, R rows (a token once per expert it is
sent to), I inputs, O outputs, G groups of experts, g experts in a group, e experts of this rank.
"""

import functools
import math
from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor, nn

from etude.models.arithmetic import Arithmetic
from etude.models.lora import LoraSite, linear
from etude.models.precise import Precise
from etude.models.spec import GROUP_WITNESSES, SILU, ExpertsSpec, GateSpec, ModelSpec
from etude.types import NO_ROUTE

TINIEST_SUM = 1e-20
"""Added to the divisor of gates, because all sigmoids of a token may be 0."""


class Rounding(Protocol):
    """A low-precision number format, as it affects the products of experts.

    Gradients are straight-through. Implemented by :class:`~etude.models.lowprecision.ExpertFormat`.
    """

    def activation(self, x_RI: Tensor) -> Tensor:
        """[R,I] values of the format; each row depends on that row alone."""
        ...

    def weight(self, w_EOI: Tensor, *, parts: int) -> Tensor:
        """[E,O,I] values of the format; each of the E consists of ``parts`` stacked matrices."""
        ...


@final
class FeedForward(nn.Module):
    """A gated feed-forward layer (SwiGLU, arXiv 2002.05202): down(silu(gate·x) · up·x), or with another gate."""

    def __init__(self, hidden_size: int, size: int, gate: GateSpec = SILU) -> None:
        super().__init__()
        self._gate = gate
        self.gate_up = nn.Parameter(torch.empty(2 * size, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, size))
        self.gate_up_lora: LoraSite | None = None
        self.down_lora: LoraSite | None = None

    def forward(self, x_NH: Tensor, arithmetic: Arithmetic) -> Tensor:
        """[N,H] → [N,H]."""
        inner_NI = arithmetic.gated(linear(arithmetic, x_NH, self.gate_up, self.gate_up_lora), self._gate)
        return linear(arithmetic, inner_NI, self.down, self.down_lora)


@final
class Routing:
    """The routes of one forward pass, replayed and recorded; a new object for every pass.

    ``replay`` (int64 [N,S,k]) are the experts to use instead of the live router's, in the order of their slots. A token
    with ``NO_ROUTE`` in a layer's row is routed live there. The caller checks the ids, which are used as indices.

    ``floor`` (0 … 1) rejects implausible experts: a replayed expert whose score is below ``floor`` times the k-th best
    score of the live router is replaced by the live router's best expert that is not in the row. So nothing is replaced
    with a model's own routes, or with a floor of 0. For a router that chooses by score plus correction, the expert's
    sum may be below the k-th best sum by the same difference.

    ``record`` enables :meth:`recorded`.
    """

    def __init__(self, *, replay: Tensor | None = None, floor: float = 0.0, record: bool = False) -> None:
        if not 0.0 <= floor <= 1.0:
            raise ValueError(f"floor={floor} must be a share of the k-th best score, 0 to 1")
        self.replay_NSk = replay
        self.floor = floor
        self._record = record
        self._recorded_NSk: Tensor | None = None
        # By layer, so that a layer recomputed for its gradient does not count twice.
        self._flips: dict[int, Tensor] = {}
        self._replaced: dict[int, Tensor] = {}
        self._pairs: dict[int, Tensor] = {}

    def begin(self, tokens: int, spec: ModelSpec, device: torch.device) -> None:
        """Called by the decoder before its first layer. Raises ``ValueError`` if the replay has another shape."""
        expected = (tokens, *spec.routes_shape)
        if self.replay_NSk is not None and (self.replay_NSk.shape != expected or self.replay_NSk.dtype != torch.int64):
            actual = f"{self.replay_NSk.dtype} {list(self.replay_NSk.shape)}"
            raise ValueError(f"replayed routes are {actual}, this pass needs torch.int64 {list(expected)}")
        if self._record:
            self._recorded_NSk = torch.empty(expected, dtype=torch.int64, device=device)

    def settle(self, layer: int, live_Nk: Tensor, ranking_NE: Tensor, slack_N1: Tensor | None) -> Tensor:
        """[N,k] the experts to use in sparse layer ``layer``, given the live router's choice, best first.

        ``ranking_NE`` are the values that the router chose by. A replayed expert more than ``slack_N1`` below the last
        live choice is implausible; with ``None``, none is.
        """
        experts_Nk = live_Nk
        if self.replay_NSk is not None:
            experts_Nk = self._replayed(layer, live_Nk, ranking_NE, slack_N1)
        if self._recorded_NSk is not None:
            self._recorded_NSk[:, layer] = experts_Nk
        return experts_Nk

    def recorded(self) -> Tensor:
        """int64 [N,S,k]: the experts that were used, in the order of their slots."""
        if self._recorded_NSk is None:
            raise ValueError("no routes were recorded: pass Routing(record=True) through a forward pass first")
        return self._recorded_NSk

    @property
    def pairs(self) -> int:
        """Number of replayed pairs of token and expert, over all sparse layers."""
        return _total(self._pairs)

    @property
    def flips(self) -> int:
        """Number of these pairs whose expert the live router would not have chosen."""
        return _total(self._flips)

    @property
    def replaced(self) -> int:
        """Number of flips whose expert was implausible."""
        return _total(self._replaced)

    def _replayed(self, layer: int, live_Nk: Tensor, ranking_NE: Tensor, slack_N1: Tensor | None) -> Tensor:
        assert self.replay_NSk is not None
        replay_Nk = self.replay_NSk[:, layer]
        given_N1 = (replay_Nk != NO_ROUTE).all(dim=-1, keepdim=True)
        asked_Nk = torch.where(given_N1, replay_Nk, live_Nk)
        agreed_Nkk = asked_Nk.unsqueeze(-1) == live_Nk.unsqueeze(-2)
        self._pairs[layer] = given_N1.sum() * live_Nk.shape[-1]
        self._flips[layer] = (~agreed_Nkk.any(-1)).sum()
        if slack_N1 is None:
            return asked_Nk
        lowest_N1 = ranking_NE.gather(1, live_Nk[:, -1:]) - slack_N1
        implausible_Nk = ranking_NE.gather(1, asked_Nk) < lowest_N1
        self._replaced[layer] = implausible_Nk.sum()
        return substituted(asked_Nk, implausible_Nk, live_Nk, taken_Nk=agreed_Nkk.any(-2))


@final
class ExpertRouter(nn.Module):
    """The router: scores experts, chooses k of them per token and weighs each (its gate).

    ``softmax``: Qwen3-MoE (arXiv 2505.09388). ``sigmoid``: DeepSeek-V3 (arXiv 2412.19437 §2.1.2, eq. 13–16): the choice
    is by score plus a correction, from the groups whose two best add up to most; the gates are made of scores alone.
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        """Index among the sparse layers, from 0."""
        self.weight = nn.Parameter(torch.empty(spec.count, hidden_size))
        self.bias = nn.Parameter(torch.zeros(spec.count)) if spec.bias else None
        self.correction = Precise(torch.zeros(spec.count), persistent=True) if spec.scoring == "sigmoid" else None
        """[E] changed by load balancing, not by gradients."""

    def forward(self, x_NH: Tensor, arithmetic: Arithmetic, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """[N,H] → experts [N,k] int64 and their gates [N,k] float32; gradients flow through the gates."""
        if self.correction is None:
            scores_NE = arithmetic.linear(
                x_NH, self.weight, self.bias
            ).float()  # softmax comes after the choice, as it preserves the order
            ranking_NE = scores_NE.detach()
        else:
            scores_NE = _sigmoid(arithmetic, arithmetic.linear(x_NH.float(), self.weight, self.bias))
            ranking_NE = scores_NE.detach() + self.correction.values
        experts_Nk = self._choose(arithmetic, ranking_NE)
        if routing is not None:
            slack_N1 = self._slack(ranking_NE, experts_Nk, routing.floor) if routing.floor else None
            experts_Nk = routing.settle(self.layer, experts_Nk, ranking_NE, slack_N1)
        return experts_Nk, self._gates(arithmetic, scores_NE, experts_Nk)

    def _choose(self, arithmetic: Arithmetic, ranking_NE: Tensor) -> Tensor:
        """[N,k] the best experts of the best groups, best first."""
        spec = self.spec
        if spec.top_groups < spec.groups:
            ranking_NGg = ranking_NE.unflatten(-1, (spec.groups, -1))
            rows = ranking_NGg.flatten(0, 1)
            witnesses = rows.gather(1, arithmetic.best(rows, GROUP_WITNESSES))
            merits_NG = witnesses.sum(dim=-1).unflatten(0, (-1, spec.groups))
            losers_NG = torch.ones_like(merits_NG, dtype=torch.bool)
            losers_NG = losers_NG.scatter(1, arithmetic.best(merits_NG, spec.top_groups), False)
            ranking_NE = ranking_NGg.masked_fill(losers_NG.unsqueeze(-1), -math.inf).flatten(1)
        return arithmetic.best(ranking_NE, spec.per_token)

    def _slack(self, ranking_NE: Tensor, live_Nk: Tensor, floor: float) -> Tensor:
        """[N,1] distance below the k-th best of an expert whose score is ``floor`` times the k-th best score."""
        last_N1 = live_Nk[:, -1:]
        if self.correction is None:
            return torch.full_like(last_N1, -math.log(floor), dtype=ranking_NE.dtype)  # logits: e^(a − b) is the ratio
        score_N1 = ranking_NE.gather(1, last_N1) - self.correction.values[last_N1]
        return (1.0 - floor) * score_N1

    def _gates(self, arithmetic: Arithmetic, scores_NE: Tensor, experts_Nk: Tensor) -> Tensor:
        """[N,k] float32."""
        spec = self.spec
        if spec.scoring == "softmax" and spec.normalise:
            # The softmax of the chosen is the softmax of all divided by the sum of the chosen, in one call.
            gates_Nk = arithmetic.softmax(scores_NE.gather(1, experts_Nk))
        elif spec.scoring == "softmax":
            gates_Nk = arithmetic.softmax(scores_NE).gather(1, experts_Nk)
        else:
            gates_Nk = scores_NE.gather(1, experts_Nk)
            if spec.normalise:  # summed slot by slot, because the order of torch's sums is undocumented
                total_N = functools.reduce(torch.add, gates_Nk.unbind(-1))
                gates_Nk = gates_Nk / (total_N + TINIEST_SUM).unsqueeze(-1)
        return gates_Nk if spec.scale == 1.0 else gates_Nk * spec.scale


class ExpertParallel(Protocol):
    """Expert parallelism: a layer's experts sharded over ranks that rows are sent to; the trainer implements it."""

    def local(self, weight_EOI: Tensor) -> Tensor:
        """[e,O,I] the matrices, or [e,O] the biases, of this rank's experts."""
        ...

    def all_to_all(self, rows_RI: Tensor, ends_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[R,O]: each row computed by the rank that has its expert, in the original order of rows. ``compute`` takes
        the rows of this rank's experts, in the order of experts, and the end of each expert's rows.
        """
        ...


@final
class RoutedExperts(nn.Module):
    """The matrices of a layer's routed experts, and their computation.

    Parameters have the layout of checkpoints: *fused* ones [E,I,O], all others [E,O,I].
    """

    def __init__(self, spec: ExpertsSpec, hidden_size: int, gate: GateSpec) -> None:
        super().__init__()
        self._gate = gate
        self.is_fused = spec.fused
        """True if the matrices are stored as [E,I,O]."""
        self.format: Rounding | None = None
        """The format that the products round numbers to; ``None``: no rounding."""
        self.published = False
        """True if the matrices are published ones, which are already rounded to the format."""
        self.parallel: ExpertParallel | None = None
        """Expert parallelism; ``None``: all experts are on this rank."""
        inner, outer = (2 * spec.size, hidden_size), (hidden_size, spec.size)
        self.gate_up = nn.Parameter(torch.empty(spec.count, *(reversed(inner) if spec.fused else inner)))
        self.gate_up_bias = nn.Parameter(torch.zeros(spec.count, inner[0])) if spec.bias else None
        self.down = nn.Parameter(torch.empty(spec.count, *(reversed(outer) if spec.fused else outer)))
        self.down_bias = nn.Parameter(torch.zeros(spec.count, outer[0])) if spec.bias else None
        self.gate_up_lora: LoraSite | None = None
        self.down_lora: LoraSite | None = None

    def forward(self, rows_RH: Tensor, ends_E: Tensor, arithmetic: Arithmetic, tokens_R: Tensor) -> Tensor:
        """[R,H] rows from :meth:`rounded`, in the order of their experts → [R,H]."""

        def compute(rows_RH: Tensor, ends_E: Tensor) -> Tensor:
            gate_up_EOI, gate_up_EO = self._matrices(self.gate_up, parts=2), self._local(self.gate_up_bias)
            gate_up_RI = arithmetic.grouped(rows_RH, ends_E, gate_up_EOI, gate_up_EO)
            if self.gate_up_lora is not None:
                gate_up_RI = self.gate_up_lora(gate_up_RI, rows_RH, arithmetic, ends_E, tokens_R)
            inner_RI = self.rounded(arithmetic.gated(gate_up_RI, self._gate))
            down_EOI, down_EO = self._matrices(self.down, parts=1), self._local(self.down_bias)
            out_RH = arithmetic.grouped(inner_RI, ends_E, down_EOI, down_EO)
            if self.down_lora is not None:
                out_RH = self.down_lora(out_RH, inner_RI, arithmetic, ends_E, tokens_R)
            return out_RH

        return compute(rows_RH, ends_E) if self.parallel is None else self.parallel.all_to_all(rows_RH, ends_E, compute)

    def rounded(self, x: Tensor) -> Tensor:
        """Activations rounded to the format of the products."""
        return x if self.format is None else self.format.activation(x)

    def _local(self, parameter: Tensor | None) -> Tensor | None:
        return parameter if parameter is None or self.parallel is None else self.parallel.local(parameter)

    def _matrices(self, parameter: Tensor, *, parts: int) -> Tensor:
        local_EOI = self._local(parameter)
        assert local_EOI is not None
        if self.is_fused:
            return local_EOI.transpose(1, 2)
        return local_EOI if self.format is None or self.published else self.format.weight(local_EOI, parts=parts)


@final
class Experts(nn.Module):
    """The sparse feed-forward layer: a router, its experts, and the shared experts."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, layer: int, gate: GateSpec = SILU) -> None:
        super().__init__()
        self.spec = spec
        self.router = ExpertRouter(spec, hidden_size, layer)
        self.routed = RoutedExperts(spec, hidden_size, gate)
        self.shared = FeedForward(hidden_size, spec.shared_size, gate) if spec.shared_size else None

    def forward(self, x_NH: Tensor, arithmetic: Arithmetic, routing: Routing | None) -> Tensor:
        """[N,H] → [N,H]."""
        experts_Nk, gates_Nk = self.router(x_NH, arithmetic, routing)
        dispatch = arithmetic.dispatch(experts_Nk, self.spec.count)
        # A token is rounded once for all its experts.
        rows_RH = arithmetic.spread(self.routed.rounded(x_NH), dispatch)
        y_RH = self.routed(rows_RH, dispatch.ends_E, arithmetic, dispatch.tokens_R)
        y_NH = arithmetic.combine(y_RH, dispatch.order_R, gates_Nk)
        if self.shared is None:
            return y_NH
        shared_NH: Tensor = self.shared(x_NH, arithmetic)
        return y_NH + shared_NH


def substituted(asked_Nk: Tensor, rejected_Nk: Tensor, live_Nk: Tensor, taken_Nk: Tensor) -> Tensor:
    """[N,k] the requested experts, rejected ones replaced by live ones not in ``taken``, best first.

    No live expert is rejected, so a row has enough free live experts for its r rejected ones: at most k − r of the k
    live ones are already in the row. Nothing waits for the device.
    """
    free_first_Nk = taken_Nk.to(torch.uint8).argsort(dim=-1, stable=True)
    substitutes_Nk = live_Nk.gather(1, free_first_Nk)
    turn_Nk = (rejected_Nk.cumsum(dim=-1) - 1).clamp(min=0)
    return torch.where(rejected_Nk, substitutes_Nk.gather(1, turn_Nk), asked_Nk)


def _sigmoid(arithmetic: Arithmetic, x_NE: Tensor) -> Tensor:
    """[N,E]: 1/(1 + e⁻ˣ), as the softmax of (x, 0): the last bits of torch's sigmoid depend on a number's position."""
    pairs = torch.stack((x_NE, torch.zeros_like(x_NE)), dim=-1)
    return arithmetic.softmax(pairs.flatten(0, 1))[:, 0].view(x_NE.shape)


def _total(counts: dict[int, Tensor]) -> int:
    return int(torch.stack(list(counts.values())).sum()) if counts else 0
