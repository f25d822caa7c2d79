"""A run started from Python: its committed steps, its end and its errors.

    with etude.train(recipe) as training:            a folder, and `etude run --resume FOLDER` as a process
        for step in training:                        waits for the next committed step, or for the end
            print(step.step, step.reward)

A run consists of processes that share a folder. This module starts their supervisor and reads the folder. Leaving the
context for any reason stops them all, and so does the end of the thread that entered it.
``etude.train(etude.open(folder))`` continues the run.
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from etude.api.recipe import Recipe, as_recipe
from etude.api.records import StepRecord
from etude.api.run import Run, committed_steps
from etude.closing import Closing
from etude.errors import EtudeError, ExitCode, InfrastructureError, RunFolderError
from etude.ledger.archive import Archive
from etude.run.folder import RunFolder, remove_unbegun
from etude.run.local import create_default, default_out
from etude.run.parent import SUPERVISOR_VARIABLE
from etude.run.preflight import check_ready
from etude.run.serving import STOP_S

POLL_S = 0.1
"""Polling interval for new steps."""
REPORT_S = 20.0
"""Time limit for the supervisor's report, once its processes have stopped."""
STOPPED = (ExitCode.INTERRUPTED, 128 + signal.SIGTERM)
"""Exit codes of a supervisor after a request to stop."""


class Training(Closing):
    """A run in progress: iterate over it for its steps; leaving its context stops it. Made by :func:`train`."""

    def __init__(self, folder: RunFolder, *, is_new: bool = False) -> None:
        self.run = Run(folder.path)
        """The run, readable at any time, also after its end."""
        self._folder = folder
        self._is_new = is_new
        self._ledger = folder.config().ledger
        self._steps_done = self._committed()
        self._log = folder.logs / "supervisor.log"
        self._printed = self._log.stat().st_size if self._log.exists() else 0
        command = [sys.executable, "-m", "etude", "run", "--resume", str(folder.path)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the other one
            )

    def __iter__(self) -> Iterator[StepRecord]:
        """Each step once it is committed, from the first step of this start; ends with the run. Raises
        :class:`~etude.errors.EtudeError` with the cause if the run fails.
        """
        while True:
            status = self._process.poll()  # before the steps are counted, so that they include its last one
            committed = self._committed()
            for step in committed_steps(self._folder, committed, after=self._steps_done):
                self._steps_done = step.step
                yield step
            if status is not None:
                return self._check(status)
            time.sleep(POLL_S)

    def wait(self) -> Run:
        """Wait for its end; returns the run. Raises as iterating does."""
        for _ in self:
            pass
        return self.run

    def close(self) -> None:
        """Stop the run with all its processes, if it is in progress. ``etude.train(training.run)`` continues it."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S + REPORT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its processes die with it
            self._process.wait()

    def _committed(self) -> int:
        try:
            with Archive.open(self._folder.ledger, self._ledger) as archive:
                return archive.steps_done()
        except RunFolderError:  # there is no ledger yet
            return 0

    def _check(self, status: int) -> None:
        message = self._last_message()
        match status:
            case ExitCode.DONE:
                return
            case ExitCode.NOTHING_LEARNT:
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            case ExitCode.USER_ERROR:
                if self._is_new:
                    remove_unbegun(self._folder)
                raise EtudeError(message)
            case _ if status in STOPPED:
                raise InfrastructureError(f"the run {self._folder.path} was stopped by a signal; it can be resumed")
            case _:
                raise InfrastructureError(f"{message}; see {self._log}")

    def _last_message(self) -> str:
        printed = self._log.read_bytes()[self._printed :].decode("utf-8", errors="replace").splitlines()
        own = [line.removeprefix("etude: ") for line in printed if line.startswith("etude: ")]
        return (own or printed or ["the run ended without a message"])[-1]


def train(recipe: Recipe | Run | Path | str, *, out: Path | str | None = None) -> Training:
    """Start a run of a recipe in a new folder ``out`` (default: ``runs/NAME-sSEED``), or continue a run.

    Returns a context manager whose iterator gives the steps. Raises :class:`~etude.errors.UserError` for a recipe that
    this machine cannot run, before the folder is created, and for a folder in use; issues a ``UserWarning`` for lesser
    problems.
    """
    if isinstance(recipe, Run):
        if out is not None:
            raise RunFolderError(f"out={str(out)!r} would have no effect: the run continues in {recipe.path}")
        return Training(RunFolder.open(recipe.path))
    config = as_recipe(recipe).config
    place = default_out(config) if out is None else Path(out)
    for finding in check_ready(config, place):
        if not finding.works:
            warnings.warn(f"{finding.name}: {finding.words}", UserWarning, stacklevel=2)
    return Training(create_default(config) if out is None else RunFolder.create(place, config), is_new=True)
