"""Hooks of ``mkdocs``: the site takes in documents that lie elsewhere in the repository, and pages read from the code.

The way of a page:

    docs/*.md ─────────────────────────────┐
    README, ARCHITECTURE, recipes/*/README ┼──▶ pages, their links turned to where the site has what they name
    command line, public API, events ──────┤
    bench/results/*.json ──────────────────┘
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from measured_pages import measured_pages
from reference_pages import pages
from site_links import ELSEWHERE, REPOSITORY, pictures_of, turn_links

ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):<code>~?([\w.]+)</code>")
"""A name in a docstring as Sphinx writes it, after Markdown."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in ``docs/``."""
    for document, uri in ELSEWHERE.items():
        text = (REPOSITORY / document).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
        for picture in pictures_of(document, text):
            files.append(File.generated(config, picture, abs_src_path=str(REPOSITORY / picture)))
    for uri, text in {**pages(), **measured_pages()}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page, which are those of the repository."""
    return turn_links(markdown, page.file.src_uri, files.src_uris, config.repo_url)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace a docstring's reference by its short name."""
    return ROLE.sub(lambda match: f"<code>{match[1].rpartition('.')[2]}</code>", html)
