"""Progress of long commands where stderr is not a terminal."""

import re

import pytest

from etude.cli import progress as progress_module
from etude.cli.progress import progress_bar


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("suite") as progress:
        for ended in (0, 0, 1, 2, 2):
            progress(ended, 2)
    assert counts(capsys) == ["0 of 2", "2 of 2"]


def test_no_line_says_what_the_one_before_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "LINE_S", 0.0)
    with progress_bar("suite") as progress:
        for ended in (0, 1, 1, 2):
            progress(ended, 9)
    assert counts(capsys) == ["0 of 9", "1 of 9", "2 of 9"]


def counts(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The counts that were printed on stderr."""
    return re.findall(r"suite: (\d+ of \d+)\n", capsys.readouterr().err)
