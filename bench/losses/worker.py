"""Losses of TRL and verl, for `bench losses`: runs in TRL's environment, without étude.

    batches, cases ──▶ this program ──▶ for each case and batch: loss, gradient by log-probability and by entropy

TRL is called where it computes its loss, ``GRPOTrainer._compute_loss``, on a trainer that holds the settings of a case
and a forward pass that returns the batch's numbers. verl cannot be installed beside it: its ``core_algos.py`` is read
out of its wheel and run with stand-ins for what it imports and these functions do not use.

Shape legend: B sequences, T tokens.

Standard library and what is measured alone.
"""

import json
import os
import sys
import types
import zipfile
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

LOSSES = "verl.trainer.ppo.core_algos"
REAL = ("verl.utils.import_utils", "verl.utils.torch_functional", LOSSES)
"""Modules of verl that are run, in the order in which they import each other."""
STOOD_IN = (
    "omegaconf", "tensordict", "verl", "verl.trainer", "verl.trainer.config", "verl.trainer.ppo", "verl.utils",
    "verl.utils.device", "verl.workers", "verl.workers.config",
)  # fmt: skip
"""Modules that these import names from, none of which the losses call."""


class Settings(types.SimpleNamespace):
    """Attributes that can also be accessed as items."""

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or ``default``."""
        return getattr(self, name, default)


class StandIn(types.ModuleType):
    """A module that has every name: of a class of its own, but for the settings that verl's actor has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Settings if name == "ActorConfig" else type(name, (), {})


def trl_loss(trainer: Any, batch: dict[str, Any], case: dict[str, Any], leaves: tuple[Any, Any]) -> Any:
    """The loss of a batch by ``GRPOTrainer`` with the settings of ``case``."""
    torch = import_module("torch")
    accelerator = types.SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )  # fmt: skip
    defaults = {
        "beta": 0.0, "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token",
        "off_policy_mask_threshold": None, "entropy_coef": 0.0, "delta": None, "max_completion_length": 1,
    }  # fmt: skip
    settings = defaults | {name: value for name, value in case["settings"].items() if name in defaults}
    holder = Settings(
        **settings,
        args=Settings(delta=settings["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0, use_vllm=True, vllm_importance_sampling_correction=True, aux_loss_enabled=False,
        model=Settings(training=True), current_gradient_accumulation_steps=1, accelerator=accelerator,
        use_adaptive_entropy=False, _entropy_bonus_enabled=settings["entropy_coef"] > 0,
        _metrics=defaultdict(lambda: defaultdict(list)), get_off_policy_mask=trainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_arguments, **_options: (*leaves, None),
    )  # fmt: skip
    mask, sampling = batch["mask"], batch["engine"]
    inputs = {
        "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask, "completion_mask": mask,
        "advantages": batch["advantages"], "sampling_per_token_logps": sampling,
        "ref_per_token_logps": batch["reference"], "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": torch.ones_like(sampling),
    }  # fmt: skip
    old = {"engine": sampling, "recomputed": batch["old"]}.get(case["settings"].get("old", ""))
    if old is not None:
        inputs["old_per_token_logps"] = old
    if "weights" in case["settings"]:
        ratios = (leaves[0].detach() if old is None else old) - sampling
        inputs["importance_sampling_ratio"] = trl_weights(torch, ratios * mask, **case["settings"]["weights"])
    return trainer._compute_loss(holder, None, inputs)


def trl_weights(torch: Any, log_ratios_BT: Any, *, mode: str, low: float, high: float) -> Any:
    """``vllm_importance_sampling_mode``: computed where TRL generates (``_generate_and_score_completions``)."""
    sums = log_ratios_BT.sum(-1, keepdim=True) if mode.startswith("sequence") else log_ratios_BT
    ratios = torch.exp(sums)
    if mode.endswith("truncate"):
        return ratios.clamp(low, high)
    return ratios.masked_fill((ratios < low) | (ratios > high), 0.0)


def verl_loss(losses: Any, batch: dict[str, Any], case: dict[str, Any], leaves: tuple[Any, Any]) -> Any:
    """The sum of verl's actor (``verl/workers/utils/losses.py``, ``ppo_loss``) with the settings of ``case``."""
    torch, settings = import_module("torch"), case["settings"]
    logprobs, entropies = leaves
    mask, average = batch["mask"], {"loss_agg_mode": settings.get("average", "token-mean")}
    scale = {"loss_scale_factor": settings["scale"]} if "scale" in settings else {}
    config = Settings(
        clip_ratio=0.2, clip_ratio_low=settings["low"], clip_ratio_high=settings["high"],
        clip_ratio_c=settings.get("dual", 1e9), global_batch_info=scale,
    )  # fmt: skip
    old = batch["old"] if settings.get("old") == "recomputed" else batch["engine"]
    weights = None
    if "cap" in settings:
        weights = torch.exp(old - batch["engine"]).clamp(max=settings["cap"]) * mask
    loss, _ = losses.get_policy_loss_fn(settings["mode"])(
        old_log_prob=old, log_prob=logprobs, advantages=batch["advantages"].unsqueeze(1) * torch.ones_like(logprobs),
        response_mask=mask, config=config, rollout_is_weights=weights, **average,
    )  # fmt: skip
    if "entropy" in settings:
        loss = loss - settings["entropy"] * losses.agg_loss(entropies, mask, **average, **scale)
    if "kl" in settings:
        divergence = losses.kl_penalty(logprobs, batch["reference"], settings["kl"])
        loss = loss + settings["kl_coef"] * losses.agg_loss(divergence, mask, **average, **scale)
    return loss


def load_verl(wheel: str) -> Any:
    """The module of verl's losses, out of its wheel."""
    for name in STOOD_IN:
        _enter(name, StandIn(name))
    with zipfile.ZipFile(wheel) as archive:
        for name in REAL:
            path = name.replace(".", "/") + ".py"
            module = types.ModuleType(name)
            _enter(name, module)
            exec(compile(archive.read(path), path, "exec"), module.__dict__)
    return sys.modules[LOSSES]


def _enter(name: str, module: types.ModuleType) -> None:
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


def result(system: Any, loss_of: Any, rows: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one case on one batch."""
    torch = import_module("torch")
    batch = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    leaves = batch["logprobs"].requires_grad_(), batch["entropies"].requires_grad_()
    loss = loss_of(system, batch, case, leaves)
    loss.backward()
    gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    return {"loss": float(loss.detach()), "gradient": gradients[0].tolist(), "by_entropy": gradients[1].tolist()}


def main() -> None:
    """Report the version, and answer with results; libraries print to standard error."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        setup = json.loads(sys.argv[1])
        import_module("torch").set_num_threads(1)
        loss_of: Any = {"trl": trl_loss, "verl": verl_loss}[setup["system"]]
        if setup["system"] == "trl":
            version, system = import_module("trl").__version__, import_module("trl.trainer.grpo_trainer").GRPOTrainer
        else:
            version, system = Path(setup["wheel"]).name.split("-")[1], load_verl(setup["wheel"])
        print(json.dumps({"version": version}), file=answers, flush=True)
        request = json.loads(sys.stdin.readline())
        results = [[result(system, loss_of, batch, case) for batch in request["batches"]] for case in request["cases"]]
        print(json.dumps({"results": results}), file=answers, flush=True)


if __name__ == "__main__":
    main()
