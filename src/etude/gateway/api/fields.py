"""Validated parsing of JSON request bodies, and the JSON schemas that describe them.

Owns the wording of errors: the path of the field (``messages[3].content[0].text``), the value, shortened, and the
expectation. Knows no API protocol: the caller defines the fields and their meaning. The parser is authoritative, not
the schema.

A field that is ``null`` counts as absent, as in the supported APIs. Of a duplicate key the last one counts, as usual. A
body that is not strict JSON (NaN, lone surrogates, more than 1024 levels) is rejected as a whole; integers beyond 64
bits arrive as floats, which exceed every integer limit here.
"""

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

import orjson

from etude.gateway.api.calls import ApiError
from etude.types import MIN_TEMPERATURE, Json

MAX_NAME_CHARACTERS = 256
"""Characters of a model's or a tool's name: every reply repeats it."""
MAX_TOP_K = 2**31 - 1
"""Larger than any vocabulary."""
MAX_STOPS = 16
"""Stop strings of one call; each is searched for after every token. OpenAI allows 4, harnesses for other servers send
more.
"""
MAX_STOP_CHARACTERS = 1000
"""Longest text that is held back because it may become a stop string."""
QUOTED_CHARACTERS = 80
"""Longest quotation of a rejected value in an error message: enough to identify it, too short to fill a log."""
MAX_LEVELS = 254
"""Levels of an object that is passed on: as many as orjson writes. A deeper one overflows the stack when it is printed.
"""
LISTED_NAMES = 4
"""Number of field names in the description of a rejected object."""
NO_NEUTRAL_FIELDS: Mapping[str, Sequence[Json]] = MappingProxyType({})
"""For objects that have no fields with only some accepted values."""


def read_object(body: bytes) -> "JsonObject":
    """The fields of a request body. Raises :class:`ApiError` unless it is a JSON object."""
    try:
        value: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_request", f"the body is not JSON: {error.msg} at {error.pos}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_request", f"the body must be a JSON object, not {quote(value)}")
    return JsonObject(value)


class JsonObject:
    """One JSON object. Reading a field validates it; an invalid value raises :class:`ApiError` with its path.

    Example: ``read_object(b'{"n": 0}').integer("n", low=1, high=9)`` fails with ``n=0: expected a whole number from 1
    to 9``.
    """

    __slots__ = ("_values", "path")

    def __init__(self, values: dict[str, Json], path: str = "") -> None:
        self._values = values
        self.path = path
        """Path of the object in the body; empty for the body itself."""

    def where(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def value(self, name: str) -> Json:
        """A field's raw value; ``None`` if absent."""
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required if there is no default."""
        value = self._values.get(name)
        if isinstance(value, str):
            return value
        if value is None and default is not None:
            return default
        raise self.invalid(name, "a string")

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        """One of some strings, or ``None``."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in allowed:
            raise self.invalid(name, " or ".join(f'"{word}"' for word in allowed))
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean; 0 and 1 are not accepted."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``, or ``None``. In JSON, 1.0 is a whole number."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.invalid(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, *, low: float, high: float, above: bool = False) -> float | None:
        """A number from ``low`` (with ``above``: greater than it) to ``high``, or ``None``."""
        value = self._values.get(name)
        if value is None:
            return None
        fits = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
        if not fits or (above and value == low):
            raise self.invalid(name, f"a number {'above' if above else 'from'} {low} to {high}")
        return float(value)  # type: ignore[arg-type]  # ``fits`` says what it is

    def temperature(self, *, high: float) -> float:
        """The sampling temperature, 1 if absent: 0 for greedy, or from the engines' minimum to ``high``."""
        value = self.number("temperature", low=0, high=high)
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise self.invalid("temperature", f"0, for greedy, or a number from {MIN_TEMPERATURE:g} to {high:g}")
        return 1.0 if value is None else value

    def top_p(self) -> float:
        """The top-p to sample with, 1 if absent."""
        value = self.number("top_p", low=0, high=1, above=True)
        return 1.0 if value is None else value

    def short_text(self, name: str, default: str | None = None, *, most: int = MAX_NAME_CHARACTERS) -> str:
        """A name: a string of 1 to ``most`` characters."""
        text = self.text(name, default)
        if not 0 < len(text) <= most:
            raise self.invalid(name, f"a name of 1 to {most} characters")
        return text

    def items(self, name: str) -> list[Json]:
        """A list, empty if absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.invalid(name, "a list")
        return value

    def child(self, name: str) -> "JsonObject | None":
        """An object, or ``None``."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, "an object")
        return JsonObject(value, self.where(name))

    def document(self, name: str) -> dict[str, Json]:
        """An object that is passed on unchanged, e.g. a schema; empty if absent."""
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.invalid(name, "an object")
        try:
            orjson.dumps(value)
        except orjson.JSONEncodeError as error:
            raise self.invalid(name, f"an object of at most {MAX_LEVELS} levels") from error
        return value

    def children(self, name: str) -> "list[JsonObject]":
        """The objects of a list; empty if absent."""
        value = self._values.get(name)
        if value is None:
            return []
        path, children = self.where(name), []
        for index, item in enumerate(self.items(name)):
            if not isinstance(item, dict):
                raise self.invalid(f"{name}[{index}]", "an object", item)
            children.append(JsonObject(item, f"{path}[{index}]"))
        return children

    def refuse_unknown(
        self, understood: Container[str], neutral: Mapping[str, Sequence[Json]] = NO_NEUTRAL_FIELDS
    ) -> None:
        """Reject all fields except ``understood`` ones and ``neutral`` ones that have a value without effect."""
        if all(map(understood.__contains__, self._values)):
            return
        for name, value in self._values.items():
            if name in understood or value is None:
                continue
            if name not in neutral:
                raise self.unsupported(name, "leave it out")
            if not any(_same(value, other) for other in neutral[name]):
                spelt = " or ".join(orjson.dumps(other).decode() for other in neutral[name])
                raise self.unsupported(name, f"leave it out or send {spelt}")

    def invalid(self, name: str, expected: str, value: Json = None) -> ApiError:
        """The error for a value that is not ``expected``; ``value`` overrides the field's own value."""
        where = _cut(self.where(name))
        wrong = self._values.get(name) if value is None else value
        problem = f"{where} is missing or null" if wrong is None else f"{where}={quote(wrong)}"
        return ApiError(400, "invalid_request", f"{problem}: expected {expected}", param=where)

    def unsupported(self, name: str, fix: str) -> ApiError:
        """The error for a value that would change the output but is not supported; ``fix`` says what to do instead."""
        where = _cut(self.where(name))
        message = f"{where}={quote(self._values.get(name))} is not supported: {fix}"
        return ApiError(400, "unsupported_parameter", message, param=where)


def quote(value: Json) -> str:
    """A value in JSON notation, at most ``QUOTED_CHARACTERS`` long; lists and objects are only described."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        names = ", ".join(name[:QUOTED_CHARACTERS] for name, _ in zip(value, range(LISTED_NAMES), strict=False))
        return _cut(f"an object of {len(value)} ({names})" if names else "an empty object")
    if isinstance(value, str):
        value = value[:QUOTED_CHARACTERS]
    return _cut(orjson.dumps(value).decode())


def _same(value: Json, other: Json) -> bool:
    return value == other and isinstance(value, bool) is isinstance(other, bool)  # 1 == True


def _cut(text: str) -> str:
    return text if len(text) <= QUOTED_CHARACTERS else text[: QUOTED_CHARACTERS - 1] + "…"


TEXT: Json = {"type": "string"}
"""Any string."""
FLAG: Json = {"type": "boolean"}
"""True or false."""
NULL: Json = {"type": "null"}
"""Null, which counts as absent."""
TOP_P: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
"""The top-p to sample with."""
OBJECT: Json = {"type": "object"}
"""An object that is passed on unchanged."""


def object_schema(required: str, **properties: Json) -> dict[str, Json]:
    """JSON schema of an object with exactly these fields; ``required`` names some of them, separated by spaces.

    The others may be null, which counts as absent.
    """
    needed: list[Json] = [*required.split()]
    fields: dict[str, Json] = {
        field: schema if field in needed else nullable(schema) for field, schema in properties.items()
    }
    return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}


def field_names(schema: Mapping[str, Json]) -> frozenset[str]:
    """The field names of a schema from :func:`object_schema`."""
    properties = schema["properties"]
    assert isinstance(properties, dict), "the schema is not of an object"
    return frozenset(properties)


def short_text(longest: int) -> Json:
    """JSON schema of a string of 1 to ``longest`` characters."""
    return {"type": "string", "minLength": 1, "maxLength": longest}


def integer_schema(low: int, high: int) -> Json:
    """JSON schema of a whole number."""
    return {"type": "integer", "minimum": low, "maximum": high}


def temperature_schema(high: float) -> Json:
    """JSON schema of a temperature: 0, or from the engines' minimum to ``high``."""
    return {"type": "number", "maximum": high, "anyOf": [{"const": 0}, {"minimum": MIN_TEMPERATURE}]}


def array_schema(*items: Json, least: int = 0, most: int | None = None) -> Json:
    """JSON schema of a list whose entries match ``items``."""
    entry: Json = items[0] if len(items) == 1 else {"anyOf": [*items]}
    schema: dict[str, Json] = {"type": "array", "items": entry, "minItems": least}
    return schema if most is None else {**schema, "maxItems": most}


def enum_schema(*words: str) -> Json:
    """JSON schema of one of some strings."""
    return {"enum": [*words]}


def any_of(*schemas: Json) -> Json:
    """JSON schema of a value that matches any of some schemas."""
    return {"anyOf": [*schemas]}


def nullable(schema: Json) -> Json:
    """JSON schema of a value that may be null."""
    return any_of(schema, NULL)
