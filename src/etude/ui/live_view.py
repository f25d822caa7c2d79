"""The tab *Live*: users' sessions with feedback and reward, releases with their evidence, rollback.

    GET /live                         counts, formula, newest sessions, suspects, releases, the running test of two arms
    GET /live/sessions/{session}      one session: each part of its reward, as answered or estimated
    POST /live/rollback               {"version": 12, "by": "jane"} with the run's release key in X-Etude-Key

Read-only except for a person's rollback request, which the process ``release`` answers, like that of `etude release
rollback`. The key is compared and not stored.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict

from etude.clock import unix_s
from etude.config.feedback import SignalPart
from etude.errors import RunFolderError, UserError
from etude.feedback.archive import SessionArchive, SessionRecord
from etude.key_comparison import same_key
from etude.ledger.archive import Archive
from etude.ledger.changes import LIVE
from etude.releases.states import former_release, live_release, pending_release, release_to_take_back
from etude.releases.store import ReleaseRequest, ReleaseStore, RequestKind, finite
from etude.routing_table import RoutingTable
from etude.run.keys import KeyRole
from etude.run.routing_tables import RoutingTables
from etude.run.stores import open_archive, open_releases, open_sessions
from etude.types import Json, ObservedSession, Rollout
from etude.ui.arm_test import arm_test
from etude.ui.routes import Forbidden, NotFound, Routes, RunQuery
from etude.ui.runs import RunReader

MOST_ROWS = 200
SHORT = 10
"""Digits of a pseudonym that are shown: enough to tell users apart."""
LONGEST_NAME = 100
SUSPECTED = "quarantined: user."
"""Beginning of the reason for which a group of a suspected user is dropped; the rule follows."""


def live(query: RunQuery) -> Json:
    """The whole tab except the details of single sessions."""
    limit, offset = query.number("limit", 50), query.number("offset", 0)
    if not 1 <= limit <= MOST_ROWS or offset < 0:
        raise UserError(f"limit={limit}, offset={offset}: expected 1 to {MOST_ROWS}, and 0 or more")
    run = query.run
    with ExitStack() as stack:
        archive = stack.enter_context(closing(open_archive(run.folder)))
        feedback, why_no_sessions = _feedback(run, stack)
        releases, why_no_releases = _releases(run, stack)
        return {
            "now_s": unix_s(),
            "sessions": {"problem": why_no_sessions}
            if feedback is None
            else _sessions(feedback, archive, limit, offset),
            "formula": [_part(part) for part in run.config.feedback.reward.parts],
            "window_s": run.config.feedback.window_s,
            "poisoning": _poisoning(run, archive, feedback),
            "releases": {"problem": why_no_releases} if releases is None else _release_facts(run, releases),
            "test": None if releases is None else arm_test(run.config.release, releases, feedback, _table(run)),
        }


def session(query: RunQuery) -> Json:
    """One session, with each part of its reward."""
    session_id = query.names["session"]
    with ExitStack() as stack:
        archive = stack.enter_context(closing(open_archive(query.run.folder)))
        feedback, _ = _feedback(query.run, stack)
        record = None if feedback is None else feedback.session(session_id)
        observed = archive.observed([session_id]).get(session_id)
        if record is None and observed is None:
            raise NotFound(f"there is no session {session_id!r}: it may have been deleted")
        rollout = _rollout(archive, session_id)
        return {
            "session": None if record is None else _row(record, observed),
            "parts": [_worth(part, observed, rollout) for part in query.run.config.feedback.reward.parts],
            "bounded": None if rollout is None else rollout.reward_parts.get("bounded"),
            "reward": None if observed is None else observed.reward,
            "turn_rewards": [] if observed is None else list(observed.turn_rewards),
            "rollout": None if rollout is None else rollout.rollout_id,
            "dropped": archive.drop_reason(LIVE, session_id),
        }


def rollback(query: RunQuery) -> Json:
    """Request a rollback of the given version, which must be the one that a rollback would take back now.

    Raises :class:`~etude.ui.routes.Forbidden` without the run's release key, and :class:`~etude.errors.UserError` for
    an invalid body, for another version, or if there is no version to take back or none to return to.
    """
    run, fix = query.run, f"`etude keys derive {query.run.folder.name} release` prints it"
    if not query.key:
        raise Forbidden(f"a rollback needs the release key of this run: {fix}")
    if not same_key(query.key.strip(), run.folder.key(KeyRole.RELEASE)):
        raise Forbidden(f"that is not the release key of this run: {fix}")
    version, by = _request(query.body)
    with closing(open_releases(run.folder)) as store:
        releases = store.releases()
        due = release_to_take_back(releases)
        if due is None:
            raise UserError("no version has been released, and none is on its way: there is nothing to take back")
        if due.version != version:
            raise UserError(f"version {version} is not what would be taken back now, {due.version} is: look again")
        if due == live_release(releases) and former_release(releases) is None:
            raise UserError(f"version {version} is the first release: there is no earlier one to go back to")
        number = store.ask(ReleaseRequest(kind=RequestKind.ROLLBACK, by=by, at=unix_s(), version=version))
    return {"request": number, "version": version, "by": by}


def _request(body: Json) -> tuple[int, str]:
    """The version and the name in a request's body."""
    version = body.get("version") if isinstance(body, dict) else None
    by = body.get("by") if isinstance(body, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise UserError(f"version={version!r}: name the version to take back, as a whole number")
    if not isinstance(by, str) or not by.strip() or len(by) > LONGEST_NAME or not by.isprintable():
        raise UserError(f"by: say who asks, in 1 to {LONGEST_NAME} printable characters; it stands in the history")
    return version, by.strip()


def _feedback(run: RunReader, stack: ExitStack) -> tuple[SessionArchive | None, str]:
    try:
        return stack.enter_context(closing(open_sessions(run.folder))), ""
    except UserError as error:
        return None, str(error)


def _releases(run: RunReader, stack: ExitStack) -> tuple[ReleaseStore | None, str]:
    if not run.config.release.enabled:
        return None, "this run releases nothing: its recipe has release.every_steps = 0"
    try:
        return stack.enter_context(closing(open_releases(run.folder, read_only=True))), ""
    except RunFolderError as error:
        return None, str(error)


def _sessions(feedback: SessionArchive, archive: Archive, limit: int, offset: int) -> Json:
    states, newest = feedback.states(), feedback.newest(limit, offset)
    observed = archive.observed([record.session.session_id for record in newest])
    return {
        "problem": "",
        "states": {state: states.get(state, 0) for state in ("open", "ended", "closed", "taken")},
        "counts": {**feedback.counts()},
        "signals": [asdict(count) for count in feedback.signal_counts()],
        "total": sum(states.values()),
        "offset": offset,
        "rows": [_row(record, observed.get(record.session.session_id)) for record in newest],
    }


def _row(record: SessionRecord, observed: ObservedSession | None) -> dict[str, Json]:
    session = record.session
    return {
        "id": session.session_id,
        "user": session.user[:SHORT],
        "template": session.template,
        "region": session.region,
        "arm": session.arm,
        "turns": session.turns,
        "versions": [session.first_version, session.last_version],
        "opened_s": session.opened_at,
        "ended_s": session.ended_at,
        "state": record.state,
        "result": record.result,
        "signals": [
            {"kind": str(signal.kind), "value": signal.value, "turn": signal.turn, "late": is_late,
             "received_s": signal.received_at}
            for signal, is_late in record.signals
        ],
        "reward": None if observed is None else observed.reward + sum(observed.turn_rewards),
        "propensity": None if observed is None else observed.observation.propensity,
        "weight": None if observed is None else observed.observation.weight,
        "answered": None if observed is None else _answered(observed),
    }  # fmt: skip


def _answered(observed: ObservedSession) -> float | None:
    """Share of the reward formula's signals that users answered; ``None`` if it expects none."""
    answers = [value for values in observed.answers.values() for value in values]
    return sum(value is not None for value in answers) / len(answers) if answers else None


def _part(part: SignalPart) -> Json:
    low, high = part.range
    return {
        "name": part.name,
        "signal": part.signal,
        "weight": part.weight,
        "range": [low, high],
        "per": part.per,
        "missing": part.missing,
    }


def _worth(part: SignalPart, observed: ObservedSession | None, rollout: Rollout | None) -> Json:
    """One part of a session's reward: the answers, the value assumed for missing ones, and the resulting value."""
    answers = [] if observed is None else [*observed.answers.get(part.name, ())]
    value = None if rollout is None else rollout.reward_parts.get(part.name)
    return {
        **dict[str, Json](name=part.name, signal=part.signal, per=part.per, weight=part.weight),
        "answers": [*answers],
        "silence": _silence(part) if None in answers else "",
        "value": value,
        "worth": None if value is None else part.weight * value,
    }


def _silence(part: SignalPart) -> str:
    """The treatment of a missing answer, in words."""
    return "estimated" if part.missing == "estimate" else f"taken for {part.missing:g}"


def _rollout(archive: Archive, session_id: str) -> Rollout | None:
    """The rollout made of a session; ``None`` if the session was stale, or is not in a batch yet."""
    try:
        return archive.rollout(session_id)[1]
    except UserError:
        return None


def _poisoning(run: RunReader, archive: Archive, feedback: SessionArchive | None) -> Json:
    """Counts of sessions that protection excludes from training or limits."""
    limits = run.config.feedback.poisoning
    newest = [] if feedback is None else feedback.newest(MOST_ROWS)
    observed = archive.observed([record.session.session_id for record in newest])
    capped = {one.observation.user for one in observed.values() if one.observation.weight < 1}
    return {
        "quarantined": {
            reason.removeprefix(SUSPECTED): number
            for reason, number in archive.drops(LIVE).items()
            if reason.startswith(SUSPECTED)
        },
        "capped_users": len(capped),
        "looked_at": len(observed),
        "limits": limits.model_dump(mode="json"),
    }


def _table(run: RunReader) -> RoutingTable | None:
    return RoutingTables.open(run.folder).newest()


def _release_facts(run: RunReader, store: ReleaseStore) -> Json:
    config, releases, moves, table = run.config.release, store.releases(), store.moves(), _table(run)
    live, pending, due = live_release(releases), pending_release(releases), release_to_take_back(releases)
    former = former_release(releases)
    states = Counter(str(release.state) for release in releases)
    return {
        "problem": "",
        "every_steps": config.every_steps,
        "approvals": config.approvals,
        "shares": list(config.canary_shares),
        "has_shadow": config.shadow_sessions > 0,
        "live": None if live is None else live.version,
        "former": None if former is None else former.version,
        "way": None
        if pending is None
        else {"version": pending.version, "state": str(pending.state), "stage": pending.stage},
        "due": due.version if due is not None and (pending is not None or former is not None) else None,
        "states": dict(states),
        "releases": [*(asdict(one) | {"state": str(one.state)} for one in reversed(releases))],
        "moves": [finite(asdict(move)) for move in moves][::-1],
        "requests": [*(asdict(one) | {"kind": str(one.kind)} for one in reversed(store.requests()))],
        "table": None if table is None else _arms(asdict(table)),
    }


def _arms(table: Mapping[str, Json]) -> Json:
    arms = table["arms"]
    assert isinstance(arms, Sequence)
    return {
        "generation": table["generation"],
        "arms": [arm for arm in (*arms, table["shadow"], table["fallback"]) if arm is not None],
    }


ROUTES: Routes = {
    "GET /live": live,
    "GET /live/sessions/{session}": session,
    "POST /live/rollback": rollback,
}
