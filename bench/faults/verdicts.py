"""The verdicts of a campaign's runs on disk, so that one that was stopped goes on where it was.

campaign.json     what the campaign is: another one does not go on here
faults.jsonl      each fault that was got over, as it happens; also those of runs that were stopped, and began again
run-0003.json     the verdict of a run that is over
run-0003/         the run itself, where something was wrong in it
"""

import fcntl
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from bench.faults.audit import Finding, Wrong
from bench.faults.chaos_run import FaultRecord, RunLog
from etude.closing import Closing
from etude.errors import DamagedError, UserError
from etude.run.folder import RunFolder
from etude.types import Json

CAMPAIGN, FAULTS, LOCK = "campaign.json", "faults.jsonl", ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """Recovery from one fault."""

    kind: str
    how: str
    """Empty where it was not."""
    seconds: float | None
    """From its end to the next thing that the run did."""

    @classmethod
    def of(cls, record: FaultRecord) -> Self:
        """Make it from the record of a fault."""
        over = record.recovered_s is not None and record.healed_s is not None
        seconds = record.recovered_s - record.healed_s if over else None  # type: ignore[operator]  # not None, if over
        return cls(kind=record.fault.kind, how=record.how, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one run."""

    run: int
    planned: int
    finished: bool
    resumes: int
    seconds: float
    faults: tuple[Got, ...]
    findings: tuple[Finding, ...]
    endings: tuple[str, ...]
    """The errors with which it ended before it was done, and was resumed."""
    commit: str = ""
    """Commit of the sources that it ran."""

    @classmethod
    def of(cls, run: int, planned: int, run_log: RunLog, commit: str = "") -> Self:
        """The verdict on a chaos run that is over."""
        return cls(
            run=run,
            commit=commit,
            planned=planned,
            finished=run_log.finished,
            resumes=run_log.resumes,
            seconds=run_log.seconds,
            faults=tuple(map(Got.of, run_log.records)),
            findings=tuple(run_log.findings),
            endings=tuple(run_log.endings),
        )

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse the text of :meth:`dump`. Raises ``ValueError`` for anything else."""
        fields: dict[str, Any] = orjson.loads(data)
        try:
            fields["faults"] = tuple(Got(**got) for got in fields["faults"])
            fields["findings"] = tuple(Finding(Wrong(result["wrong"]), result["what"]) for result in fields["findings"])
            fields["endings"] = tuple(fields["endings"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no verdict: {error}") from error

    def dump(self) -> bytes:
        """Write it as JSON."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2) + b"\n"


class VerdictStore(Closing):
    """Verdicts in a folder, which is one process's until it is closed."""

    def __init__(self, folder: Path, campaign: Mapping[str, Json]) -> None:
        """Raises :class:`~etude.errors.UserError` when the folder holds another campaign than ``campaign``."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        file, described = folder / CAMPAIGN, orjson.dumps(dict(campaign), option=orjson.OPT_SORT_KEYS) + b"\n"
        if file.exists() and file.read_bytes() != described:
            raise UserError(
                f"{folder} holds another campaign, {file.read_text(encoding='utf-8').strip()}: choose another --out"
            )
        _write(file, described)
        self._lock = (folder / LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"{folder}: another process goes on with this campaign: wait for it, or end it") from None

    def close(self) -> None:
        """Release the campaign, so that another process can continue it."""
        self._lock.close()

    def find(self, run: int) -> Verdict | None:
        """The verdict on a run, if it is over. Raises :class:`~etude.errors.DamagedError`."""
        file = self._folder / f"run-{run:04d}.json"
        if not file.exists():
            return None
        try:
            return Verdict.parse(file.read_bytes())
        except ValueError as error:
            raise DamagedError(f"{file} cannot be read: {error}; remove it to repeat that run") from error

    def note(self, run: int, record: FaultRecord) -> None:
        """Write down a fault that was got over."""
        line = orjson.dumps({"run": run, "fault": record.fault.number, **asdict(Got.of(record))})
        with (self._folder / FAULTS).open("ab") as file:
            file.write(line + b"\n")

    @property
    def noted(self) -> int:
        """Faults that were got over so far, in runs that are over and in those that were stopped."""
        file = self._folder / FAULTS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def put(self, verdict: Verdict, folder: RunFolder, logs: Sequence[Path]) -> None:
        """Keep a verdict, and the run, too, where something was wrong in it."""
        if verdict.findings:
            place = self._folder / f"run-{verdict.run:04d}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder.path, place)
            for log in logs:
                shutil.copy(log, place / "logs")
        _write(self._folder / f"run-{verdict.run:04d}.json", verdict.dump())


def _write(file: Path, data: bytes) -> None:
    """A whole file or none."""
    partial = file.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(file)
