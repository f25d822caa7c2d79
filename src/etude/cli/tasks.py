"""``etude tasks|images|sandboxes``: tasks and the machines that they are worked on in."""

import argparse
from pathlib import Path

from etude.cli.options import SANDBOXES, USER_ERROR, Commands
from etude.config.loading import is_recipe, load_recipe
from etude.config.tasks import SandboxConfig
from etude.errors import ConfigError


def add_commands(commands: Commands) -> None:
    """Add the commands of this part."""
    _add_tasks(commands)
    _add_images(commands)
    _add_sandboxes(commands)


def _add_tasks(commands: Commands) -> None:
    tasks = commands.add_parser("tasks", help="make tasks of a repository, prove tasks, look at them")
    actions = tasks.add_subparsers(required=True, metavar="ACTION")
    build = actions.add_parser("build", help="make tasks of a repository: deleted features and planted bugs")
    build.add_argument("repository", help="a folder, a git URL, an archive, or pypi:NAME==VERSION")
    build.add_argument("--out", type=Path, default=Path("tasks"), help="folder of tasks; a second build goes on")
    build.add_argument("--limit", type=int, default=100, help="tasks to make of it, at most")
    build.add_argument("--base", default="", help="stored base system (default: the sandboxes' own)")
    build.add_argument("--before", default="", metavar="DATE", help="install nothing that was published later")
    build.add_argument("--seed", type=int, default=0, help="of bugs and of the order of tests")
    build.add_argument("--unprobed", action="store_true", help="make tasks that have canaries and no probe, too")
    build.add_argument("--installer", metavar="URL", help="an OpenAI-compatible API whose model installs what is hard")
    build.add_argument("--model", default="", help="of the installer; its key is in ETUDE_INSTALLER_KEY")
    check = actions.add_parser("check", help="prove tasks again, or compare recorded sessions with production's")
    check.add_argument("folder", type=Path, nargs="?", help="tasks built from repositories, or in Harbor's format")
    check.add_argument(
        "--fidelity", type=Path, nargs=2, metavar=("PRODUCTION", "SIMULATED"), help="how well they can be told apart"
    )
    for action in (build, check):
        action.add_argument("--sandbox", choices=SANDBOXES[1:], default="ns", help="where commands run")
        action.add_argument("--sandbox-url", default="", help="of a remote server of sandboxes")
        action.add_argument("--json", action="store_true", help="print the whole report")
    listing = actions.add_parser("ls", help="print some tasks")
    listing.add_argument("source", type=Path, help="a recipe, or a folder of tasks")
    listing.add_argument("--split", choices=("train", "heldout"), default="train")
    listing.add_argument("--count", type=int, default=3)
    export = actions.add_parser("export", help="write tasks in Harbor's format")
    export.add_argument("source", type=Path, help="a recipe, or a folder of tasks built from repositories")
    export.add_argument("out", type=Path, help="a folder for each task is made in it")
    export.add_argument("--split", choices=("train", "heldout"), default="train")
    export.add_argument("--count", type=int, default=10)
    export.set_defaults(command=_export)
    build.set_defaults(command=_build)
    check.set_defaults(command=_check)
    listing.set_defaults(command=_ls)


def _add_images(commands: Commands) -> None:
    images = commands.add_parser("images", help="base systems and images that sandboxes start from")
    actions = images.add_subparsers(required=True, metavar="ACTION")
    build = actions.add_parser("build", help="build a base system, with kernel, from Debian's packages")
    build.add_argument("name", nargs="?", default="debian")
    build.add_argument("--package", action="append", default=[], help="a package more, as often as there are any")
    listing = actions.add_parser("ls", help="list them")
    remove = actions.add_parser("rm", help="remove one, and layers that nothing needs any more")
    remove.add_argument("name")
    for action, name in ((build, "build"), (listing, "ls"), (remove, "rm")):
        action.set_defaults(command=_images, action=name)


def _add_sandboxes(commands: Commands) -> None:
    sandboxes = commands.add_parser("sandboxes", help="lend sandboxes over HTTP; ask one what it looks like")
    actions = sandboxes.add_subparsers(required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="until told to stop; clients use sandboxes.kind = 'remote'")
    serve.add_argument("--kind", choices=SANDBOXES[1:-1], default="ns")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8700)
    serve.add_argument("--folder", type=Path, action="append", default=[], help="whose files clients may mount")
    serve.add_argument("--allow", action="append", default=[], metavar="HOST:PORT", help="what sandboxes may reach")
    serve.add_argument("--clients", type=Path, metavar="FILE", help="keys of many clients, what each may name and have")
    serve.set_defaults(command=_serve)
    probe = actions.add_parser("probe", help="what a sandbox says of itself, and how another one differs from it")
    probe.add_argument("--sandbox", choices=SANDBOXES[1:], default="ns", help="remote asks the product's own machines")
    probe.add_argument("--sandbox-url", default="", help="of a remote server of sandboxes")
    probe.add_argument("--against", type=Path, metavar="FILE", help="what `probe` printed elsewhere, say in production")
    probe.set_defaults(command=_probe)


def _build(options: argparse.Namespace) -> int:
    import os

    from etude.cli.commands import tasks as environments
    from etude.cli.commands.build_tasks import BuildOptions
    from etude.taskgen.installer import InstallerOptions
    from etude.taskgen.preparation import Settings

    if bool(options.installer) != bool(options.model):
        raise ConfigError("--installer and --model go together: where the model is, and which")
    installer = None
    if options.installer:
        key = os.environ.get("ETUDE_INSTALLER_KEY", "")
        installer = InstallerOptions(url=options.installer, model=options.model, api_key=key)
    build = BuildOptions(
        reference=options.repository,
        out=options.out,
        limit=options.limit,
        unprobed=options.unprobed,
        settings=Settings(base=options.base, before=options.before, seed=options.seed),
        installer=installer,
    )
    environments.build_tasks(build, _sandbox_config(options), as_json=options.json)
    return 0


def _check(options: argparse.Namespace) -> int:
    if (options.folder is None) == (options.fidelity is None):
        raise ConfigError("check what? give a folder of tasks, or --fidelity PRODUCTION SIMULATED")
    from etude.cli.commands import tasks as environments

    if options.fidelity is not None:
        environments.audit_fidelity(*options.fidelity, as_json=options.json)
        return 0
    sound = environments.check_tasks(options.folder, _sandbox_config(options), as_json=options.json)
    return 0 if sound else USER_ERROR


def _ls(options: argparse.Namespace) -> int:
    from etude.cli.commands.list_tasks import task_lines
    from etude.cli.commands.tasks import folder_lines

    source: Path = options.source
    if is_recipe(source):
        lines = list(task_lines(load_recipe(source), options.split, options.count))
    else:
        lines = folder_lines(source, options.split, options.count)
    print("\n".join(lines))
    return 0


def _export(options: argparse.Namespace) -> int:
    from etude.cli.commands.tasks import export_tasks

    return 0 if export_tasks(options.source, options.out, options.split, options.count) else USER_ERROR


def _images(options: argparse.Namespace) -> int:
    from etude.cli.commands import tasks as environments

    match options.action:
        case "build":
            environments.build_images(options.name, options.package)
        case "ls":
            environments.show_images()
        case _:
            environments.remove_images(options.name)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from etude.cli.commands.tasks import Lending, serve_sandboxes

    serve_sandboxes(
        Lending(
            sandboxes=SandboxConfig(kind=options.kind),
            host=options.host,
            port=options.port,
            folders=tuple(options.folder),
            allow=tuple(options.allow),
            clients=options.clients,
        )
    )
    return 0


def _probe(options: argparse.Namespace) -> int:
    from etude.cli.commands.tasks import probe_world

    return USER_ERROR if probe_world(_sandbox_config(options), options.against) else 0


def _sandbox_config(options: argparse.Namespace) -> SandboxConfig:
    try:
        given = {"options": {"url": options.sandbox_url}} if options.sandbox_url else {}
        return SandboxConfig.model_validate({"kind": options.sandbox, **given})
    except ValueError as error:
        raise ConfigError("--sandbox remote and --sandbox-url go together") from error
