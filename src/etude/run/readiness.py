"""Whether this machine has what a recipe names: found before there is a run, not by one of its processes.

Owns the looking; what is looked for is explained by the sections of the recipe. A recipe alone says nothing of it, so
``--dry-run`` does not ask.
"""

from pathlib import Path

from etude.config.recipe import RunConfig
from etude.config.tasks import OF_FOLDER
from etude.errors import ConfigError, UserError
from etude.run.decisions import check_devices
from etude.run.endpoints import probe_ports
from etude.run.families import open_family
from etude.run.rollouts import harness_mounts
from etude.tokens.jinja import call_support


def check_ready(config: RunConfig) -> tuple[str, ...]:
    """What may go wrong with a new run, in sentences for people.

    Raises :class:`~etude.errors.UserError` for a device, folder or port that it would not have, and for tool calls of
    which it could not read any.
    """
    check_devices(config)
    checkpoint = Path(config.model.checkpoint)
    if config.model.checkpoint and not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"model.checkpoint = {config.model.checkpoint!r}: no Hugging Face checkpoint there, as {Path.cwd()} has no "
            f"{checkpoint / 'config.json'}"
        )
    doubts = _check_calls(config) if config.model.checkpoint and config.harness.kind == "command" else ()
    harness_mounts(config.harness.mounts)
    if config.tasks.family in OF_FOLDER:
        try:
            open_family(config)
        except UserError as error:
            raise ConfigError(f"tasks.folder: {error}") from error
    probe_ports(config)
    return doubts


def _check_calls(config: RunConfig) -> tuple[str, ...]:
    """Read back what the checkpoint's chat template makes of tool calls: agents other than ours may live by them."""
    calls = call_support(Path(config.model.checkpoint))
    problem = f"model.checkpoint = {config.model.checkpoint!r}: {calls.problem}"
    if calls.is_lost:
        raise ConfigError(
            f"{problem}, and the agent of harness.command would be graded without them. Give the checkpoint a "
            "chat_template.jinja that writes calls in a form of docs/models.md, or none for an agent that needs none"
        )
    return (problem,) if calls.problem else ()
