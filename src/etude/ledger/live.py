"""The live sessions of a ledger: groups of one rollout that arrive complete, are admitted once, and can be erased."""

from functools import partial

from etude.ledger import changes, rows
from etude.ledger.changes import ANY_WORKER, LIVE, ErasedSession, LiveAdmission
from etude.ledger.database import Database
from etude.ledger.records import decode_observed, encode_observed
from etude.ledger.states import GroupState
from etude.ledger.stored_turns import StoredTurns
from etude.ledger.transactions import Transactions
from etude.types import NamedChecks, ObservedSession, PayloadRef, Rollout, Split, Task


class LiveGroups:
    """Admission, reads and erasure of live sessions over one connection."""

    def __init__(self, transactions: Transactions, turns: StoredTurns) -> None:
        self._db = transactions
        self._turns = turns

    def admit(self, rollout: Rollout, observed: ObservedSession, *, version: int, kept_below: int) -> LiveAdmission:
        """Offer a live session with its reward: its group is ready at once, or dropped as stale or quarantined.

        One transaction checks that the session is new, compares the usable live groups with ``kept_below``, and writes
        group, rollout and observation. So a session is trained on at most once, even if it is offered repeatedly or a
        process dies. ``version`` is the oldest weight version that sampled a token of it.
        """
        observation = observed.observation
        task = live_task(observed.session_id, observation.template)
        group = changes.new_group(task, 1, version, ANY_WORKER)._replace(weight=observation.weight)
        turns, encoded = self._turns.store(rollout), encode_observed(observed)
        return self._db.write(lambda db: changes.admit_live(db, group, rollout, turns, encoded, kept_below))

    def observed(self, limit: int, *, before_step: int | None = None) -> list[ObservedSession]:
        """The newest live sessions, oldest first; with ``before_step``, only those that earlier steps claimed."""
        records = self._db.read(lambda db: rows.observed_records(db, limit, before_step)) if limit else []
        return [decode_observed(record) for record in records]

    def erase(self, session_id: str, *, is_requested: bool = False) -> ErasedSession:
        """Remove all traces of a live session, including its turns in the payloads, even if processes die; see
        :func:`~etude.ledger.changes.erase_live`, also for ``is_requested``. While a running step uses the session, call
        it again later.

        Routes and masks of its turns are removed at the commit of the step that trains on it, or here.
        """
        payloads, bulky = self._turns.payloads, self._bulky_of(session_id)
        erased = self._db.write(lambda db: changes.erase_live(db, session_id, is_requested=is_requested))
        if payloads is not None and not erased.is_busy:
            payloads.drop(bulky)
            for digest in self._db.read(lambda db: rows.facts_under(db, changes.ERASED_TURNS)):
                payloads.delete(digest, self._turns.named)
                self._db.write(partial(_forget_fact, f"{changes.ERASED_TURNS}{digest}"))
        return erased

    def of_user(self, user: str) -> list[str]:
        """Ids of a user's offered live sessions; ``user`` is a pseudonym."""
        return self._db.read(lambda db: rows.sessions_of_user(db, user))

    def _bulky_of(self, session_id: str) -> list[PayloadRef]:
        """The routes and masks that the turns of a live session refer to."""
        placed = self._db.read(lambda db: rows.live_group(db, session_id))
        if placed is None or placed[0].state is not GroupState.READY:
            return []
        (group,) = self._turns.read_groups([(LIVE, placed[0].group_index)])
        return [turn.payload for rollout in group.rollouts for turn in rollout.turns if turn.payload is not None]


def live_task(session_id: str, template: str) -> Task:
    """The task of a live session: its prompt is in its turns, and no grader runs."""
    checks = NamedChecks(grader=LIVE)
    return Task(
        task_id=session_id, family=LIVE, template=template, split=Split.TRAIN, prompt="", files={}, checks=checks
    )


def _forget_fact(key: str, db: Database) -> None:
    rows.remove_fact(db, key)
