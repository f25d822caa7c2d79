"""The assignment of this machine's GPUs to the processes of a run.

    [placement]                      by name                  default: engines first, then a GPU for each rank
    engine = [[0], [1]]              serve ─ 0, serve-1 ─ 1
    trainer = [2, 3]                 train ─ 2, 3

A process only sees its own GPUs (``CUDA_VISIBLE_DEVICES``). With one GPU, engine and trainer share it if each is a
single process. Mid-training and SFT use the trainer's GPUs if they have as many ranks, otherwise those from the first
on; the parity gate and release gates use the first. On a fleet, the launcher assigns GPUs.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from etude.config.inference import SglangOptions, VllmOptions
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.fleet.specs import ProcessSpec
from etude.run.phase_folders import phases_of, ranks_of
from etude.run.process_name import ENGINE, PRODUCTION, TRAINER, ProcessName
from etude.run.resolve import resolve_device

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(config: RunConfig) -> int:
    """The GPUs of this machine; 0 if the run uses none, even if there are some."""
    if "cuda" not in {resolve_device(config.engine.device), resolve_device(config.trainer.device)}:
        return 0
    import torch  # much of a small process's memory: only if there may be a GPU

    return torch.cuda.device_count()


def divide_gpus(config: RunConfig, count: int) -> dict[str, tuple[int, ...]]:
    """Process → its GPUs, of ``count`` on this machine; empty if all processes share the only GPU.

    Raises :class:`~etude.errors.ConfigError` if there are too few, or if ``[placement]`` does not match the processes.
    """
    named = config.placement
    engines = _engines(config) if resolve_device(config.engine.device) == "cuda" else []
    ranks = config.parallel.ranks if resolve_device(config.trainer.device) == "cuda" else 0
    needed = len(engines) * engine_gpus(config) + ranks
    if not named.is_empty:
        return _as_named(config, engines, ranks, count)
    if count >= needed:
        ends = [engine_gpus(config) * (index + 1) for index in range(len(engines))]
        shares = {name: tuple(range(end - engine_gpus(config), end)) for name, end in zip(engines, ends, strict=True)}
        return shares | ({str(TRAINER): tuple(range(needed - ranks, needed))} if ranks else {})
    if len(engines) <= 1 and ranks <= 1 and engine_gpus(config) == 1:
        return {}
    raise ConfigError(
        f"{len(engines)} engines of {engine_gpus(config)} GPUs each and {ranks} ranks of the trainer want {needed} "
        f"GPUs, and this machine has {count}: lower engine.replicas, release.engines or parallel.dp, or use a fleet"
    )


def phase_gpus(config: RunConfig, shares: Mapping[str, tuple[int, ...]], count: int) -> dict[str, tuple[int, ...]]:
    """Phase before RL → its GPUs, those of the trainer in ``shares`` if it has as many ranks; other phases see all
    ``count``.

    Raises :class:`~etude.errors.ConfigError` where there are too few.
    """
    if resolve_device(config.trainer.device) != "cuda":
        return {}
    trainer = shares.get(str(TRAINER), ())
    ranks = {phase: ranks_of(config, phase) for phase in phases_of(config)}
    for phase, number in ranks.items():
        if number > count:
            raise ConfigError(f"{phase} has {number} ranks, and there are {count} GPUs: lower parallel.imitation_dp")
    return {phase: trainer for phase, number in ranks.items() if number == len(trainer)}


def with_gpus(specs: Sequence[ProcessSpec], shares: Mapping[str, tuple[int, ...]]) -> tuple[ProcessSpec, ...]:
    """The processes with their GPUs set; one without a share sees all."""
    return tuple(
        replace(spec, environment={**spec.environment, VISIBLE: _visible(own)})
        if (own := shares.get(spec.name)) is not None
        else spec
        for spec in specs
    )


def engine_gpus(config: RunConfig) -> int:
    """Number of GPUs of one engine: one, or the number over which its server spreads a model."""
    return math.prod(engine_sizes(config))


def engine_sizes(config: RunConfig) -> tuple[int, int, int]:
    """(tensor, pipeline, data): numbers of GPUs over which an engine's server spreads matrices, layers
    and sequences.
    """
    match config.engine.options:
        case VllmOptions(arguments=arguments):
            names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
        case SglangOptions(arguments=arguments):
            names = ("tp-size", "pp-size", "dp-size")
        case _:
            return 1, 1, 1
    tensor, pipeline, data = (int(str(arguments.get(name, 1))) for name in names)
    return tensor, pipeline, data


def _engines(config: RunConfig) -> list[str]:
    serving = [ProcessName(command=ENGINE.command, replica=n) for n in range(config.engine.replicas)]
    if config.release.enabled:
        serving += [ProcessName(command=PRODUCTION.command, replica=n) for n in range(config.release.engines)]
    return [str(name) for name in serving]


def _as_named(config: RunConfig, engines: Sequence[str], ranks: int, count: int) -> dict[str, tuple[int, ...]]:
    named = config.placement
    lists = [*named.engine, *named.production]
    if len(lists) != len(engines):
        raise ConfigError(
            f"placement.engine and .production name GPUs of {len(lists)} engines, and the run has {len(engines)} on "
            f"GPUs ({', '.join(engines) or 'none'}): name a list of GPUs for each"
        )
    if len(named.trainer) != ranks:
        raise ConfigError(
            f"placement.trainer names {len(named.trainer)} GPUs, and the trainer has {ranks} ranks on GPUs: name one "
            f"for each"
        )
    highest = max((gpu for each in (*lists, named.trainer) for gpu in each), default=-1)
    if highest >= count:
        raise ConfigError(f"placement names GPU {highest}, and this machine has {count}, counted from 0")
    return dict(zip(engines, lists, strict=True)) | ({str(TRAINER): named.trainer} if ranks else {})


def _visible(gpus: Sequence[int]) -> str:
    """The variable's value; GPU numbers are relative to those that this process sees."""
    seen = [part for part in os.environ.get(VISIBLE, "").split(",") if part]
    return ",".join(seen[gpu] if seen else str(gpu) for gpu in gpus)
