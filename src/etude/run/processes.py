"""Entry points of a run's processes, by command."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from etude.run.data_copies import bring_data
from etude.run.folder import RunFolder, exclusive
from etude.run.parent import SUPERVISOR_VARIABLE, die_with_parent
from etude.run.phase_folders import ranks_of
from etude.run.process_name import ProcessName
from etude.run.ranks import ONE_NODE, Nodes, run_ranks
from etude.run.resolve import Role, check_devices

PREDECESSOR_S = 20.0
"""Longest wait for the previous process of the same name to clean up after its supervisor was killed: longer than
:data:`etude.run.serving.STOP_S`, which ends that process.
"""
NICENESS = {"serve": 10, "production": 8, "train": 5}
"""Niceness by command. Compute processes yield to the short work of gateway and rollouts where cores are scarce: an
engine that computes while its callers wait for a core gets small, wasteful batches.
"""

DEVICES: Mapping[str, Role] = {
    "midtrain": "trainer",
    "sft": "trainer",
    "train": "trainer",
    "parity": "engine",
    "serve": "engine",
    "production": "engine",
}
"""Command → the recipe section whose device its process uses."""
DATA_OF: Mapping[str, tuple[str, ...]] = {
    "midtrain": ("tasks", "midtrain", "sft", "model"),  # the SFT file is checked before mid-training
    "sft": ("tasks", "midtrain", "sft", "model"),
    "rollouts": ("tasks",),
}
"""Command → the recipe sections whose data its process reads."""


def run_process(name: ProcessName, folder: RunFolder, nodes: Nodes = ONE_NODE) -> None:
    """Run one of a run's processes until its work is done or it gets a stop signal.

    ``nodes`` are the machines of the trainer or of an earlier phase. Raises :class:`~etude.errors.ConfigError` if this
    machine lacks the run's device.
    """
    config, command = folder.config(), name.command
    if command in DEVICES:
        check_devices(config, (DEVICES[command],))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # exit at once, as all state is on disk; servers replace this
    rank = os.environ.get("RANK")
    die_with_parent(signal.SIGTERM if rank is None else signal.SIGKILL)  # SIGKILL also ends a rank that is suspended
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # first of this machine's ranks; the others wait for it
    if command == "train" and is_first:
        from etude.run.checkpoint_copies import restore_checkpoint

        restore_checkpoint(folder)
    ranks = ranks_of(config, command)
    if max(ranks, nodes.nnodes) > 1 and rank is None:
        environments = nodes.environments(ranks)
        if len(environments) > 1:
            _run_ranks(command, folder, environments)
        os.environ.update(environments[0])
        rank = os.environ["RANK"]
    os.nice(NICENESS.get(command, 0))
    if ranks > 1:
        name = ProcessName(command=command, replica=int(rank or 0))
    with exclusive(folder, str(name), wait_s=PREDECESSOR_S):
        if is_first:
            bring_data(folder, *DATA_OF.get(command, ()))
        _run(name, folder)


def _run_ranks(command: str, folder: RunFolder, environments: Sequence[Mapping[str, str]]) -> NoReturn:
    """Run this node's ranks, each in its own process, until they end."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[SUPERVISOR_VARIABLE] = str(os.getpid())  # the ranks' parent, with which they end
    raise SystemExit(run_ranks([sys.executable, "-m", "etude", command, "--run", str(folder.path)], environments))


def _run(name: ProcessName, folder: RunFolder) -> None:
    match name.command:
        case "midtrain" | "sft":
            from etude.run.phases import run_phase

            run_phase(folder, name.command)
        case "parity":
            from etude.run.parity import gate

            gate(folder)
        case "serve" | "production":
            from etude.run.engine import run_engine

            run_engine(folder, name)
        case "gateway" | "product":
            from etude.run.gateway import run_gateway

            run_gateway(folder, name)
        case "feedback":
            from etude.run.feedback import run_feedback

            run_feedback(folder)
        case "release":
            from etude.run.release import run_release

            run_release(folder)
        case "rollouts":
            from etude.run.rollouts import run_rollouts

            run_rollouts(folder, name)
        case "train":
            from etude.run.trainer import run_trainer

            run_trainer(folder)
        case _:
            raise AssertionError(f"no process {name}")
