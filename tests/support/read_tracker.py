"""Print what a tracker has of a run as JSON, read with its own package: run by the Python of .venv-trackers.

    python read_tracker.py KIND FOLDER

{"runs": number, "rewards": [[step, value], …], "seed": text, "hidden": [texts of the recipe's environment],
 "tables": [names], "texts": [texts of rollouts], "files": [names of artefacts]}
"""

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

REWARD = "train/reward_mean"
BLOCK = 32 << 10
"""Bytes of a block of wandb's file."""


def read_wandb(folder: Path) -> dict[str, Any]:
    """The offline files, as `wandb sync` reads them."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    every = [Record.FromString(record) for file in files for record in log_records(file.read_bytes())]
    rows = [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in every
        if record.HasField("history")
    ]
    config = {
        item.key: json.loads(item.value_json)
        for record in every
        if record.HasField("run")
        for item in record.run.config.update
    }
    texts = [
        json.loads(file.read_text())["data"][0][1]
        for file in sorted(folder.glob("wandb/offline-run-*/files/media/table/rollouts/*/*"))
    ]
    artefacts = [record.request.log_artifact.artifact for record in every if record.request.HasField("log_artifact")]
    artefacts += [record.artifact for record in every if record.HasField("artifact")]
    return {
        "runs": len({record.run.run_id for record in every if record.HasField("run")}),
        "rewards": [[row["train/step"], row[REWARD]] for row in rows if REWARD in row],
        "seed": str(config["seed"]),
        "hidden": [str(config["harness"]["environment"])],
        "tables": [name for row in rows for name in row if name.startswith("heldout/tasks/")],
        "texts": texts,
        "files": [entry.path for each in artefacts for entry in each.manifest.contents],
    }


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, behind a header of 7 bytes."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:  # no room for a header: the rest of a block is filled up
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_trackio(folder: Path) -> dict[str, Any]:
    """Its database."""
    with closing(sqlite3.connect(folder / "trackio" / "etude.db")) as database:
        rows = [
            (step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics ORDER BY id")
        ]
        (config,) = [json.loads(text) for (text,) in database.execute("SELECT config FROM configs")]
        runs = database.execute("SELECT count(DISTINCT run_id) FROM metrics").fetchone()[0]
    return {
        "runs": runs,
        "rewards": [[step, row[REWARD]] for step, row in rows if REWARD in row],
        "seed": str(config["seed"]),
        "hidden": [str(config["harness"]["environment"])],
        "tables": [name for _, row in rows for name in row if name.startswith("heldout/tasks/")],
        "texts": [row[name]["_value"][0]["text"] for _, row in rows for name in row if name.startswith("rollouts/")],
        "files": [file.name for file in folder.glob("trackio/artifacts/etude/blobs/*/*/*")],
    }


def read_mlflow(folder: Path) -> dict[str, Any]:
    """Its store, through its client."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/ml.db")
    experiment = client.get_experiment_by_name("etude")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    history = client.get_metric_history(run.info.run_id, REWARD)
    files = {file.relative_to(folder / "mlruns" / experiment.experiment_id / run.info.run_id / "artifacts"): file
             for file in (folder / "mlruns").rglob("artifacts/**/*") if file.is_file()}  # fmt: skip
    return {
        "runs": len(runs),
        "rewards": [[point.step, point.value] for point in history],
        "seed": run.data.params["seed"],
        "hidden": [value for name, value in run.data.params.items() if name.startswith("harness.environment")],
        "tables": [str(name) for name in files if str(name).startswith("heldout/tasks/")],
        "texts": [file.read_text() for name, file in sorted(files.items()) if str(name).startswith("rollouts/")],
        "files": [str(name) for name in files],
    }


if __name__ == "__main__":
    read = {"wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}[sys.argv[1]]
    sys.stdout.write(json.dumps(read(Path(sys.argv[2]))) + "\n")
