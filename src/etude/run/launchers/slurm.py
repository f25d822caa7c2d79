"""The launcher ``slurm``: one sbatch file for a whole run, which is one heterogeneous job.

Each command is a component of the job with the machines that it needs; a process is a task, whose number is its
replica. A shell loop around each task restarts it as long as that may help. The trainer's tasks are restarted as one
step, since a group restarts as a whole. The job ends when trainer and rollouts are done.
"""

import shlex
from collections.abc import Sequence
from itertools import groupby

from etude.config.fleet import FleetConfig, SlurmConfig
from etude.errors import ExitCode
from etude.fleet.specs import GroupMember, ProcessSpec
from etude.run.process_name import NUMBERED, ProcessName

PAUSE_S = 5
"""Seconds before a process is restarted."""
HEAD = """\
# What this job runs was planned from a recipe and a fleet by `etude fleet render`.
set -u
# Start a command again until it has done its work, or met what no restart repairs.
again() {{
  while true; do
    "$@"; status=$?
    case $status in 0|{user_error}) return $status;; esac
    echo "$1 ended with status $status and is restarted" >&2
    sleep {pause_s}
  done
}}
export -f again
{prologue}"""
TAIL = """\
# The run is over when trainer and rollouts are; whichever gives up ends it.
status=0
for _ in "${ending[@]}"; do wait -n || { status=$?; break; }; done
kill $(jobs -p) 2>/dev/null
exit $status
"""


def render_sbatch(
    phases: Sequence[ProcessSpec], loop: Sequence[ProcessSpec], fleet: FleetConfig, run: str
) -> dict[str, str]:
    """Write the batch file of a run, under its short name ``run``; its components are in the order of the loop."""
    components = [(name, list(specs)) for name, specs in groupby(loop, key=lambda spec: _command_of(spec))]
    trainer = next(index for index, (command, _) in enumerate(components) if command == "train")
    lines = ["#!/bin/bash", f"#SBATCH --job-name={run}", f"#SBATCH --time={fleet.slurm.time}"]
    for index, (_, specs) in enumerate(components):
        lines += ["#SBATCH hetjob"] * (index > 0) + _request(specs, fleet.slurm)
    user_error = int(ExitCode.USER_ERROR)
    lines.append(HEAD.format(user_error=user_error, pause_s=PAUSE_S, prologue=fleet.slurm.prologue))
    for _, nodes in groupby(phases, key=_command_of):
        lines += _phase(trainer, next(nodes))
    lines += ["ending=()  # steps that end by themselves"]
    for index, (command, specs) in enumerate(components):
        lines += _step(index, command, specs)
    return {f"{run}.sbatch": "\n".join(lines) + "\n" + TAIL}


def _command_of(spec: ProcessSpec) -> str:
    return ProcessName.parse(spec.name).command


def _request(specs: Sequence[ProcessSpec], slurm: SlurmConfig) -> list[str]:
    """The directives of one component."""
    spec, resources = specs[0], specs[0].resources
    options = [
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        f"--ntasks={len(specs)}",
        *([f"--nodes={len(specs)}", "--ntasks-per-node=1"] if spec.group is not None else []),
        f"--cpus-per-task={max(1, round(resources.cpus))}",
        *([f"--gpus-per-task={resources.gpus}"] if resources.gpus else []),
        *([f"--mem-per-cpu={round(1024 * resources.memory_gib / max(1, round(resources.cpus)))}M"]
          if resources.memory_gib else []),
    ]  # fmt: skip
    return [f"#SBATCH {option}" for option in options]


def _step(index: int, command: str, specs: Sequence[ProcessSpec]) -> list[str]:
    """The shell lines that start one component in the background."""
    spec, line = specs[0], shlex.join(specs[0].command)
    mark = ["ending+=($!)"] if spec.ends else []
    if spec.group is not None:
        return [*_group_step(index, spec, spec.group, then="&"), *mark]
    numbered = f"{line} --replica $SLURM_PROCID" if command in NUMBERED else line
    task = shlex.quote(f"again {numbered}")
    return [f"srun --het-group={index} --kill-on-bad-exit=0 bash -c {task} &", *mark]


def _phase(index: int, spec: ProcessSpec) -> list[str]:
    """The shell lines of a phase before the loop, on one machine of a component or on all of them."""
    if spec.group is not None:
        return _group_step(index, spec, spec.group, then="|| exit $?")
    return [f"again srun --het-group={index} --nodes=1 --ntasks=1 {shlex.join(spec.command)} || exit $?"]


def _group_step(index: int, spec: ProcessSpec, group: GroupMember, *, then: str) -> list[str]:
    """The shell lines of nodes that start and end together."""
    host = f'$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_{index}" | head -n 1)'
    met = " ".join(f"{name}={value}" for name, value in group.rendezvous(host).items() if name != "PET_NODE_RANK")
    task = f"PET_NODE_RANK=$SLURM_PROCID exec {shlex.join(spec.command)}"
    step = f"again srun --het-group={index} --kill-on-bad-exit=1 bash -c {shlex.quote(task)} {then}"
    return [f"export {met}", step]
