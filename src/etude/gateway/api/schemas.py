"""JSON schemas of request bodies: the pieces that every dialect's schema is made of.

Owns how they are written down. What is in a body is its dialect's business; its parser, not its schema, is what counts.
"""

from etude.types import MIN_TEMPERATURE, Json

TEXT: Json = {"type": "string"}
"""Any string."""
FLAG: Json = {"type": "boolean"}
"""True or false."""
OBJECT: Json = {"type": "object"}
"""An object that is passed on as it is."""


def record(required: str, **properties: Json) -> dict[str, Json]:
    """An object with these fields and no others; ``required`` names some of them, separated by spaces.

    The others may be null, which is as good as absent.
    """
    needed: list[Json] = [*required.split()]
    fields: dict[str, Json] = {
        field: schema if field in needed else either(schema, {"type": "null"}) for field, schema in properties.items()
    }
    return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}


def bounded(longest: int) -> Json:
    """A string of 1 to ``longest`` characters."""
    return {"type": "string", "minLength": 1, "maxLength": longest}


def whole(low: int, high: int) -> Json:
    """A whole number."""
    return {"type": "integer", "minimum": low, "maximum": high}


def temperature(high: float) -> Json:
    """A temperature: 0, or from what engines take to ``high``."""
    return {"type": "number", "maximum": high, "anyOf": [{"const": 0}, {"minimum": MIN_TEMPERATURE}]}


def listed(*items: Json, least: int = 0, most: int | None = None) -> Json:
    """A list in which each entry is one of ``items``."""
    entry: Json = items[0] if len(items) == 1 else {"anyOf": [*items]}
    schema: dict[str, Json] = {"type": "array", "items": entry, "minItems": least}
    return schema if most is None else {**schema, "maxItems": most}


def word(*words: str) -> Json:
    """One of some strings."""
    return {"enum": [*words]}


def either(*schemas: Json) -> Json:
    """What fits any of some schemas."""
    return {"anyOf": [*schemas]}
