"""The batch file of a run is a program of bash; it is run here, with stand-ins for srun and scontrol."""

import os
import shlex
import subprocess
from pathlib import Path

from etude.config.loading import load_fleet
from etude.config.recipe import RunConfig
from etude.config.training import ParallelConfig
from etude.run.fleet_plan import plan_loop, plan_phases
from etude.run.launchers.slurm import render_sbatch

EXAMPLE = Path(__file__).parents[4] / "examples" / "fleet" / "slurm.toml"
SRUN = """#!/bin/bash
# One task of each step: srun OPTIONS... COMMAND...
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=1 exec "$@"
"""
ETUDE = """#!/bin/bash
echo "$* $PET_NNODES $PET_NODE_RANK $PET_RDZV_ENDPOINT" >> "$LOG"
case $1 in serve|gateway) sleep 3;; train) test -e "$LOG.died" || { touch "$LOG.died"; exit 1; };; esac
"""


def script() -> str:
    fleet = load_fleet(EXAMPLE)
    config = RunConfig(parallel=ParallelConfig(dp=8 * fleet.trainer.nodes))
    run = fleet.home_region.store
    files = render_sbatch(plan_phases(config, fleet, run), plan_loop(config, fleet, run), fleet, "fix-7")
    assert list(files) == ["fix-7.sbatch"]
    return files["fix-7.sbatch"]


def test_each_command_is_a_component_with_what_it_needs() -> None:
    directives = [line.removeprefix("#SBATCH ") for line in script().splitlines() if line.startswith("#SBATCH")]
    assert directives[:2] == ["--job-name=fix-7", "--time=48:00:00"]
    components = [part.split() for part in " ".join(directives[2:]).split("hetjob")]
    assert components == [
        ["--partition=gpu", "--ntasks=8", "--cpus-per-task=8", "--gpus-per-task=1", "--mem-per-cpu=8192M"],
        ["--partition=gpu", "--ntasks=2", "--cpus-per-task=1"],
        ["--partition=gpu", "--ntasks=2", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=64",
         "--gpus-per-task=8", "--mem-per-cpu=8192M"],
        ["--partition=gpu", "--ntasks=2", "--cpus-per-task=1"],
    ]  # fmt: skip


def test_the_script_runs_phases_first_restarts_what_dies_and_ends_with_trainer_and_rollouts(tmp_path: Path) -> None:
    programs = {"srun": SRUN, "etude": ETUDE, "scontrol": "#!/bin/bash\necho node-a; echo node-b\n", "sleep": ""}
    for name, text in programs.items():
        (tmp_path / name).write_text(text or "#!/bin/bash\n[ $1 = 3 ] && exec /bin/sleep 3; exec /bin/sleep 0.1\n")
        (tmp_path / name).chmod(0o700)
    log = tmp_path / "log"
    text = script().replace("source /opt/etude/bin/activate", "")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "SLURM_JOB_NODELIST_HET_GROUP_2": "x"}
    with (tmp_path / "out").open("wb") as out:  # no pipe, which the stand-ins that are killed leave open
        done = subprocess.run(["bash", "-c", text], env=environment, timeout=60, stdout=out, stderr=out, check=False)
    assert done.returncode == 0, (tmp_path / "out").read_text()
    lines = [line.strip() for line in log.read_text().splitlines()]
    run = shlex.quote("s3://acme-lab/runs/fix-7")
    assert lines[0] == f"midtrain --run {run} 2 1 node-a:29400"
    assert lines[1].startswith(f"parity --run {run}")
    assert lines.count(f"train --run {run} 2 1 node-a:29400") == 2, "once more, as it died"
    for command in ("serve", "gateway", "rollouts"):
        assert any(line.startswith(f"{command} --run {run} --replica 1") for line in lines), command
