"""`etude midtrain|sft|parity|serve|rollouts|train`: one process of a run; `etude run` starts them."""

from typing import Annotated, TypeAlias

import typer

from etude.cli.options import group
from etude.errors import ConfigError
from etude.run.processes import run_process
from etude.run.working_folder import open_run_folder

Run: TypeAlias = Annotated[str, typer.Option("--run", metavar="RUN", help="The run folder, or the URL of a run.")]

app = group()


@app.command()
def midtrain(*, run: Run) -> None:
    """One process of a run: mid-training."""
    run_process("midtrain", open_run_folder(run))


@app.command()
def sft(*, run: Run) -> None:
    """One process of a run: supervised fine-tuning, if the recipe has it."""
    run_process("sft", open_run_folder(run))


@app.command()
def parity(*, run: Run) -> None:
    """One process of a run: engine against trainer, before they run."""
    run_process("parity", open_run_folder(run))


@app.command()
def serve(*, run: Run) -> None:
    """One process of a run: the engine."""
    run_process("serve", open_run_folder(run))


@app.command()
def rollouts(
    *,
    run: Run,
    worker: Annotated[int, typer.Option("--seat", metavar="N", help="A further process beside 0: 1, 2, …")] = 0,
) -> None:
    """One process of a run: rollouts and evaluations."""
    if worker < 0:
        raise ConfigError(f"--seat {worker}: the first process has 0, further ones 1, 2, …")
    run_process("rollouts", open_run_folder(run), worker)


@app.command()
def train(*, run: Run) -> None:
    """One process of a run: the trainer."""
    run_process("train", open_run_folder(run))
