"""`etude sandboxes`: serves this machine's sandboxes over HTTP, drains such a server, or describes a sandbox.

Owns the options; the modules that it imports do the rest.
"""

from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import group, process_name
from etude.cli.sandbox_options import SandboxUrl, sandbox_config
from etude.config.tasks import LentKind, MachineKind, SandboxConfig
from etude.errors import ConfigError
from etude.run.process_name import SANDBOXES

app = group()


@app.command()
def serve(
    *,
    kind: Annotated[LentKind, typer.Option(help="Kind of sandbox.")] = "ns",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8700,
    folder: Annotated[
        list[Path],
        typer.Option(
            default_factory=list, show_default=False, help="Folder whose files clients may mount; may be repeated."
        ),
    ],
    allow: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT", default_factory=list, show_default=False, help="Place that sandboxes may reach."
        ),
    ],
    clients: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with keys of many clients, their rights and limits.")
    ] = None,
    sandboxes: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most sandboxes for the only key; 0: one per 64 MiB of memory.")
    ] = 0,
    pool: Annotated[
        int, typer.Option(metavar="N", min=0, help="Most sandboxes in a warm pool, those in use included; 0: no pool.")
    ] = 0,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run on a fleet whose external harness may reach its gateways from here."),
    ] = None,
    announce: Annotated[
        str,
        typer.Option(metavar="STORE", help="Store of a fleet's region, where a run finds the address of this host."),
    ] = "",
    replica: Annotated[
        int, typer.Option(metavar="N", min=0, max=999_999, help="With --announce: number of the host in its region.")
    ] = 0,
    region: Annotated[str, typer.Option(help="With --announce: region of the fleet (default: home).")] = "",
) -> None:
    """Serve sandboxes over HTTP until stopped or drained; clients set sandboxes.kind = 'remote'.

    Without a key in ETUDE_SANDBOXES_KEY, one is made and shown. When stopped, open sandboxes get a few seconds to end.
    """
    if clients is not None and (folder or allow or sandboxes or run is not None):
        raise ConfigError(
            "--clients FILE sets the rights of each client: write folders, allow and sandboxes into it, or leave it "
            "out; --run is for a server with one key"
        )
    if (replica or region) and not announce:
        raise ConfigError("--replica and --region would have no effect without --announce: they name a fleet's host")
    name = process_name(SANDBOXES.command, replica, region)
    from etude.cli.actions.lend_sandboxes import SandboxLending, lend

    lend(
        SandboxLending(
            sandboxes=SandboxConfig(kind=kind, pool_size=pool),
            host=host,
            port=port,
            clients=clients,
            rights={"folders": folder, "allow": allow, **({"sandboxes": sandboxes} if sandboxes else {})},
            run=run,
            announced_in=announce,
            name=name,
        )
    )


@app.command()
def drain(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server of sandboxes, such as http://host:8700.")],
) -> None:
    """Let a server make no new sandboxes and end after its last one; wait for that.

    The key in ETUDE_SANDBOXES_KEY must be the server's only one, or an operator's (--clients FILE).
    """
    from etude.cli.actions.lend_sandboxes import drain_server

    drain_server(url)


@app.command("probe")
def probe_command(
    *,
    sandbox: Annotated[MachineKind, typer.Option(help="Kind of sandbox; remote is the product's machines.")] = "ns",
    sandbox_url: SandboxUrl = "",
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of this command on another machine.")
    ] = None,
) -> int:
    """Print a description of a sandbox (versions, limits, tools), or its differences from another one."""
    sandboxes = sandbox_config(sandbox, sandbox_url)
    from etude.cli.actions.probe_sandbox import show_probe

    return show_probe(sandboxes, against)
