"""`etude sandboxes`: lend this machine's sandboxes over HTTP; ask one what it looks like."""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from etude.cli.options import group
from etude.config.tasks import LentKind, MachineKind, SandboxConfig
from etude.errors import ConfigError, ExitCode
from etude.protocols import SandboxProvider
from etude.run.serving import listening, run_until_signal
from etude.run.task_sandboxes import base_store, open_provider
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.providers import KEY_VARIABLE
from etude.sandboxes.remote.principals import SandboxClient, parse_client, read_clients
from etude.sandboxes.remote.server import SandboxServer
from etude.taskgen.fidelity.probes import diff, probe, render_diff

OUT, PROGRESS = Console(), Console(stderr=True)
"""Results, and the log of what goes on."""
SandboxUrl: TypeAlias = Annotated[str, typer.Option(metavar="URL", help="A remote server of sandboxes.")]

app = group()


@app.command()
def serve(
    *,
    kind: Annotated[LentKind, typer.Option(help="Kind of sandbox.")] = "ns",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8700,
    folder: Annotated[
        list[Path], typer.Option(default_factory=list, help="Folder whose files clients may mount; may be repeated.")
    ],
    allow: Annotated[
        list[str], typer.Option(metavar="HOST:PORT", default_factory=list, help="Place that sandboxes may reach.")
    ],
    clients: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of many clients, and what each may name and have.")
    ] = None,
) -> None:
    """Lend sandboxes over HTTP until told to stop; clients use sandboxes.kind = 'remote'.

    Without a key in the environment, one is made and shown.
    """
    images = ImageStore().open
    if clients is not None and (folder or allow):
        raise ConfigError("--clients FILE says what each may name: write folders and allow there, or leave it out")
    sessions = read_clients(clients, images) if clients else {"client": _only_client(tuple(folder), tuple(allow))}
    run_until_signal(_serve(SandboxConfig(kind=kind), host, port, sessions), cleanup_s=None)


@app.command("probe")
def probe_command(
    *,
    sandbox: Annotated[MachineKind, typer.Option(help="Kind of sandbox; remote is the product's machines.")] = "ns",
    sandbox_url: SandboxUrl = "",
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output of this command elsewhere, say in production.")
    ] = None,
) -> int:
    """Print what a sandbox reports of itself, or how another one differs from it."""
    answers = asyncio.run(_probe(sandbox_config(sandbox, sandbox_url)))
    if against is None:
        OUT.out(json.dumps(answers, indent=1))
        return 0
    differences = diff(_read_answers(against), answers)
    OUT.out(render_diff(differences), highlight=False)
    return ExitCode.USER_ERROR if differences else 0


def sandbox_config(kind: str, url: str) -> SandboxConfig:
    """The sandboxes that a command was told to use. Raises :class:`~etude.errors.ConfigError`."""
    try:
        return SandboxConfig.model_validate({"kind": kind, **({"options": {"url": url}} if url else {})})
    except ValueError as error:
        raise ConfigError("--sandbox remote and --sandbox-url go together") from error


@contextlib.asynccontextmanager
async def opened_provider(sandboxes: SandboxConfig) -> AsyncIterator[SandboxProvider]:
    """The provider of sandboxes, closed afterwards."""
    provider = open_provider(sandboxes, base_store(sandboxes))
    try:
        yield provider
    finally:
        await provider.close()


def log(line: str) -> None:
    """Print what goes on, on stderr."""
    PROGRESS.out(line, highlight=False)


async def _probe(sandboxes: SandboxConfig) -> dict[str, str]:
    async with opened_provider(sandboxes) as provider:
        sandbox = await provider.create({})
        try:
            return await probe(sandbox)
        finally:
            await sandbox.close()


def _read_answers(file: Path) -> dict[str, str]:
    """The recorded answers of a sandbox. Raises :class:`~etude.errors.ConfigError` for a file of something else."""
    try:
        answers = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: {error}") from error
    if not isinstance(answers, dict) or not all(isinstance(answer, str) for answer in answers.values()):
        raise ConfigError(f"{str(file)!r} holds no answers of `etude sandboxes probe`: expected an object of strings")
    return answers


async def _serve(sandboxes: SandboxConfig, host: str, port: int, clients: dict[str, SandboxClient]) -> None:
    async with opened_provider(sandboxes) as provider:
        server = SandboxServer(provider, clients)
        async with listening(server.app(), port, host=host) as bound:
            log(f"lending {sandboxes.kind} sandboxes at http://{host}:{bound}")
            await asyncio.Event().wait()


def _only_client(folders: tuple[Path, ...], allow: tuple[str, ...]) -> SandboxClient:
    """The client with the key of the environment, or with one that is made here."""
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
    tree = {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "allow": allow, "folders": folders}
    client = parse_client("etude sandboxes serve", tree, ImageStore().open)
    if not os.environ.get(KEY_VARIABLE):
        log(f"{KEY_VARIABLE}={key}  (made for this server; set it to have your own)")
    return client
