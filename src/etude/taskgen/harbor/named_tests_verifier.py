"""The verifier of exported hidden-test tasks (:mod:`etude.taskgen.harbor.export`), as ``/tests/grade.py``.

    python3 grade.py REWARD_FILE        beside it: checks.json with files, must_pass, about, command and timeout_s

Puts the hidden tests in place and runs each named one in a process of its own; one counts when its process ends well
and its report has tests, all of which passed. Needs Python 3 and what the tests need.
"""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

GOOD, BAD = ("tests",), ("failures", "errors", "skipped")
"""Counts of a report: of all tests, and of those that did not pass."""


def main() -> None:
    """Run every test and write the reward."""
    checks = json.loads(Path(__file__).with_name("checks.json").read_text(encoding="utf-8"))
    for name, text in checks["files"].items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    passed = [passes(test, checks) for test in checks["must_pass"]]
    about = passed[: checks["about"]]
    reward = {"reward": float(all(passed)), "about_passed": sum(about) / len(about)}
    Path(sys.argv[1]).write_text(json.dumps(reward), encoding="utf-8")


def passes(test: str, checks: dict[str, Any]) -> bool:
    """Return true if the test with this node id passes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*checks["command"], test, f"--junitxml={report}"]
        try:
            done = subprocess.run(command, timeout=checks["timeout_s"], check=False)
            suites = list(ET.parse(report).iter("testsuite"))
        except (subprocess.TimeoutExpired, OSError, ET.ParseError):
            return False
    tests, bad = (sum(int(suite.get(key, 0)) for suite in suites for key in keys) for keys in (GOOD, BAD))
    return done.returncode == 0 and tests > 0 and bad == 0


if __name__ == "__main__":
    main()
