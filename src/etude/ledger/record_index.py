"""Index of what people search for and the catalogue has not: templates of tasks, and rollouts that count as hacks.

Both stand in records alone. An index reads a record the first time that it is asked about it and remembers two words of
it, so the first such search of a ledger takes longer than those after it, and the processes of a run pay nothing. One
index may serve many readers of one ledger, in threads. Owns nothing durable.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping

from etude.ledger.database import Database
from etude.ledger.records import is_hacked, template_of
from etude.ledger.states import GroupState

CHUNK_TASKS = 256
CHUNK_GROUPS = 512
"""Records that are in memory at once: of so many tasks, or of so many groups."""


class RecordIndex:
    """What was learnt from the records of one ledger; it grows with what is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates: dict[tuple[str, str], str] = {}  # purpose and task
        self._hacked: defaultdict[str, set[str]] = defaultdict(set)
        self._settled: defaultdict[str, int] = defaultdict(int)  # groups of a purpose below which no rollout can end

    def templates(self, db: Database, purpose: str, task_ids: Collection[str]) -> Mapping[str, str]:
        """Template of each of some tasks of a purpose, by id; a task that is not there is left out."""
        with self._lock:
            unread = [task_id for task_id in dict.fromkeys(task_ids) if (purpose, task_id) not in self._templates]
            for first in range(0, len(unread), CHUNK_TASKS):
                named = json.dumps([[task_id] for task_id in unread[first : first + CHUNK_TASKS]])
                sql = (
                    "SELECT task_id, task FROM groups WHERE purpose = ? AND group_index IN (SELECT min(group_index)"
                    " FROM groups WHERE purpose = ? AND task_id IN (SELECT value->>0 FROM json_each(?))"
                    " GROUP BY task_id)"
                )
                for task_id, task in db.execute(sql, purpose, purpose, named):
                    self._templates[purpose, task_id] = template_of(task)
            places = {task_id: (purpose, task_id) for task_id in task_ids}
            return {task_id: self._templates[place] for task_id, place in places.items() if place in self._templates}

    def tasks_like(self, db: Database, purpose: str, text: str) -> list[str]:
        """Ids of the tasks of a purpose whose id or template contains a text, in small or large letters."""
        task_ids = [one for (one,) in db.execute("SELECT DISTINCT task_id FROM groups WHERE purpose = ?", purpose)]
        templates, wanted = self.templates(db, purpose, task_ids), text.lower()
        return [one for one in task_ids if wanted in one.lower() or wanted in templates.get(one, "").lower()]

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
                "SELECT r.rollout_id, r.record FROM catalogue c JOIN rollouts r ON r.rollout_id = c.rollout_id"
                " WHERE c.purpose = ? AND c.group_index >= ? AND c.group_index < ? AND c.disposition IS NOT NULL"
            )
            for first in range(self._settled[purpose], behind, CHUNK_GROUPS):
                for rollout_id, record in db.execute(sql, purpose, first, first + CHUNK_GROUPS):
                    if is_hacked(record):
                        self._hacked[purpose].add(rollout_id)
            self._settled[purpose] = behind if is_open is None else is_open
            return frozenset(self._hacked[purpose])
