"""Harbor task folders for tests: one that is whole, to be broken in one place at a time."""

from collections.abc import Mapping
from pathlib import Path

WHOLE: Mapping[str, str] = {
    "task.toml": (
        "[environment]\nmemory_mb = 256\nstorage_mb = 64\n[verifier]\ntimeout_sec = 20\nenv = { MODE = 'strict' }\n"
    ),
    "instruction.md": "<!-- canary 1234 -->\n\nWrite yes into answer.txt.\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nENV TONGUE=en\nCOPY start/ .\n",
    "environment/start/notes/a.txt": "a note\n",
    "tests/test.sh": "#!/bin/bash\npython3 /tests/grade.py\n",
    "tests/grade.py": (
        "from pathlib import Path\n"
        "answer = Path('answer.txt')\n"
        "right = answer.is_file() and answer.read_text().strip() == 'yes'\n"
        "Path('/logs/verifier/reward.txt').write_text(str(int(right)))\n"
    ),
    "solution/solve.sh": "#!/bin/bash\necho yes > answer.txt\n",
}
"""A task that can be used as it is and needs no image."""


def write_folder(folder: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """Write a whole task but for ``changes``: another text for a file, or ``None`` for no such file."""
    for path, text in {**WHOLE, **(changes or {})}.items():
        if text is not None:
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return folder
