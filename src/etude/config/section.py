"""What every section of the configuration is: frozen, strict, and hard on keys that are unknown or idle."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and loose types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def is_set(self, name: str) -> bool:
        """Whether a key is other than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def refuse_idle(self, section: str, names: Iterable[str], why: str) -> None:
        """Refuse the first of ``names`` that is set: ``section.name would have no effect``, and ``why``.

        Raises ``ValueError``, which whoever reads the recipe makes a :class:`~etude.errors.ConfigError` of.
        """
        for name in names:
            if self.is_set(name):
                raise ValueError(f"{section}.{name} would have no effect {why}; leave it out")
