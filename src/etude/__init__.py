"""étude trains a coding model inside the product that will use it.

``__all__`` is what programs may import (docs/python.md); everything below the package's modules may change. A name is
imported when it is first used, so ``import etude`` loads neither torch nor anything else.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.api.evaluation import EvaluationResult, TryRecord, evaluate
    from etude.api.feedback import FeedbackClient
    from etude.api.recipe import Recipe
    from etude.api.records import Records, RolloutRecord, StepRecord, TurnRecord, WeightRecord
    from etude.api.run import Run, export
    from etude.api.run import open_run as open  # noqa: A004  # it reads as `etude.open`
    from etude.api.training import Training, train
    from etude.errors import ConfigError, EtudeError, InfrastructureError, RunFolderError, UserError

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "EtudeError",
    "EvaluationResult",
    "FeedbackClient",
    "InfrastructureError",
    "Recipe",
    "Records",
    "RolloutRecord",
    "Run",
    "RunFolderError",
    "StepRecord",
    "Training",
    "TryRecord",
    "TurnRecord",
    "UserError",
    "WeightRecord",
    "evaluate",
    "export",
    "open",
    "train",
]

_ERRORS, _RECORDS = "etude.errors", "etude.api.records"
_HOMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ConfigError": (_ERRORS, "ConfigError"),
        "EtudeError": (_ERRORS, "EtudeError"),
        "EvaluationResult": ("etude.api.evaluation", "EvaluationResult"),
        "FeedbackClient": ("etude.api.feedback", "FeedbackClient"),
        "InfrastructureError": (_ERRORS, "InfrastructureError"),
        "Recipe": ("etude.api.recipe", "Recipe"),
        "Records": (_RECORDS, "Records"),
        "RolloutRecord": (_RECORDS, "RolloutRecord"),
        "Run": ("etude.api.run", "Run"),
        "RunFolderError": (_ERRORS, "RunFolderError"),
        "StepRecord": (_RECORDS, "StepRecord"),
        "Training": ("etude.api.training", "Training"),
        "TryRecord": ("etude.api.evaluation", "TryRecord"),
        "TurnRecord": (_RECORDS, "TurnRecord"),
        "UserError": (_ERRORS, "UserError"),
        "WeightRecord": (_RECORDS, "WeightRecord"),
        "evaluate": ("etude.api.evaluation", "evaluate"),
        "export": ("etude.api.run", "export"),
        "open": ("etude.api.run", "open_run"),
        "train": ("etude.api.training", "train"),
    }
)
"""Public name → its module, and its name there."""


def __getattr__(name: str) -> object:
    """Import a public name, or a module of the package, when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'etude' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, own_name = _HOMES[name]
    value = globals()[name] = getattr(import_module(module), own_name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
