"""Changes of a recipe while its run is stopped, and the end of a run: the first decisions of ``etude run --resume``.

This module owns the table of changeable keys. A run is one experiment: the meaning of its rollouts, rewards and steps
must stay the same from first to last step; its length and its use of a machine may change.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType

from etude.config.loading import dump_run, load_recipe
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.fsync import write_whole
from etude.ledger.ledger import Ledger
from etude.run.folder import RunFolder, exclusive
from etude.run.resolve import resolve, with_absolute_paths
from etude.run.working_folder import RECIPE_FILES, fetching, keep
from etude.types import Json

CHANGEABLE = frozenset(
    {
        "heartbeat_timeout_s",
        "trainer.steps",
        "live.after_steps",
        *(f"trainer.{key}" for key in ("microbatch_tokens", "checkpoint_activations", "threads", "device")),
        "trainer.checkpoint_steps",
        *(f"engine.{key}" for key in ("max_running", "device", "host", "port", "replicas", "tls_cert", "tls_key")),
        *(f"engine.options.{key}" for key in ("max_waiting", "step_tokens", "cache_tokens", "spare_weights")),
        *(f"engine.options.{key}" for key in ("threads", "python")),
        *(f"rollouts.{key}" for key in ("concurrency", "max_attempts", "timeout_s", "start_timeout_s")),
        *(f"rollouts.{key}" for key in ("silence_timeout_s", "grading_timeout_s", "outage_s", "max_outage_s")),
        *(f"gateway.{key}" for key in ("host", "port", "replicas", "tls_cert", "tls_key", "keys", "access_log")),
        "gateway.engine_timeout_s",
        *(f"judge.options.{key}" for key in ("timeout_s", "concurrency", "calls_per_run", "tokens_per_run")),
        "judge.options.cost_per_run",
        *(f"ledger.{key}" for key in ("retry_timeout_s", "lease_s")),
        *(f"eval.{key}" for key in ("every_steps", "loss_every_steps")),
        *("sandboxes.pool_size", "sandboxes.options.workers", "numerics.warn_k3", "numerics.stop_k3"),
    }
)
"""Keys that may change while a run is stopped: its length, its use of a machine, its timeouts."""
BITS = frozenset(
    {f"trainer.{key}" for key in ("steps", "microbatch_tokens", "checkpoint_activations", "threads", "device")}
)
"""Changeable keys that affect the bits of a step: they may not change while steps must be repeated."""
# optimiser.state is in neither set: it may change between fp32 and offload, at any time, as both have the same bits in
# another place, but not to or from 8bit.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "model": "its initial weights depend on it",
        "midtrain": "its initial weights depend on it",
        "sft": "its initial weights depend on it",
        "tasks": "its ledger has groups of the former tasks, and the held-out tasks would change",
        "eval": "its evaluations before and after training could not be compared",
        "reward": "rewards from before and after the change could not be compared",
        "judge": "rewards from before and after the change could not be compared",
        "effort": "rewards from before and after the change could not be compared",
        "cheating": "rewards from before and after the change could not be compared",
        "ledger": "its stored state cannot be moved",
        "optimiser": "its moments were computed with it",
    }
)
"""Section → the reason why its other keys cannot change."""
ONE_ALGORITHM = "the result of a run must come from one algorithm"
"""The reason for every other key."""


def measured_fact(label: str) -> str:
    """Name of the ledger's fact with the last version evaluated as ``label``: ``before`` or ``after``."""
    return f"eval-{label}"


def changed_config(folder: RunFolder, settings: Sequence[str]) -> RunConfig:
    """The recipe of a run, changed by ``section.key=value`` settings.

    Raises :class:`~etude.errors.ConfigError`, with the reason, for a key that may not change, or not now.
    """
    before = folder.config()
    after = with_absolute_paths(resolve(load_recipe(folder.config_file, settings)))
    behind = steps_to_redo(folder, before)
    for key, old, new in differences(before.model_dump(mode="json"), after.model_dump(mode="json")):
        if behind and key in BITS:
            raise ConfigError(
                f"{key} = {new!r}: {behind} steps after the last checkpoint must be repeated first, with {old!r}, to "
                f"the same bits; resume without this change until the next multiple of trainer.checkpoint_steps"
            )
        if key not in CHANGEABLE and not (key == "optimiser.state" and "8bit" not in (old, new)):
            reason = REASONS.get(key.partition(".")[0], ONE_ALGORITHM)
            raise ConfigError(
                f"{key} = {new!r}: this run keeps {old!r}, since {reason}; start another run, from this one's weights "
                f"with `etude weights export {folder.path} DIR` and model.checkpoint = 'DIR'"
            )
    if after.live.after_steps != before.live.after_steps:
        _check_after_steps(folder, before, after.live.after_steps)
    return after


def steps_to_redo(folder: RunFolder, config: RunConfig) -> int:
    """Number of committed steps after the last checkpoint on this disk; 0 if every step is saved."""
    if config.trainer.checkpoint_steps == 1:
        return 0
    names = (path.name.removeprefix("step-") for path in folder.checkpoints.glob("step-*"))
    saved = max((int(name) for name in names if name.isdecimal()), default=0)
    with closing(Ledger.open(folder.ledger, config.ledger)) as ledger:
        return max(0, ledger.progress().steps_done - saved)


def _check_after_steps(folder: RunFolder, before: RunConfig, steps: int) -> None:
    """Raise :class:`~etude.errors.ConfigError` if ``live.after_steps`` gets smaller, or if a step after the former
    value is done, as live sessions may have been trained on then.
    """
    with closing(Ledger.open(folder.ledger, before.ledger)) as ledger:
        done = ledger.progress().steps_done
    if steps < before.live.after_steps or done > before.live.after_steps:
        raise ConfigError(
            f"live.after_steps = {steps}: it can only be raised from {before.live.after_steps}, and only before "
            f"step {before.live.after_steps + 1} is done, the first that trains on users' sessions; step {done} is done"
        )


def differences(
    before: Mapping[str, Json], after: Mapping[str, Json], within: str = ""
) -> Iterator[tuple[str, Json, Json]]:
    """The dotted keys in which two recipes differ, with both values."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{within}{name}.")
        elif old != new:
            yield f"{within}{name}", old, new


def change(folder: RunFolder, config: RunConfig) -> None:
    """Make ``config`` the recipe of a run, atomically, also at its URL. Raises :class:`~etude.errors.RunFolderError`
    while the run has a supervisor.
    """
    with exclusive(folder, "supervisor"), fetching(folder):  # a fetch in between would bring the former recipe back
        write_whole(folder.config_file, dump_run(config, folder.path).encode(), syncs=True)
        keep(folder, *RECIPE_FILES)


def is_finished(folder: RunFolder, config: RunConfig) -> bool:
    """True if a run has taken all its steps and, if it evaluates, has evaluated the last weight version.

    Raises :class:`~etude.errors.ConfigError` if it has taken more steps than the recipe's ``trainer.steps``.
    """
    with closing(Ledger.open(folder.ledger, config.ledger)) as ledger:
        done, steps = ledger.progress().steps_done, config.trainer.steps
        if done > steps:
            raise ConfigError(
                f"trainer.steps = {steps}: {done} steps are done already; set more, or {done} to end here"
            )
        return done == steps and (not config.eval.enabled or ledger.facts.get(measured_fact("after")) == str(steps))
