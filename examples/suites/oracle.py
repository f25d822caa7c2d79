"""An oracle behind OpenAI's chat completions: the ceiling of a suite that was built of histories.

    python examples/suites/oracle.py SUITE 8001
    etude suite run SUITE --url http://127.0.0.1:8001/v1 --model oracle --out RESULTS

It knows the true change of every task, from the answers that `etude suite build` and `fetch` leave beside the tasks,
makes it and submits. A task that it does not solve is broken.
"""

import base64
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripted import serve  # type: ignore[import-not-found]  # the file beside this one, as Python finds it

from etude.tasks.repositories.folder import RepositoryTasks
from etude.types import Split

WRITE = """```bash
python3 - <<'END'
import base64, json, pathlib, zlib

def distance(path, text):
    file = pathlib.Path(path)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return len(set(lines).symmetric_difference(text.splitlines()))

answers = json.loads(zlib.decompress(base64.b64decode("{packed}")))
for path, text in min(answers, key=lambda answer: sum(distance(*file) for file in answer.items())).items():
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
END
```"""
"""The command that writes the files of one of some answers: of that which changes least of what is there."""
SUBMIT = "```bash\nsubmit\n```"


class Oracle:
    """The true changes of a suite, by what is asked."""

    def __init__(self, suite: Path) -> None:
        family = RepositoryTasks(suite)
        tasks = [task for split in Split for task in family.tasks(split)]
        self._answers: dict[str, list[Mapping[str, str]]] = {task.prompt: [] for task in tasks}
        for task in tasks:  # releases may each ask for one thing in the same words
            self._answers[task.prompt].append(family.answer(task))

    def reply(self, messages: list[dict[str, Any]]) -> str:
        """The change, then the end."""
        if any(message["role"] == "assistant" for message in messages):
            return SUBMIT
        return WRITE.format(packed=_packed(self._candidates(str(messages[-1]["content"]))))

    def _candidates(self, question: str) -> list[Mapping[str, str]]:
        """Those of the longest prompt in a question: one may begin like another."""
        return self._answers[max((prompt for prompt in self._answers if prompt in question), key=len)]


def _packed(answers: list[Mapping[str, str]]) -> str:
    return base64.b64encode(zlib.compress(json.dumps([dict(files) for files in answers]).encode(), 9)).decode()


if __name__ == "__main__":
    serve(int(sys.argv[2]), Oracle(Path(sys.argv[1])).reply).serve_forever()
