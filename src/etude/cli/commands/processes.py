"""`etude midtrain|sft|parity|serve|rollouts|train`: one process of a run; `etude run` starts them."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from etude.cli.options import group
from etude.errors import ConfigError
from etude.run.folder import RunFolder
from etude.run.processes import Nodes, run_process

Run: TypeAlias = Annotated[Path, typer.Option("--run", metavar="RUN", help="The run folder.")]

app = group()


@app.command()
def midtrain(*, run: Run) -> None:
    """One process of a run: mid-training."""
    run_process("midtrain", RunFolder.open(run))


@app.command()
def sft(*, run: Run) -> None:
    """One process of a run: supervised fine-tuning, if the recipe has it."""
    run_process("sft", RunFolder.open(run))


@app.command()
def parity(*, run: Run) -> None:
    """One process of a run: engine against trainer, before they run."""
    run_process("parity", RunFolder.open(run))


@app.command()
def serve(*, run: Run) -> None:
    """One process of a run: the engine."""
    run_process("serve", RunFolder.open(run))


@app.command()
def rollouts(
    *,
    run: Run,
    worker: Annotated[int, typer.Option("--seat", metavar="N", help="A further process beside 0: 1, 2, …")] = 0,
) -> None:
    """One process of a run: rollouts and evaluations."""
    if worker < 0:
        raise ConfigError(f"--seat {worker}: the first process has 0, further ones 1, 2, …")
    run_process("rollouts", RunFolder.open(run), worker)


@app.command()
def train(
    *,
    run: Run,
    nnodes: Annotated[int, typer.Option(min=1, envvar="PET_NNODES", help="Machines that train together.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, envvar="PET_NODE_RANK", help="Number of this one.")] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="PET_RDZV_ENDPOINT", help="Where the first one is met.")
    ] = "",
) -> None:
    """One process of a run: the trainer, or one node of it."""
    nodes = Nodes(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint)
    run_process("train", RunFolder.open(run), nodes=nodes)
