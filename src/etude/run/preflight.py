"""Checks that this machine has what a recipe names: made before there is a run, not by one of its processes.

Owns the looking; what is looked for is explained by the sections of the recipe. A recipe alone says nothing of it, so
``--dry-run`` does not ask.
"""

from pathlib import Path

from etude.config.recipe import RunConfig
from etude.config.rollouts import CommandOptions
from etude.config.tasks import IN_FOLDERS
from etude.errors import ConfigError, UserError
from etude.run.disk_space import check_disk_space
from etude.run.endpoints import probe_ports
from etude.run.judging import check_judge
from etude.run.resolve import check_devices, resolve_device
from etude.run.rollouts import harness_mounts
from etude.run.task_families import open_family
from etude.tokens.jinja import call_support, load_format
from etude.tokens.messages import NO_KWARGS, TemplateKwargs
from etude.tokens.render_differences import rendered_differently


def prepare(config: RunConfig, out: Path) -> list[str]:
    """All checks of a new run in ``out``, before there is one; returns warnings, a line each.

    Raises :class:`~etude.errors.UserError`.
    """
    check_judge(config)
    return [*check_ready(config), *check_disk_space(config, out)]


def check_ready(config: RunConfig) -> list[str]:
    """Check a new run before it starts; returns warnings, a line each.

    Raises :class:`~etude.errors.UserError` for a device, folder or port that a new run would not have, for template
    kwargs that the model's chat template does not read, and for tool calls of which it could not read any.
    """
    check_devices(config)
    advice = about_numerics(config)
    if config.model.checkpoint:
        checkpoint = Path(config.model.checkpoint)
        if not (checkpoint / "config.json").is_file():
            raise ConfigError(
                f"model.checkpoint = {config.model.checkpoint!r}: no Hugging Face checkpoint there, as {Path.cwd()} "
                f"has no {checkpoint / 'config.json'}"
            )
        advice += about_template(checkpoint, config.gateway.chat_template_kwargs)
        advice += about_calls(config) if isinstance(config.harness.options, CommandOptions) else []
    elif config.gateway.chat_template_kwargs:
        raise ConfigError(
            "gateway.chat_template_kwargs would have no effect without model.checkpoint: étude's own chat template "
            "reads none"
        )
    if isinstance(config.harness.options, CommandOptions):
        harness_mounts(config.harness.options.mounts)
    if config.tasks.family in IN_FOLDERS:
        try:
            open_family(config)
        except UserError as error:
            raise ConfigError(f"tasks.folder: {error}") from error
    probe_ports(config)
    return advice


def about_calls(config: RunConfig) -> list[str]:
    """Read back what the checkpoint's chat template makes of tool calls: agents other than ours may live by them."""
    calls = call_support(Path(config.model.checkpoint))
    problem = f"model.checkpoint = {config.model.checkpoint!r}: {calls.problem}"
    if calls.is_lost:
        raise ConfigError(
            f"{problem}, and the agent of harness.options.command would be graded without them. Give the checkpoint a "
            "chat_template.jinja that writes calls in a form of docs/models.md, or none for an agent that needs none"
        )
    return [problem] if calls.problem else []


def about_template(checkpoint: Path, kwargs: TemplateKwargs = NO_KWARGS) -> list[str]:
    """Compare what is trained with what another server would show the model: a line where they differ.

    Raises as :func:`~etude.tokens.jinja.load_format`.
    """
    differences = rendered_differently(load_format(checkpoint, kwargs))
    if not differences:
        return []
    return [
        f"trained is what the gateway renders; a server that renders each call afresh shows this model another "
        f"context: {', '.join(differences)} (docs/models.md, Serving what was trained)"
    ]


def about_numerics(config: RunConfig) -> list[str]:
    """A line where the numbers of a GPU are far from what it is made for."""
    devices = {resolve_device(config.engine.device), resolve_device(config.trainer.device)}
    if "cuda" not in devices or config.numerics.dtype != "float32":
        return []
    return [
        "numerics.dtype = 'float32' on a GPU: no flash attention, no graphs, experts one by one, twice the memory; "
        "'bfloat16' is what it is made for"
    ]
