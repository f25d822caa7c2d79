"""A recipe without its secrets, for reports and for trackers that others read.

Secrets belong in the environment, and most sections reject them. The remaining ones can be in third-party values: the
environment of an external harness, options of user-defined classes, URLs.
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

from etude.types import Json

HIDDEN = "(hidden)"
"""Replacement for a hidden value."""
SECRET = re.compile(
    r"(^|_|-)(password|passwd|passphrase|secret|token|api_?key|key|keys|auth|authorization|credentials?|cookie|webhook)$",
    re.IGNORECASE,
)
"""Pattern for the end of keys whose text values are hidden."""
ENVIRONMENTS = frozenset({"environment", "env", "headers"})
"""Tables whose values are hidden; only their names are shown."""


def public(config: Mapping[str, Json]) -> dict[str, Json]:
    """The same tree without texts of keys that match :data:`SECRET`, values of environments, and the parts of URLs
    before ``@`` or after ``?`` or ``#``.
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
    """A URL without its user, password, query and fragment; any other text unchanged."""
    if "://" not in text or any(letter.isspace() for letter in text):
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return HIDDEN
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
