"""Resolution of ``auto`` settings, once, when a run folder is created: its ``run.toml`` has the results.

Engine, gateway and trainer must agree on the arithmetic and on the transfer of routes, wherever they run. The devices
in the recipe determine both; for ``auto``, the machine that starts the run does. This module knows no model and imports
torch only to detect a GPU.
"""

from collections.abc import Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Literal, TypeAlias

from etude.config.data_paths import change_data
from etude.config.inference import NumericsConfig
from etude.config.loading import parse_config
from etude.config.recipe import RunConfig
from etude.errors import ConfigError

GPU_FILES = ("nvidia*", "kfd", "dxg")
"""Driver files in ``/dev``: a machine without any has no GPU that torch could find."""
MACHINE_PATHS = (
    *("tasks.options.python", "sandboxes.images", "engine.options.python"),
    *("engine.tls_cert", "engine.tls_key", "gateway.tls_cert", "gateway.tls_key", "gateway.keys"),
)
"""Keys with a file or folder of each machine, in addition to ``harness.options.mounts``; keys with data are in
:mod:`etude.config.data_paths`.
"""
Role: TypeAlias = Literal["trainer", "engine"]
"""A section that names a device."""


def resolve_device(name: str) -> str:
    """The device that ``auto`` stands for on this machine."""
    if name != "auto":
        return name
    if not any(file for pattern in GPU_FILES for file in Path("/dev").glob(pattern)):
        return "cpu"
    import torch  # much of a small process's memory: only if there may be a GPU

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_devices(config: RunConfig, roles: Sequence[Role] = ("trainer", "engine")) -> None:
    """Raise :class:`~etude.errors.ConfigError` if this machine lacks a device of ``roles``."""
    devices = {"trainer": config.trainer.device, "engine": config.engine.device}
    for role in roles:
        if devices[role] == "cuda" and resolve_device("auto") != "cuda":
            import torch

            raise ConfigError(
                f"{role}.device = 'cuda', but torch {torch.__version__} finds no CUDA device: `etude doctor` says "
                f"what this machine has; set 'cpu' or 'auto' in a recipe; a run that has begun keeps the device in its "
                f"run.toml, so its {role} belongs on a machine that has one"
            )


def resolve(config: RunConfig) -> RunConfig:
    """Resolve device, arithmetic, type, router replay and recomputation of a configuration; explicit values stay.

    Raises :class:`~etude.errors.ConfigError` for a combination that would have no effect.
    """
    engine, trainer = resolve_device(config.engine.device), resolve_device(config.trainer.device)
    everywhere = "cpu" if engine == trainer == "cpu" and config.engine.kind == "native" else "cuda"
    if config.parallel.ranks > 1:
        if config.numerics.arithmetic == "invariant":
            # The invariant kernels use a numpy view of a parameter, so torch cannot free its memory after a layer.
            raise ConfigError(
                f"numerics.arithmetic = 'invariant' is for one trainer process, dp * cp = {config.parallel.ranks}: "
                f"set 'fast', or leave it out"
            )
        everywhere = "cuda"  # several ranks use torch's kernels, as on a GPU
    if trainer == "cpu" and config.optimiser.state == "offload":
        raise ConfigError(
            "optimiser.state = 'offload' has no effect with a trainer on a CPU, where moments are in the host's memory "
            "anyway: leave it out, or set '8bit' to have them smaller"
        )
    numerics = config.numerics.model_copy(
        update={
            "arithmetic": "invariant" if is_invariant(config.numerics, everywhere) else "fast",
            "replay": resolve_replay(config.numerics, everywhere),
            "dtype": resolve_dtype(config.numerics, "cuda" if engine == trainer == "cuda" else "cpu"),
        }
    )
    if config.engine.kind == "vllm" and engine == "cpu":
        if config.numerics.replay not in ("auto", "off"):
            raise ConfigError(
                f"numerics.replay = {config.numerics.replay!r}: vLLM returns no routes on a CPU, set 'off'"
            )
        numerics = numerics.model_copy(update={"replay": "off"})
    if config.model.impl == "hf":
        numerics = numerics.model_copy(update={"replay": "off"})
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"device": engine}),
            "trainer": config.trainer.model_copy(
                update={"device": trainer, "checkpoint_activations": resolve_recomputing(config)}
            ),
            "numerics": numerics,
        }
    )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with the paths of its files and folders absolute, so that a run folder can be moved and read
    from anywhere.
    """
    tree = config.model_dump(mode="json")
    for key in MACHINE_PATHS:
        *sections, name = key.split(".")
        table = reduce(getitem, sections, tree)
        if name in table:
            table[name] = _absolute(table[name])
    change_data(tree, lambda _, path: _absolute(path))
    options = tree["harness"]["options"]
    if "mounts" in options:
        options["mounts"] = [_absolute(folder) for folder in options["mounts"]]
    for suite in tree["release"]["suites"]:
        suite["recipe"] = _absolute(suite["recipe"])
    return parse_config(tree, source="run.toml")


def machine_paths(config: RunConfig) -> list[tuple[str, str]]:
    """Key and path of a recipe's files and folders that each machine has locally."""
    tree = config.model_dump(mode="json")
    named = [(key, str(reduce(getitem, key.split(".")[:-1], tree).get(key.rpartition(".")[2]) or ""))
             for key in MACHINE_PATHS]  # fmt: skip
    mounts = [("harness.options.mounts", path) for path in tree["harness"]["options"].get("mounts", ())]
    return [(key, path) for key, path in (*named, *mounts) if path]


def _absolute(path: str) -> str:
    """The absolute path, without resolving links; empty for an empty path."""
    return str(Path(path).absolute()) if path else ""


def is_invariant(config: NumericsConfig, device: str) -> bool:
    """True if the arithmetic is the invariant one."""
    return config.arithmetic == "invariant" or (config.arithmetic == "auto" and device == "cpu")


def resolve_recomputing(config: RunConfig) -> bool:
    """Resolve the recomputation of activations: on with several ranks, where models are large, or as in the recipe."""
    chosen = config.trainer.checkpoint_activations
    return config.parallel.ranks > 1 if chosen == "auto" else chosen


def resolve_dtype(config: NumericsConfig, device: str) -> Literal["float32", "bfloat16"]:
    """The type of published weights: the fast type of GPUs, if all devices of the run are GPUs."""
    return "bfloat16" if config.dtype == "auto" and device == "cuda" else config.stored_dtype


def resolve_replay(config: NumericsConfig, device: str) -> Literal["off", "completion", "full"]:
    """Resolve router replay. Raises :class:`~etude.errors.ConfigError` if it could have no effect."""
    invariant = is_invariant(config, device)
    if config.replay == "auto":
        return "off" if invariant else "completion"
    if invariant and config.replay != "off":
        raise ConfigError(
            f"numerics.replay = {config.replay!r} has no effect in invariant arithmetic, where engine and trainer "
            f"choose the same experts: set numerics.arithmetic = 'fast' or numerics.replay = 'off'"
        )
    return config.replay
