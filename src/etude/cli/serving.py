"""``etude gateway|keys|chat``: the door to the model, who may come in, and talking through it."""

import argparse
import json
import sys
from pathlib import Path

from etude.cli.options import Commands
from etude.cli.runs import run_process
from etude.errors import ConfigError


def add_commands(commands: Commands) -> None:
    """Add the commands of this part."""
    _add_gateway(commands)
    _add_keys(commands)
    _add_chat(commands)


def _add_gateway(commands: Commands) -> None:
    gateway = commands.add_parser("gateway", help="the door for harnesses: of a run, or alone in front of any engines")
    whose = gateway.add_mutually_exclusive_group(required=True)
    whose.add_argument("--run", type=Path, metavar="DIR", help="one process of this run")
    whose.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint folder: its tokenizer and chat template")
    gateway.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL[@REGION]",
        help="an engine as `etude serve` serves it, or several; a vLLM's own port speaks OpenAI's API and is none",
    )
    gateway.add_argument("--port", type=int, help="to listen on (default: any that is free)")
    gateway.add_argument("--keys", type=Path, metavar="FILE", help="who may call (default: one key, which is printed)")
    gateway.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate; with --tls-key")
    gateway.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM private key")
    gateway.add_argument("--payloads", type=Path, metavar="DIR", help="keep what top-p and top-k left to draw from")
    gateway.add_argument("--access-log", type=Path, metavar="FILE", help="a line of JSON per call, never what was said")
    gateway.add_argument("--set", action="append", default=[], metavar="gateway.KEY=VALUE", help="any other setting")
    gateway.set_defaults(command=_gateway)


def _add_keys(commands: Commands) -> None:
    keys = commands.add_parser("keys", help="who may call a gateway")
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    parsers = {}
    for action, text in (
        ("add", "make a key; its secret is printed once"),
        ("ls", "list the keys"),
        ("revoke", "take a key out"),
    ):
        parsers[action] = actions.add_parser(action, help=text)
        parsers[action].add_argument("file", type=Path, help="the file of keys")
        parsers[action].set_defaults(command=_keys, action=action)
    parsers["add"].add_argument("--scope", choices=("production", "admin"), default="production")
    parsers["add"].add_argument("--label", default="", help="what it is for")
    parsers["add"].add_argument("--requests-per-minute", type=int, help="budget (default: none)")
    parsers["add"].add_argument("--tokens-per-minute", type=int, help="budget (default: none)")
    parsers["add"].add_argument("--expires-s", type=float, help="seconds until it is dead (default: never)")
    parsers["revoke"].add_argument("key", help="its id, or the beginning of it")


def _add_chat(commands: Commands) -> None:
    chat = commands.add_parser("chat", help="talk with the newest weights; says which version answered")
    chat.add_argument("run", nargs="?", type=Path, help="the run folder")
    chat.add_argument("--url", help="a gateway, instead of a run")
    chat.add_argument("--key", help="a key for it")
    chat.set_defaults(command=_chat)


def _gateway(options: argparse.Namespace) -> int:
    names = ("engine", "port", "keys", "tls_cert", "tls_key", "payloads", "access_log", "set")
    if options.run is not None:
        ignored = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, [])]
        if ignored:
            raise ConfigError(f"{', '.join(ignored)} would have no effect with --run: a run keeps its recipe")
        return run_process(argparse.Namespace(process="gateway", run=options.run, seat=0))
    if not options.engine:
        raise ConfigError("which engines? give --engine http://HOST:PORT, as often as there are any")
    from etude.run.gateway import StandaloneOptions, run_standalone

    told = {name: getattr(options, name) for name in ("port", "keys", "tls_cert", "tls_key")}
    settings = [f"gateway.{name}={json.dumps(str(value))}" for name, value in told.items() if value is not None]
    if options.port is not None:
        settings[0] = f"gateway.port={options.port}"
    run_standalone(
        StandaloneOptions(
            model=options.model,
            engines=tuple(options.engine),
            payloads=options.payloads,
            access_log=options.access_log,
            settings=(*options.set, *settings),
        )
    )
    return 0


def _keys(options: argparse.Namespace) -> int:
    from etude.cli.commands import keys

    if options.action == "ls":
        from etude.cli.commands.show import console

        keys.show_keys(options.file, console())
    elif options.action == "revoke":
        keys.revoke_key(options.file, options.key)
    else:
        bounds = (options.requests_per_minute, options.tokens_per_minute)
        key_id, secret = keys.add_key(options.file, options.scope, options.label, bounds, options.expires_s)
        print(f"key {key_id}, scope {options.scope}; this is shown once:", file=sys.stderr)
        print(secret)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from etude.cli.commands.chat import chat_with, chat_with_run
    from etude.run.folder import RunFolder

    if (options.run is None) == (options.url is None):
        raise ConfigError("talk with what? give a run folder, or --url URL --key KEY")
    if (options.url is None) != (options.key is None):
        raise ConfigError("--url and --key go together: a run's own key is in its folder")
    if options.url is not None:
        chat_with(options.url, options.key)
    else:
        chat_with_run(RunFolder.open(options.run))
    return 0
