"""A recipe in Python: read, changed, checked.

    Recipe.load("recipes/quickstart").with_({"trainer.steps": 3})

Owns no key: these are :mod:`etude.config`'s, and docs/recipe-keys.md lists them.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from etude.config.loading import dump_toml, parse_config, read_tree, set_key
from etude.config.recipe import RunConfig
from etude.errors import ConfigError
from etude.types import Json


@dataclass(frozen=True)
class Recipe:
    """Input of a run. ``Recipe()`` has the defaults; ``Recipe({"trainer": {"steps": 3}})`` is one that is
    written in Python. It is checked where it is made: raises :class:`~etude.errors.ConfigError` with every fault.
    """

    tree: Mapping[str, Json] = field(default_factory=dict)
    """The keys that are set, section by section; all others have their defaults."""
    source: str = "recipe"
    """Its file, or another name of it in messages."""
    config: RunConfig = field(init=False, repr=False, compare=False)
    """Every key with its value, checked. Its classes are no part of the public API."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", parse_config(self.tree, source=self.source))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a TOML file, or a folder with ``run.toml``. Raises :class:`~etude.errors.ConfigError`."""
        tree, file = read_tree(Path(path))
        return cls(tree, str(file))

    def with_(self, settings: Mapping[str, object]) -> Self:
        """Another recipe in which some keys have other values: ``{"trainer.steps": 3, "seed": 1}``.

        Raises :class:`~etude.errors.ConfigError`.
        """
        tree: dict[str, Any] = copy.deepcopy(dict(self.tree))
        for key, value in settings.items():
            set_key(tree, key, list(value) if isinstance(value, tuple) else value)
        return type(self)(tree, " with ".join([self.source, *settings]))

    def __getitem__(self, key: str) -> Json:
        """The value of ``section.key``, set or default. Raises ``KeyError`` for a key that there is not."""
        value: Any = self.config.model_dump(mode="json")
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise KeyError(f"{key}: no such key; `etude config {key.rpartition('.')[2]}` looks for it")
            value = value[part]
        result: Json = value
        return result

    def to_toml(self) -> str:
        """Every key with its value, as a file that :meth:`load` reads."""
        return dump_toml(self.config)


def as_recipe(recipe: Recipe | Path | str) -> Recipe:
    """A recipe, or the one at a path. Raises :class:`~etude.errors.ConfigError`."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Path | str):
        return Recipe.load(recipe)
    raise ConfigError(f"{recipe!r} is not a recipe: give etude.Recipe, or the path of a TOML file")
