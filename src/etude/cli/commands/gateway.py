"""`etude gateway`: the gateway of a run, or a gateway without a run in front of any engines. Owns the options."""

import json
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import group, process_name
from etude.errors import ConfigError

app = group()


@app.command()
def gateway(
    *,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Serve as one process of this run.")] = None,
    replica: Annotated[
        int, typer.Option(metavar="N", min=0, max=999_999, help="With --run: number of the replica.")
    ] = 0,
    region: Annotated[str, typer.Option(help="With --run: region of its fleet (default: home).")] = "",
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint folder: its tokenizer and chat template.")
    ] = None,
    engine: Annotated[
        list[str],
        typer.Option(
            metavar="URL[@REGION]",
            default_factory=list,
            show_default=False,
            help="URL of an engine of `etude serve`; may be repeated. A vLLM server's own port is not one.",
        ),
    ],
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: any that is free).")] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of callers (default: one key, which is printed).")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM certificate; with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM private key.")] = None,
    payloads: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record the sampling masks of top-p and top-k.")
    ] = None,
    access_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line of JSON per call, without its texts.")
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="gateway.KEY=VALUE",
            default_factory=list,
            show_default=False,
            help="Set any other key of the gateway.",
        ),
    ],
) -> None:
    """Serve the gateway of a run, or a gateway without a run in front of your engines."""
    named = {"port": port, "keys": keys, "tls_cert": tls_cert, "tls_key": tls_key}
    others = {"engine": engine, "payloads": payloads, "access_log": access_log, "set": overrides, "model": model}
    if run is not None:
        ignored = [name for name, value in (named | others).items() if value not in (None, [])]
        if ignored:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
            raise ConfigError(f"{options} would have no effect with --run: a run keeps its recipe")
        name = process_name("gateway", replica, region)
        from etude.run.processes import run_process
        from etude.run.working_folder import open_run_folder

        run_process(name, open_run_folder(run, process=name))
        return
    if replica or region:
        raise ConfigError("--replica and --region would have no effect without --run: only a run has several gateways")
    if model is None:
        raise ConfigError("which gateway? give --run RUN, or --model DIR and --engine http://HOST:PORT")
    if not engine:
        raise ConfigError("which engines? give --engine http://HOST:PORT, once for each")
    from etude.run.gateway import StandaloneOptions, run_standalone

    given = {
        name: value if isinstance(value, int) else str(value) for name, value in named.items() if value is not None
    }
    settings = [f"gateway.{name}={json.dumps(value)}" for name, value in given.items()]
    run_standalone(
        StandaloneOptions(
            model=model,
            engines=tuple(engine),
            payloads=payloads,
            access_log=access_log,
            settings=(*overrides, *settings),
        )
    )
