"""The auditor of the fault campaign over a run at a URL: ``python -m bench.fleet.audit URL OUT``.

A program of its own, since only processes at home reach the run's store and its ledger.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.faults.audit import Wrong, audit
from bench.faults.evidence import read_evidence, read_snapshot
from bench.fleet.machines import Fleet
from bench.fleet.plan import HOME
from etude.errors import InfrastructureError
from etude.run.working_folder import open_run_folder


def audit_run(url: str) -> dict[str, list[str]]:
    """Violations of a finished run, by goal. Raises :class:`~etude.errors.InfrastructureError`."""
    folder = open_run_folder(url)
    snapshot = read_snapshot(folder)
    if snapshot is None:
        raise InfrastructureError(f"the ledger of {url} cannot be read")
    findings = audit(read_evidence(folder, snapshot))
    return {wrong.value: [each.what for each in findings if each.wrong is wrong] for wrong in Wrong}


def audit_at_home(fleet: Fleet, scratch: Path) -> Mapping[str, Sequence[str]]:
    """Audit a finished run at home, with files in ``scratch``; violations by goal.

    Raises :class:`~etude.errors.InfrastructureError` if it cannot be read.
    """
    out, log = scratch / "audit.json", scratch / "audit.log"
    if fleet.start(HOME, [sys.executable, "-m", "bench.fleet.audit", fleet.url, str(out)], log).wait():
        raise InfrastructureError(f"bench fleet: the run cannot be audited: {log.read_text()[-600:]}")
    findings: Mapping[str, Sequence[str]] = json.loads(out.read_text(encoding="utf-8"))
    return findings


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(audit_run(sys.argv[1])), encoding="utf-8")
