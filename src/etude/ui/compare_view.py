"""The tab *Compare*: two versions or runs, task by task."""

from collections.abc import Mapping

from etude.types import Json
from etude.ui.runs import RunList


def compare(runs: RunList, options: Mapping[str, str]) -> Json:
    """The comparison of ``a`` and ``b``, each RUN or RUN:VERSION."""
    return {"tasks": []}
