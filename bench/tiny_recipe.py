"""The smallest recipe that trains: one kind of bug, and a model of one layer."""

from collections.abc import Mapping

from etude.types import Json

GROUP_SIZE = 4
"""Rollouts of a group."""
_TINY: dict[str, dict[str, Json]] = {
    "tasks": {"options": {"kinds": ["arith"]}},
    "model": {"shape": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "experts": 4,
                        "expert_size": 32}},
    # For a model that knows the words of the tools, and hardly more.
    "midtrain": {"tokens": 60_000, "batch_tokens": 1000, "warmup_steps": 5,
                 "mixture": {"code": 0.34, "sessions": 0.66}},
    "rollouts": {"group_size": GROUP_SIZE, "max_staleness": 1, "concurrency": 16, "max_attempts": 8},
    "eval": {"enabled": False},
}  # fmt: skip


def tiny_recipe(name: str, **sections: Mapping[str, Json]) -> dict[str, Json]:
    """The recipe with the keys of ``sections`` in place of its own or beside them."""
    return {
        "name": name,
        **_TINY,
        **{section: {**_TINY.get(section, {}), **keys} for section, keys in sections.items()},
    }
