"""Tasks as JSON, and back, without pickle: whatever a task holds, field by field, as its types say.

A noun is an object of its fields, a tuple a list, a mapping an object, an enum its value; where a field may hold one of
several nouns, the object says which in ``kind``. The JSON is Python's own, not orjson's: the cases of a task may hold
integers beyond 64 bits and infinities, which must come back as they were.
"""

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from etude.errors import DamagedError
from etude.types import Task

KIND = "kind"
"""Which noun an object is, where there is a choice."""


def encode_task(task: Task) -> bytes:
    """A task as one line of JSON."""
    return json.dumps(_to_json(task, Task)).encode()


def decode_task(data: bytes) -> Task:
    """The task that :func:`encode_task` was given. Raises :class:`~etude.errors.DamagedError`."""
    try:
        task = _from_json(json.loads(data), Task)
        assert isinstance(task, Task)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"unreadable task record {data[:80]!r}: {error}") from error
    return task


def _to_json(value: Any, hint: Any) -> Any:
    """``value``, whose type is ``hint``, as what JSON can carry."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _fields(type(value))
        fields = {name: _to_json(getattr(value, name), inner) for name, inner in hints.items()}
        return {KIND: type(value).__name__, **fields} if len(_nouns(hint)) > 1 else fields
    if isinstance(value, Enum):
        return value.value
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return [_to_json(item, inner) for item, inner in zip(value, _each(arguments, len(value)), strict=True)]
    if get_origin(hint) is Mapping:
        return {name: _to_json(item, arguments[1]) for name, item in value.items()}
    return value


def _from_json(value: Any, hint: Any) -> Any:
    """What :func:`_to_json` was given."""
    nouns = _nouns(hint)
    if nouns and not (value is None and NoneType in get_args(hint)):
        return _noun(value, nouns)
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(_from_json(item, inner) for item, inner in zip(value, _each(arguments, len(value)), strict=True))
    if get_origin(hint) is Mapping:
        return {name: _from_json(item, arguments[1]) for name, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if isinstance(hint, type) and not isinstance(value, (int, float) if hint is float else hint):
        raise TypeError(f"{str(value)[:40]!r} is no {hint.__name__}")
    return value  # the union of all that JSON can carry is checked by its parser


def _noun(value: Any, nouns: tuple[Any, ...]) -> Any:
    """The one of ``nouns`` that an object describes."""
    fields = dict(value)
    noun = {choice.__name__: choice for choice in nouns}[fields.pop(KIND)] if len(nouns) > 1 else nouns[0]
    hints = _fields(noun)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{noun.__name__} has no {', '.join(sorted(unknown))}")
    return noun(**{name: _from_json(item, hints[name]) for name, item in fields.items()})


def _nouns(hint: Any) -> tuple[Any, ...]:
    """The nouns that a field of this type may hold."""
    choices = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return tuple(choice for choice in choices if dataclasses.is_dataclass(choice))


def _each(arguments: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """The type of each item of a tuple."""
    return arguments[:1] * length if arguments[-1] is Ellipsis else arguments


@cache
def _fields(noun: Any) -> Mapping[str, Any]:
    """Name and type of each field."""
    hints = get_type_hints(noun)
    return {field.name: hints[field.name] for field in dataclasses.fields(noun)}
