"""Links of the repository's documents, as the pages of the site have them.

For one:

    README.md: [recipes](recipes/quickstart/README.md) ──▶ index.md: [recipes](recipes/quickstart.md)
"""

import posixpath
import re
from collections.abc import Container
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = "docs/"
ELSEWHERE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "papers.md": "papers.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "suites/pypi/README.md": "suites-pypi.md",
    **{
        path.relative_to(REPOSITORY).as_posix(): f"recipes/{path.parent.name}.md"
        for path in sorted(REPOSITORY.glob("recipes/*/README.md"))
    },
}
"""Document that does not lie in ``docs/`` → its page."""
FOLDERS = {"bench/results": "measured/index.md"}
"""Folder that has a page of its own on the site."""
PICTURES = frozenset({".svg", ".png", ".gif"})
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:)([^)#\s]*)(#[^)\s]+)?\)")
CODE = re.compile(r"^ *```.*?^ *```[^\n]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def pictures_of(document: str, text: str) -> list[str]:
    """Paths of the pictures outside of ``docs/`` that a document shows."""
    targets = (target for _, _, target, _ in LINK.findall(CODE.sub("", text)))
    paths = (_path(document, target) for target in targets)
    return [path for path in paths if Path(path).suffix in PICTURES and not path.startswith(DOCS)]


def turn_links(text: str, uri: str, pages: Container[str], repo_url: str | None) -> str:
    """``text`` of the page ``uri``, whose links are the repository's, with links as ``pages`` have them.

    A file that the site does not have is linked below ``repo_url``, and is plain text without one.
    """
    document = {page: path for path, page in ELSEWHERE.items()}.get(uri, DOCS + uri)

    def turn(match: re.Match[str]) -> str:
        mark, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target:
            return match[0]
        path = _path(document, target)
        there = {**ELSEWHERE, **FOLDERS}.get(path, path.removeprefix(DOCS))
        if there in pages:
            return f"{mark}[{label}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor})"
        return f"[{label}]({repo_url.rstrip('/')}/blob/main/{path}{anchor})" if repo_url else label

    parts, since = list[str](), 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(turn, text[since : code.start()]), code[0]]
        since = code.end()
    return "".join([*parts, LINK.sub(turn, text[since:])])


def _path(document: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), target))
