"""The auditor of the fault campaign over a run at a URL: ``python -m bench.fleet.audit URL OUT``.

A program of its own, since only processes at home reach the run's store and its ledger.
"""

import json
import sys
from pathlib import Path

from bench.faults.audit import Wrong, audit
from bench.faults.evidence import read_evidence, read_snapshot
from etude.errors import InfrastructureError
from etude.run.working_folder import open_run_folder


def audit_run(url: str) -> dict[str, list[str]]:
    """What is wrong with a run that is over, by goal. Raises :class:`~etude.errors.InfrastructureError`."""
    folder = open_run_folder(url)
    snapshot = read_snapshot(folder)
    if snapshot is None:
        raise InfrastructureError(f"the ledger of {url} cannot be read")
    findings = audit(read_evidence(folder, snapshot))
    return {wrong.value: [each.what for each in findings if each.wrong is wrong] for wrong in Wrong}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(audit_run(sys.argv[1])), encoding="utf-8")
