"""`etude midtrain|sft|parity|serve|production|product|rollouts|train|sinks`: each starts one process of a run."""

from typing import Annotated, TypeAlias

import typer

from etude.cli.options import group, process_name
from etude.run.process_name import PRODUCT, TRAINER, ProcessName
from etude.run.processes import run_process
from etude.run.ranks import ONE_NODE, Nodes
from etude.run.working_folder import open_run_folder

Run: TypeAlias = Annotated[str, typer.Option("--run", metavar="RUN", help="The run folder, or the URL of a run.")]
Replica: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=0, max=999_999, help="Number of the replica: 0, 1, 2, …")
]
Region: TypeAlias = Annotated[str, typer.Option(help="Region of the run's fleet in which it runs (default: home).")]
NumNodes: TypeAlias = Annotated[int, typer.Option(min=1, envvar="PET_NNODES", help="Machines that train together.")]
NodeRank: TypeAlias = Annotated[int, typer.Option(min=0, envvar="PET_NODE_RANK", help="Number of this machine.")]
Rendezvous: TypeAlias = Annotated[
    str, typer.Option(metavar="HOST:PORT", envvar="PET_RDZV_ENDPOINT", help="Address of the first machine.")
]

app = group()


@app.command()
def midtrain(*, run: Run, nnodes: NumNodes = 1, node_rank: NodeRank = 0, rdzv_endpoint: Rendezvous = "") -> None:
    """One process of a run: mid-training, or one node of it."""
    _run(ProcessName(command="midtrain"), run, Nodes(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint))


@app.command()
def sft(*, run: Run, nnodes: NumNodes = 1, node_rank: NodeRank = 0, rdzv_endpoint: Rendezvous = "") -> None:
    """One process of a run: supervised fine-tuning, or one node of it."""
    _run(ProcessName(command="sft"), run, Nodes(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint))


@app.command()
def parity(*, run: Run) -> None:
    """One process of a run: compares engine and trainer before they start."""
    _run(ProcessName(command="parity"), run)


@app.command()
def serve(*, run: Run, replica: Replica = 0, region: Region = "") -> None:
    """One process of a run: an engine."""
    _run(process_name("serve", replica, region), run)


@app.command()
def production(*, run: Run, replica: Replica = 0) -> None:
    """One process of a run: an engine for users. It serves released versions and those on trial."""
    _run(ProcessName(command="production", replica=replica), run)


@app.command()
def product(*, run: Run) -> None:
    """One process of a run: the gateway for users."""
    _run(PRODUCT, run)


@app.command()
def sinks(*, run: Run) -> None:
    """Send a run's metrics to trackers and evaluate its alerts.

    A run starts this process itself. Start it by hand to send what was not sent before.
    """
    from etude.run.sinks import run_sinks

    run_sinks(open_run_folder(run))


@app.command()
def rollouts(*, run: Run, replica: Replica = 0) -> None:
    """One process of a run: rollouts; replica 0 also runs evaluations."""
    _run(ProcessName(command="rollouts", replica=replica), run)


@app.command()
def train(*, run: Run, nnodes: NumNodes = 1, node_rank: NodeRank = 0, rdzv_endpoint: Rendezvous = "") -> None:
    """One process of a run: the trainer, or one node of it."""
    _run(TRAINER, run, Nodes(nnodes=nnodes, node_rank=node_rank, rdzv_endpoint=rdzv_endpoint))


def _run(name: ProcessName, run: str, nodes: Nodes = ONE_NODE) -> None:
    run_process(name, open_run_folder(run, process=name), nodes)
