"""The verifier of exported function tasks (:mod:`etude.taskgen.harbor.export`), as ``/tests/grade.py``.

    python3 grade.py REWARD_FILE        beside it: cases.json with path, function and hidden cases

Each case is asked in a process of its own, which is told the arguments alone; the file with the right answers is gone
before the first one. Needs Python 3 and nothing else.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CALL_TIMEOUT_S = 10.0
CALL = """
import json, runpy, sys
path, name, arguments = json.load(sys.stdin)
print()
print(json.dumps(runpy.run_path(path)[name](*arguments)))
"""
"""The input of the process."""


def main() -> None:
    """Run every case and write the reward."""
    cases = Path(__file__).with_name("cases.json")
    checks = json.loads(cases.read_text(encoding="utf-8"))
    cases.unlink()
    passed = [passes(checks["path"], checks["function"], case) for case in checks["hidden"]]
    reward = {"reward": float(all(passed)), "hidden_passed": sum(passed) / len(passed)}
    Path(sys.argv[1]).write_text(json.dumps(reward), encoding="utf-8")


def passes(path: str, function: str, case: dict[str, Any]) -> bool:
    """Return true if the function gives what the case expects; types count."""
    question = json.dumps([path, function, case["arguments"]])
    try:
        done = subprocess.run(
            [sys.executable, "-c", CALL],
            input=question,
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return False
    return done.returncode == 0 and json.dumps(answer) == json.dumps(case["expected"])


if __name__ == "__main__":
    main()
