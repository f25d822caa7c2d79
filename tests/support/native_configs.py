"""Configurations of the native engine that differ from another one in a few keys."""

from etude.config.inference import EngineConfig


def altered(config: EngineConfig, *, max_running: int | None = None, **options: object) -> EngineConfig:
    """``config`` with other ``[engine.options]``, and with ``max_running`` where that is given."""
    running = config.max_running if max_running is None else max_running
    given = config.native.model_dump() | options
    return EngineConfig.model_validate(config.model_dump() | {"max_running": running, "options": given})
