"""What every section of the configuration is: frozen, strict, and hard on unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys and loose types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
