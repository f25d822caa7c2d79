"""The recipe of `etude run`, with the values that its options and its fleet set.

Imports little more than the keys of recipes, so that an error in one is found at once.
"""

from collections.abc import Sequence
from pathlib import Path

from etude.config.fleet import FleetConfig
from etude.config.loading import load_fleet, load_recipe
from etude.config.recipe import RunConfig
from etude.run.fleet_plan import settings_of


def read_recipe(recipe: Path, settings: Sequence[str], fleet: Path | None) -> tuple[RunConfig, FleetConfig | None]:
    """Read a recipe with its ``settings``, and the file of a ``fleet``, if any: its devices and replicas come last.

    Raises :class:`~etude.errors.ConfigError`.
    """
    if fleet is None:
        return load_recipe(recipe, settings), None
    machines = load_fleet(fleet)
    return load_recipe(recipe, [*settings, *settings_of(machines)]), machines
