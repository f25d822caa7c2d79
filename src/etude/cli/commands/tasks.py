"""`etude tasks`: builds tasks from a repository; verifies, lists and exports tasks.

A task that cannot be made or verified is named with its reason and set aside; the rest goes on. Owns the options; the
modules that it imports do the rest.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import All, Json, Split, group
from etude.cli.sandbox_options import Sandbox, SandboxUrl, sandbox_config
from etude.errors import ConfigError, ExitCode

app = group()


@app.command("build")
def build_command(
    repository: Annotated[str, typer.Argument(help="A folder, a git URL, an archive, or pypi:NAME==VERSION.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of tasks; a second build continues it.")] = Path("tasks"),
    limit: Annotated[int, typer.Option(help="Tasks to make of it, at most.")] = 100,
    base: Annotated[str, typer.Option(help="Stored base system (default: the sandboxes' own).")] = "",
    before: Annotated[str, typer.Option(metavar="DATE", help="Install nothing that was published later.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of bugs and of the order of tests.")] = 0,
    unprobed: Annotated[bool, typer.Option("--unprobed", help="Also make tasks that have no probe.")] = False,
    installer: Annotated[
        str,
        typer.Option(metavar="URL", help="An OpenAI-compatible API; its model installs packages that need more work."),
    ] = "",
    model: Annotated[str, typer.Option(help="Model of the installer; its key is in ETUDE_INSTALLER_KEY.")] = "",
    sandbox: Sandbox = "ns",
    sandbox_url: SandboxUrl = "",
    as_json: Json = False,
) -> None:
    """Build tasks from a repository: deleted features and planted bugs."""
    if bool(installer) != bool(model):
        raise ConfigError("--installer and --model go together: give the URL of the API and the name of the model")
    sandboxes = sandbox_config(sandbox, sandbox_url)
    from etude.cli.actions.build_tasks import BuildOptions
    from etude.cli.actions.show_build import show_build
    from etude.taskgen.installer import InstallerOptions
    from etude.taskgen.preparation import Settings

    key = os.environ.get("ETUDE_INSTALLER_KEY", "")
    options = BuildOptions(
        reference=repository,
        out=out,
        limit=limit,
        unprobed=unprobed,
        settings=Settings(base=base, before=before, seed=seed),
        installer=InstallerOptions(url=installer, model=model, api_key=key) if installer else None,
    )
    show_build(options, sandboxes, as_json=as_json)


@app.command("check")
def check_command(
    folder: Annotated[Path | None, typer.Argument(help="Tasks built from repositories, or in Harbor's format.")] = None,
    *,
    fidelity: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="PRODUCTION SIMULATED", help="Measure how well two files of sessions can be told apart."),
    ] = None,
    sandbox: Sandbox = "ns",
    sandbox_url: SandboxUrl = "",
    every: All = False,
    as_json: Json = False,
) -> int:
    """Verify tasks again, or compare simulated sessions with recorded ones of production."""
    if folder is not None and fidelity is None:
        sandboxes = sandbox_config(sandbox, sandbox_url)
        from etude.cli.actions.check_tasks import check_tasks

        return 0 if check_tasks(folder, sandboxes, every=every, as_json=as_json) else ExitCode.USER_ERROR
    if fidelity is None or folder is not None:
        raise ConfigError("check what? give a folder of tasks, or --fidelity PRODUCTION SIMULATED")
    from etude.cli.actions.check_tasks import compare_sessions

    compare_sessions(*fidelity, as_json=as_json)
    return 0


@app.command("ls")
def list_tasks(
    source: Annotated[Path, typer.Argument(help="A recipe, or a folder of tasks.")],
    *,
    split: Split = "train",
    count: Annotated[int, typer.Option(help="Number of tasks.")] = 3,
) -> None:
    """Print some training or held-out tasks, and the number of both."""
    from etude.cli.actions.list_tasks import show_tasks

    show_tasks(source, split, count)


@app.command("features")
def list_features() -> None:
    """Print the features of Harbor's format, and whether étude supports each."""
    from etude.tasks.harbor.features import markdown

    print(markdown(), end="")


@app.command("export")
def export_command(
    source: Annotated[Path, typer.Argument(help="A recipe, or a folder of tasks built from repositories.")],
    out: Annotated[Path, typer.Argument(help="Folder in which a folder is made for each task.")],
    *,
    split: Split = "train",
    count: Annotated[int, typer.Option(help="Number of tasks.")] = 10,
) -> int:
    """Write tasks in Harbor's format; a task built from a repository includes its solution in ``solution/``."""
    from etude.cli.actions.export_tasks import export_tasks

    return export_tasks(source, out, split, count)
