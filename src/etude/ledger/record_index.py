"""Index of searched values that the catalogue lacks: templates of tasks, and rollouts that count as hacks.

Both are only in records. An index reads a record at the first query about it and caches two values from it, so the
first such search of a ledger is slower than later ones, and the processes of a run have no cost. Threads may share one
index for many readers of one ledger. Owns nothing durable.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping

from etude.ledger.database import Database
from etude.ledger.records import is_hacked, template_of
from etude.ledger.states import GroupState

CHUNK_GROUPS = 512
"""Groups whose records are in memory at once."""


class RecordIndex:
    """Cache of two values per record of one ledger; it grows with the queries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates: dict[str, str] = {}  # task id → template
        self._tasks: defaultdict[str, list[str]] = defaultdict(list)  # purpose → task id of each group
        self._hacked: defaultdict[str, set[str]] = defaultdict(set)
        self._settled: defaultdict[str, int] = defaultdict(int)  # purpose → group below which no rollout can end

    def templates(self, db: Database, purpose: str, groups: Collection[int]) -> Mapping[int, str]:
        """Group index → template of its task, for some groups."""
        named = json.dumps([[number] for number in groups])
        sql = (
            "SELECT group_index, task_id, task FROM groups WHERE purpose = ? AND group_index IN"
            " (SELECT CAST(value->>0 AS INTEGER) FROM json_each(?))"
        )
        with self._lock:
            return {index: self._template(task_id, task) for index, task_id, task in db.execute(sql, purpose, named)}

    def groups_like(self, db: Database, purpose: str, text: str) -> list[int]:
        """Indices of a purpose's groups whose task's id or template contains a text, case-insensitively."""
        sql = (
            "SELECT group_index, task_id, task FROM groups WHERE purpose = ? AND group_index >= ? ORDER BY group_index"
            " LIMIT ?"
        )
        lowered = text.lower()
        with self._lock:
            tasks = self._tasks[purpose]
            while rows := db.execute(sql, purpose, len(tasks), CHUNK_GROUPS):
                for index, task_id, task in rows:
                    tasks.extend(
                        [""] * (index - len(tasks))
                    )  # indices have no gaps, but this code does not depend on it
                    self._template(task_id, task)
                    tasks.append(task_id)
            fits = {one: lowered in one.lower() or lowered in words.lower() for one, words in self._templates.items()}
            return [index for index, task_id in enumerate(tasks) if fits.get(task_id, False)]

    def hacked(self, db: Database, purpose: str) -> Collection[str]:
        """Ids of the rollouts of a purpose that count as hacks."""
        with self._lock:
            ((is_open, behind),) = db.execute(
                "SELECT min(CASE WHEN state = ? THEN group_index END), coalesce(max(group_index) + 1, 0) FROM groups"
                " WHERE purpose = ?",
                GroupState.OPEN,
                purpose,
            )
            sql = (
                "SELECT rollout_id, record FROM rollouts WHERE purpose = ? AND group_index >= ? AND group_index < ?"
                " AND status = 'graded'"
            )
            for first in range(self._settled[purpose], behind, CHUNK_GROUPS):
                for rollout_id, record in db.execute(sql, purpose, first, first + CHUNK_GROUPS):
                    if is_hacked(record):
                        self._hacked[purpose].add(rollout_id)
            self._settled[purpose] = behind if is_open is None else is_open
            return frozenset(self._hacked[purpose])

    def _template(self, task_id: str, task: bytes) -> str:
        if task_id not in self._templates:
            self._templates[task_id] = template_of(task)
        return self._templates[task_id]
