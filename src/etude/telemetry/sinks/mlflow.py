"""A run in MLflow, on a server, in a database or in a folder; of the extra ``mlflow``."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from etude.config.log import MlflowOptions
from etude.telemetry.sinks.sink import SinkContext
from etude.telemetry.sinks.trackers import Cell, TrackerSink, flat

ID = "etude.run"
"""Tag by which a run is found again."""
PARAMS_AT_A_TIME = 100
"""Parameters of one call: its own bound."""
VALUE_CHARACTERS = 500
"""Longest part of a parameter that is sent; every store takes so much."""
AWAY = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "RESOURCE_EXHAUSTED")
"""Codes of errors that may pass: of a server that cannot be reached, too."""
FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that no name may have in it."""


def open_mlflow(options: MlflowOptions, context: SinkContext) -> TrackerSink:
    """Begin a run, or go on with it."""
    return TrackerSink(MlflowTracker(options, context), context)


@final
class MlflowTracker:
    """One run; implements :class:`~etude.telemetry.sinks.trackers.Tracker`."""

    def __init__(self, options: MlflowOptions, context: SinkContext) -> None:
        self._client = MlflowClient(tracking_uri=options.url or None)
        with _reaching():
            self._run = self._find(options.experiment, context)

    def _find(self, name: str, context: SinkContext) -> str:
        """The id of the run, which is made where it is missing."""
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        runs = self._client.search_runs([experiment_id], f"tags.`{ID}` = '{context.id}'", max_results=1)
        if runs:
            self._client.update_run(runs[0].info.run_id, status="RUNNING")
            return str(runs[0].info.run_id)
        run = self._client.create_run(experiment_id, run_name=context.run, tags={ID: context.id})
        params = [Param(_name(key), str(value)[:VALUE_CHARACTERS]) for key, value in flat(context.config).items()]
        for start in range(0, len(params), PARAMS_AT_A_TIME):
            self._client.log_batch(run.info.run_id, params=params[start : start + PARAMS_AT_A_TIME])
        return str(run.info.run_id)

    def log(self, axis: str, step: int, at_s: float, values: Mapping[str, float]) -> None:
        """A point of each metric; repeating one changes nothing, since its time is the event's."""
        metrics = [Metric(_name(name), value, round(1e3 * at_s), step) for name, value in values.items()]
        with _reaching():
            self._client.log_batch(self._run, metrics=metrics)

    def table(self, name: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A file that its page shows as a table."""
        data = json.dumps({"columns": list(columns), "data": [list(row) for row in rows]})
        with _reaching():
            self._client.log_text(self._run, data, f"{_name(name)}-{step}.json")

    def text(self, name: str, step: int, at_s: float, text: str) -> None:
        """A text file."""
        with _reaching():
            self._client.log_text(self._run, text, f"{_name(name)}-{step}.txt")

    def describe(self, facts: Mapping[str, str]) -> None:
        """Tags."""
        with _reaching():
            for name, value in facts.items():
                self._client.set_tag(self._run, _name(name), value)

    def artefact(self, file: Path) -> None:
        """An artefact."""
        with _reaching():
            self._client.log_artifact(self._run, str(file))

    def close(self) -> None:
        """End it; it may be continued."""
        with _reaching():
            self._client.set_terminated(self._run)


@contextmanager
def _reaching() -> Iterator[None]:
    """Raise ``ConnectionError`` for an error that may pass."""
    try:
        yield
    except MlflowException as error:
        if error.error_code in AWAY:
            raise ConnectionError(str(error)) from error
        raise


def _name(name: str) -> str:
    return FORBIDDEN.sub("_", name)
