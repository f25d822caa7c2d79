"""A recipe without its secrets, as reports have it, and trackers that others read.

Secrets belong into the environment, and most sections refuse them. What is left are values of somebody else's: the
environment of an external harness, options of one's own classes, URLs.
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from etude.types import Json

HIDDEN = "(hidden)"
"""Stands for a value that is not shown."""
SECRET = re.compile(
    r"(^|_|-)(password|passwd|passphrase|secret|token|api_?key|key|keys|auth|authorization|credentials?|cookie|webhook)$",
    re.IGNORECASE,
)
"""Ends of keys whose texts are not shown."""
ENVIRONMENTS = frozenset({"environment", "env", "headers"})
"""Tables of which only the names are shown."""


def public(config: Mapping[str, Json]) -> dict[str, Json]:
    """The same tree without secrets: texts of keys that sound like one, values of environments, what stands before
    ``@``, behind ``?`` or ``#`` in URLs.
    """
    return {name: _shown(name, value) for name, value in config.items()}


def _shown(name: str, value: Json) -> Json:
    if isinstance(value, dict):
        if name.lower() in ENVIRONMENTS:
            return dict.fromkeys(value, HIDDEN)
        return {key: _shown(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shown(name, item) for item in value]
    if isinstance(value, str) and value:
        return HIDDEN if SECRET.search(name) else _without_credentials(value)
    return value


def _without_credentials(text: str) -> str:
    """A URL without its user, password, query and fragment; any other text as it is."""
    if "://" not in text or any(letter.isspace() for letter in text):
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return HIDDEN
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
