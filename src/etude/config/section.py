"""The base of every section of the configuration: frozen, strict, and hard on keys that are unknown or idle."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationError, ValidationInfo

from etude.config.plugins import Registry


def _lists(value: object) -> object:
    """Arrays of a recipe, which are tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


JsonTable: TypeAlias = Annotated[dict[str, JsonValue], BeforeValidator(_lists)]
"""A table for somebody else's program: any keys, any values."""


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and loose types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def is_set(self, name: str) -> bool:
        """Tell if a key is other than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def refuse_idle(self, section: str, names: Iterable[str], why: str) -> None:
        """Refuse the first of ``names`` that is set: ``section.name would have no effect``, and ``why``.

        Raises ``ValueError``, of which :func:`~etude.config.loading.parse_config` makes a
        :class:`~etude.errors.ConfigError`.
        """
        for name in names:
            if self.is_set(name):
                raise ValueError(f"{section}.{name} would have no effect {why}; leave it out")


@dataclass(frozen=True)
class OptionsOf:
    """The validator of a section's ``options``: a table of keys that one choice of another key brings along.

    Its field is ``Annotated[SerializeAsAny[...], PlainValidator(OptionsOf(...))]``, behind the key that chooses.
    """

    section: str
    key: str
    """The key that chooses: ``kind`` or ``family``."""
    classes: Mapping[str, type[Section]]
    """Registry → its options; other choices have none."""
    table: str = "options"
    """Name of the table."""
    names: Registry | None = None
    """The names of the choice, where others than built-in ones are taken: they bring a class ``Options`` along."""

    def __call__(self, given: object, info: ValidationInfo) -> Section:
        """The options of the choice that was made. Raises ``ValueError`` for a key that it does not have."""
        choice = info.data.get(self.key)  # absent where it was refused itself
        options = Section if choice is None else self._class_of(choice)
        if type(given) in (options, Section):
            return given if isinstance(given, options) else options()
        if isinstance(given, Section):
            given = given.model_dump()
        if isinstance(given, dict) and choice is not None:
            for name in given.keys() - options.model_fields.keys():
                raise ValueError(f"unknown key '{self.section}.{self.table}.{name}': "
                                 f"{self._advice(name, choice, options)}")  # fmt: skip
        return options.model_validate(given)

    def _class_of(self, choice: str) -> type[Section]:
        """The options of a choice; those of a class that is no built-in one are its ``Options``."""
        if self.names is None or choice in self.names.builtins:
            return self.classes.get(choice, Section)
        return own_options(self.names.find(choice), f"{self.section}.{self.key} = {choice!r}")

    def _advice(self, name: str, choice: str, options: type[Section]) -> str:
        chosen = f"with {self.section}.{self.key} = {choice!r}"
        if others := [other for other, names in self.classes.items() if name in names.model_fields]:
            return f"it would have no effect {chosen}, it goes with {' or '.join(map(repr, others))}"
        if near := difflib.get_close_matches(name, options.model_fields, n=1):
            return f"did you mean '{self.section}.{self.table}.{near[0]}'?"
        return f"{chosen} there are {', '.join(options.model_fields) or 'no options'}"


def faults_of(error: ValidationError) -> str:
    """All faults of an invalid value, on one line, each behind its key."""
    return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())


def own_options(thing: object, where: str) -> type[Section]:
    """The class of a thing's options: its ``Options``, or no keys at all. Raises ``ValueError``, which begins with
    ``where``.
    """
    options = getattr(thing, "Options", Section)
    if not (isinstance(options, type) and issubclass(options, Section)):
        raise ValueError(f"{where}: its Options are no {Section.__module__}.Section")
    return options
