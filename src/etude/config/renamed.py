"""Keys of earlier recipes: each gets an error that names the key, or says what took its place."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MOVED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model.shape": (
            *("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim"),
            *("experts", "experts_per_token", "expert_size"),
        ),
        "harness.options": (
            *("max_turns", "max_tokens_per_turn", "turn_timeout_s", "context"),
            *("summary_at_tokens", "summary_request", "max_tokens_per_summary", "max_summaries"),
            *("command", "environment", "files", "mounts", "timeout_s", "success_codes"),
        ),
        "engine.options": ("max_waiting", "step_tokens", "cache_tokens", "swap", "spare_weights", "threads"),
        "credit.options": ("discount", "shaping", "branches", "branch_at", "branch_within"),
        "loss.options": ("old_policy", "clip_low", "clip_high", "dual_clip"),
        "loss.aggregation_options": ("sequence_tokens",),
        "loss.correction_options": ("floor", "cap"),
        "judge.options": (
            *("model", "structured", "votes", "temperature", "max_tokens", "text_characters", "timeout_s"),
            *("concurrency", "calls_per_rollout", "tokens_per_rollout", "calls_per_run", "tokens_per_run"),
            *("prices", "cost_per_run", "on_alarm"),
        ),
    }
)
"""A table of a section → the keys that were in the section itself."""
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "midtrain.betas": "a constant now: (0.9, 0.98)",
        "sft.betas": "a constant now: (0.9, 0.98)",
        "midtrain.weight_decay": "a constant of 0.05 now",
        "sft.weight_decay": "a constant of 0.05 now",
        "midtrain.clip_norm": "a constant of 1 now",
        "sft.clip_norm": "a constant of 1 now",
        "midtrain.microbatch_tokens": "trainer.microbatch_tokens",
        "sft.microbatch_tokens": "trainer.microbatch_tokens",
        "midtrain.stdlib_share": "a share in midtrain.mixture now",
        "midtrain.code_share": "a share in midtrain.mixture now",
        "midtrain.document_bytes": "a constant of 1024 now",
        "numerics.decide_tokens": "a constant of 100 now",
        "gateway.deadline_s": "a constant of 600 s now; a call may ask for less",
        "gateway.max_production": "a constant of 512 now",
        "gateway.max_rollouts": "a constant of 512 now",
        "gateway.max_waiting": "a constant of 1024 now",
        "gateway.max_body_mb": "a constant of 16 MiB now",
        "gateway.drain_s": "a constant of 30 s now",
        "gateway.max_session_turns": "a constant of 4096 now",
        "eval.tasks_on_the_way": "a constant of 64 now",
        "judge.key_variable": "a constant now: ETUDE_JUDGE_KEY",
        "judge.max_tokens_name": "read off judge.options.url now",
        "judge.prompt_price": "the first of judge.options.prices now",
        "judge.completion_price": "the second of judge.options.prices now",
        "judge.url": "judge.options.url, with judge.kind = 'model', or judge.kind = 'rules' now",
        "judge.drift_every": "a constant of 50 now",
        "judge.cache_entries": "a constant of 100000 now",
        "cheating.on_low": "cheating.outcomes.low",
        "cheating.on_medium": "cheating.outcomes.medium",
        "cheating.on_high": "cheating.outcomes.high",
        "cheating.exceptions": "a part of cheating.outcomes now",
        "effort.thinking_token": "effort.prices.thinking_tokens",
        "effort.call_token": "effort.prices.call_tokens",
        "effort.final_token": "effort.prices.final_tokens",
        "effort.output_token": "effort.prices.output_tokens",
        "effort.call": "effort.prices.calls",
        "effort.turn": "effort.prices.turns",
        "engine.vllm_python": "engine.options.python",
        "eval.documents": "a constant of 64 now",
        "eval.document_one_in": "eval.heldout_every",
        "loss.draft_coef": "loss.draft_learning_rate, a rate instead of a weight",
        "loss.mask_floor": "loss.mask_options.floor",
        "loss.mask_cap": "loss.mask_options.cap",
        "loss.mask_divergence": "loss.mask_options.divergence",
        "ledger.patience_s": "ledger.retry_timeout_s",
        "rollouts.allow_unconfined": "sandboxes.options.allow_unconfined",
        "rollouts.sandbox_workers": "sandboxes.options.workers",
        "sandboxes.url": "sandboxes.options.url",
        "sandboxes.warm": "sandboxes.pool_size",
        "tasks.askable": "tasks.options.question_names",
        "tasks.asked": "tasks.options.questions",
        "tasks.brief": "tasks.options.brief",
        "tasks.heldout_one_in": "tasks.heldout_every",
        "tasks.hidden_cases": "a constant of 10 now: more cases cost time and grade no better",
        "tasks.kinds": "tasks.options.kinds",
        "tasks.page_facts": "tasks.options.page_facts",
        "tasks.pages": "tasks.options.pages",
        "tasks.unprobed": "tasks.options.unprobed",
        "telemetry.sinks": "a part of [log] now: to",
        "transcripts": "a part of [tasks.options] now",
        **{f"{table.partition('.')[0]}.{key}": f"{table}.{key}" for table, keys in MOVED.items() for key in keys},
    }
)
"""Old ``section.key``, or a whole old section → the new key, or a clause with a space in it that says what it is now:
``a constant of 10 now: why``.
"""


def renamed(key: str) -> str:
    """The advice for an old key; empty for one that never was."""
    new = RENAMED.get(key, "")
    if not new:
        return ""
    return f"it is {new}" if " " in new else f"it is {new} now"


REMOVED_SECTIONS = ("telemetry",)
"""Sections that no longer exist; recipes of older runs have them, mostly empty."""

REMOVED_KEYS: Mapping[str, tuple[str, float]] = MappingProxyType({"loss": ("draft_coef", 0.0)})
"""Section → a key of it that no longer exists, and the value with which it had no effect."""


def drop_removed_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out removed sections and keys that had no effect, so that older runs can be opened."""
    empty = {name for name in REMOVED_SECTIONS if _is_empty(tree.get(name))}
    rest = {name: value for name, value in tree.items() if name not in empty}
    for name, (key, no_effect) in REMOVED_KEYS.items():
        section = rest.get(name)
        if isinstance(section, Mapping) and section.get(key) == no_effect:
            rest[name] = {other: value for other, value in section.items() if other != key}
    return rest


def _is_empty(section: object) -> bool:
    return isinstance(section, Mapping) and not any(section.values())
