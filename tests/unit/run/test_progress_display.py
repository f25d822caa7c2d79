"""Output of processes is shown unchanged."""

import io
from pathlib import Path

from etude.config.recipe import RunConfig
from etude.run.progress_display import ProgressDisplay


def test_a_notice_with_brackets_is_printed_as_it_is(tmp_path: Path) -> None:
    """Regression: gloo quotes a file in brackets, and the supervisor died of it with the run."""
    out, words = io.StringIO(), "train ended with status 1: [/gloo/transport/tcp/pair.cc:537] Connection closed [red]"
    (tmp_path / "events").mkdir()
    with ProgressDisplay(tmp_path / "events", RunConfig(), out) as progress:
        progress.notice(words)
    assert words in out.getvalue()
