"""Errors as answers: which status and code each kind of trouble has.

Owns the mapping, once for whole answers and streams. How a refusal looks in an API is its dialect's business. What an
unknown error says could quote a prompt, so neither caller nor log ever see more than its type and place.
"""

import logging

from etude.errors import CaptureError, EngineBusy, EngineUnavailable, SessionLost, VersionPending, trace_of
from etude.gateway.api.calls import Refusal

RETRY_AFTER_S = 1.0
"""When a caller may try again where nobody knows better: about one model call later."""
RETRYABLE = frozenset({409, 429, 503})
"""Statuses that go with a time to try again."""
UNSERVED = frozenset({"rate_limit_exceeded", "engine_unavailable", "deadline_exceeded", "draining"})
"""Codes of calls that nobody answered for want of an engine, and not for what they ask."""
GONE = 499
"""Status, in metrics and logs, of a call whose caller hung up; nobody receives it (nginx's number)."""

logger = logging.getLogger(__name__)


def refusal_of(error: Exception, route: str) -> Refusal:
    """What a caller is told of an error; ``route`` is the pattern that an unknown one is logged under."""
    match error:
        case Refusal():
            return error
        case TimeoutError():
            return Refusal(504, "deadline_exceeded", "the call was not over before its deadline; nothing was recorded")
        case VersionPending():
            return Refusal(409, "version_pending", str(error), retry_after_s=RETRY_AFTER_S)
        case SessionLost():
            return Refusal(404, "session_not_found", str(error))
        case EngineBusy():
            return Refusal(429, "rate_limit_exceeded", str(error), retry_after_s=RETRY_AFTER_S)
        case EngineUnavailable():
            return Refusal(503, "engine_unavailable", str(error), retry_after_s=RETRY_AFTER_S)
        case CaptureError():
            # Not 503: asking again would be answered the same, and the rollout's record shall name the reason.
            logger.error("%s: %s", route, error)
            return Refusal(500, "capture_failed", str(error))
    logger.error("%s failed: %s", route, trace_of(error))
    return Refusal(500, "internal_error", f"the gateway failed: {type(error).__name__}")
