"""A run of `etude live` as the driver of a day needs it: started, watched, its releases, its product."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final

from etude.errors import EtudeError
from etude.releases.states import ReleaseState
from etude.releases.store import RecordedMove
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.process_name import PRODUCT
from etude.run.stores import open_releases

POLL_S = 1.0
PROPOSED_S = 300.0
"""Longest time for the trainer to make a version of a proposed checkpoint."""
STOP_S = 60.0


@final
class LiveRun:
    """One run folder, and `etude live` on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = RunFolder(path)
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def started(self, recipe: Path, seed: int, settings: Sequence[str]) -> Iterator[None]:
        """Begin the run, or go on with it, and stop it at the end."""
        command = [sys.executable, "-m", "etude", "live"]
        if self._folder.config_file.exists():
            command += ["--resume", str(self.path)]
        else:
            command += [str(recipe), "--out", str(self.path), "--seed", str(seed)]
            command += [word for setting in settings for word in ("--set", setting)]
        self._process = subprocess.Popen(command, start_new_session=True)
        try:
            yield
        finally:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                try:
                    self._process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()

    def check(self) -> None:
        """Raise ``SystemExit`` if the run failed; one that has taken its steps serves no more, and is done."""
        assert self._process is not None, "it was started"
        status = self._process.poll()
        if status is not None:
            raise SystemExit(f"day: etude live ended with status {status}: its output is above")

    def wait_until_live(self, timeout_s: float) -> None:
        """Wait until a version is released. Raises ``SystemExit`` where none is in time."""
        if not self.wait_for(lambda: self.released_count() > 0, timeout_s):
            raise SystemExit(f"day: nothing was released within {timeout_s:g} s: see etude release status {self.path}")

    def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something holds, at most ``timeout_s``; whether it does."""
        deadline_s = time.monotonic() + timeout_s
        while not (is_so := holds()) and time.monotonic() < deadline_s:
            self.check()
            time.sleep(POLL_S)
        return is_so

    @property
    def url(self) -> str:
        """URL of the product gateway."""
        return self._folder.endpoints.url(PRODUCT)

    @property
    def key(self) -> str:
        """The product's key."""
        return self._folder.key(KeyRole.PRODUCT)

    def moves(self) -> tuple[RecordedMove, ...]:
        """All moves of releases, in order."""
        if not self._folder.config_file.exists():
            return ()
        try:
            with open_releases(self._folder) as store:
                return store.moves()
        except EtudeError:
            return ()  # there is no ledger yet

    def states(self) -> Mapping[int, str]:
        """Version → its state."""
        return {move.version: move.to_state for move in self.moves()}

    def released_count(self) -> int:
        """Number of weights that were ever released; a copy that was loaded again is none of its own."""
        ever = {move.version for move in self.moves() if move.to_state == ReleaseState.RELEASED}
        if not ever:
            return 0
        with open_releases(self._folder) as store:
            return len({release.digest for release in store.releases() if release.version in ever})

    def released_version(self) -> int:
        """The version that users have."""
        return next(version for version, state in self.states().items() if state == ReleaseState.RELEASED)

    def propose(self, checkpoint: Path) -> int:
        """Propose a checkpoint; returns the version that it became. Raises ``SystemExit`` if it becomes none."""
        with open_releases(self._folder) as store:
            earlier = {one.version for one in store.releases() if one.loaded}
        command = [sys.executable, "-m", "etude", "release", "propose", str(self.path), str(checkpoint)]
        subprocess.run(command, check=True)
        matches: list[int] = []

        def is_there() -> bool:
            with open_releases(self._folder) as store:
                loaded = [one for one in store.releases() if one.loaded]
            matches[:] = [one.version for one in loaded if one.version not in earlier]
            return bool(matches)

        if not self.wait_for(is_there, PROPOSED_S):
            raise SystemExit(f"day: {checkpoint} was proposed and became no version within {PROPOSED_S:g} s")
        return matches[0]
