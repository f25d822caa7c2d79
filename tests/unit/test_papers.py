"""``papers.md`` maps papers to code that exists."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CODE_NAME = re.compile(r"`(src/\S+\.py):(\w+)`")


def test_every_name_in_the_map_exists() -> None:
    named = CODE_NAME.findall((REPOSITORY / "papers.md").read_text(encoding="utf-8"))
    assert named
    for path, name in named:
        body = ast.parse((REPOSITORY / path).read_text(encoding="utf-8")).body
        assert name in {getattr(node, "name", None) for node in body}, f"{path} has no {name}"
