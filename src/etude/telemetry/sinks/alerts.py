"""The receivers of alerts: an event for page, terminal and log; a webhook for other people's programs.

A webhook gets ``POST`` with JSON, ``{"run", "alert", "firing", "value", "summary", "at_s"}``, at most
:data:`TRIES` times. Where there is a key, ``X-Etude-Signature: sha256=…`` is the HMAC-SHA256 of the body in hex.
A redirect is not followed, since that would turn the ``POST`` into a ``GET``: it counts as a failure.
"""

import hashlib
import hmac
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from http.client import HTTPException, InvalidURL
from typing import IO, final

import orjson

from etude.config.log import ALERT_KEY, AlertConfig
from etude.telemetry.alerts import AlertRules
from etude.telemetry.events import AlertChanged, Event, Logged, SinkFailed
from etude.telemetry.sinks.sink import SinkContext

TRIES = 4
TIMEOUT_S = 5.0
"""Longest time of one try."""
FIRST_PAUSE_S = 1.0
"""Pause after the first try; it doubles."""
SIGNATURE = "X-Etude-Signature"


@final
class AlertSink:
    """Evaluates the rules and tells; implements :class:`~etude.telemetry.sinks.sink.Sink`."""

    def __init__(
        self,
        rules: Sequence[AlertConfig],
        context: SinkContext,
        write: Callable[[Event], None],
        environment: Mapping[str, str],
        cost: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``environment`` has the URLs that the rules name by ``$NAME``, and the key under
        :data:`~etude.config.log.ALERT_KEY`; ``cost`` tells what judges have cost so far.
        """
        self._rules = AlertRules(rules, cost)
        self._urls = {rule.name: url_of(rule, environment) for rule in rules if rule.webhook}
        self._key = environment.get(ALERT_KEY, "")
        self._run = context.run
        self._write = write
        for logged in context.past():
            self._rules.add(logged)

    def emit(self, event: Logged) -> None:
        """Fold in one event, and tell what it changes."""
        for change in self._rules.add(event):
            self._write(change)
            if change.alert in self._urls:
                self._post(change, event.at_s)

    def close(self) -> None:
        """Nothing is left to be told."""

    def _post(self, change: AlertChanged, at_s: float) -> None:
        body = orjson.dumps(
            {
                "run": self._run,
                "alert": change.alert,
                "firing": change.firing,
                "value": change.value,
                "summary": change.summary,
                "at_s": at_s,
            }
        )
        headers = {"Content-Type": "application/json", "User-Agent": "etude"}
        if self._key:
            headers[SIGNATURE] = signature(body, self._key)
        error = _sent(self._urls[change.alert], body, headers)
        if error:
            self._write(SinkFailed(sink=f"webhook of alert {change.alert!r}", reason=error, lost=1))


def url_of(rule: AlertConfig, environment: Mapping[str, str]) -> str:
    """The URL of a rule's webhook; empty where it is to be in an environment variable that is not there."""
    return environment.get(rule.webhook[1:], "") if rule.webhook.startswith("$") else rule.webhook


def signature(body: bytes, key: str) -> str:
    """The value of the signature's header."""
    return f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"


def _sent(url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """Send a request; returns why it could not be sent, without the URL, which may be secret."""
    error, pause_s = "", FIRST_PAUSE_S
    opener = urllib.request.build_opener(_RefuseRedirects)
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause_s)
            pause_s *= 2
        try:
            request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
            with opener.open(request, timeout=TIMEOUT_S):
                return ""
        except (ValueError, InvalidURL):  # their messages have the URL
            return "webhook is not a URL: set it, or its environment variable, to https://HOST/PATH"
        except urllib.error.HTTPError as status:
            with status:
                is_redirect = 300 <= status.code < 400
                error = f"{status}{'; a redirect: set webhook to the URL that it leads to' if is_redirect else ''}"
        except (OSError, HTTPException) as trouble:
            error = f"{type(trouble).__name__}: {trouble}"
    return error


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Makes an error of every redirect."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Follow none."""
