"""``python -m bench NAME [--json]``: measure a claim on this machine.

A bench is a module with three functions: ``add_options`` names its options, ``run`` measures and returns the bench
object (:func:`bench.report.envelope`), ``table`` draws that object for people.
"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast

from etude.errors import EtudeError, ExitCode, InfrastructureError
from etude.types import Json

BENCHES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "loop": ("loop.bench", "time to one held-out pass rate, asynchronous, synchronous, and by TRL"),
        "trainer": ("trainer.bench", "tokens per second of an optimiser step beside transformers' Trainer"),
        "memory": ("memory.bench", "bytes of a training step: what the plan says beside what torch holds"),
        "roofline": (
            "roofline.bench",
            "predicted shares of a GPU's bandwidth and peak, with the assumptions behind them",
        ),
        "losses": ("losses.bench", "value and gradient of every loss beside TRL's and verl's own code"),
        "weights": ("weights.bench", "delta codecs and publishing, against other systems' codecs and memcpy"),
        "sync": ("sync.bench", "from a step's end to the last engine, over emulated long-distance links"),
        "engine": ("engine.bench", "tokens per CPU second beside vLLM and transformers, weight swaps, prefix reuse"),
        "numerics": ("numerics.bench", "how far the trainer's logprobs are from the engine's; what replay removes"),
        "quantised": ("trials.quantised", "what RL learns with experts in FP8, MXFP8 and NVFP4, against bfloat16"),
        "hints": ("trials.hints", "how fast a bad habit goes by a hint on its turn, against reward alone"),
        "summaries": ("trials.summaries", "what RL learns with summaries, untrained ones, none, with room for all"),
        "exploration": ("trials.exploration", "which skills RL finds, by how rarely they were imitated; what helps"),
        "selection": (
            "selection.bench",
            "steps and rollouts to one pass rate, with tasks chosen and groups sampled again",
        ),
        "science": ("science.bench", "the ablations that papers report, seed by seed, in one small laboratory"),
        "gateway": ("gateway.bench", "calls per second and what each costs, beside LiteLLM's proxy and a bare one"),
        "sandbox": ("sandbox.bench", "starting sandboxes, how many live, beside bubblewrap, crun, podman, gVisor"),
        "burst": ("burst.bench", "a hundred thousand sandboxes asked for at once, over 2,000 modelled hosts"),
        "lending": ("lending.bench", "machines lent by production: its first tokens with and without; recalls"),
        "grading": ("grading.bench", "attacks on graders, and honest solutions: what is accepted"),
        "templates": ("templates.bench", "chat templates of llama.cpp, vLLM and TRL: tool calls that are read back"),
        "fleet": ("fleet.bench", "one run over five regions, and six things that go wrong while it trains"),
        "live": ("live.bench", "from a signal to released weights: stages, losses, false decisions, rollback"),
        "ui": ("ui.bench", "the live page of 10,000 steps: opening it, filtering 100,000 rollouts, what it costs"),
        "startup": ("startup.bench", "processor time of commands that need no model, `etude --help` above all"),
        "plan": (
            "plan.bench",
            "busy shares and step times that `etude plan run` predicts, beside measured ones",
        ),
        "recipes": ("trials.recipes", "recipes run again at new seeds, held against what was committed"),
        "simulation": (
            "simulation.bench",
            "seeded faults in virtual time, over the code of production: violations, and planted bugs that are found",
        ),
        "soak": ("simulation.soak", "many hours of a run under fire in virtual time: memory, handles, tasks that grow"),
        "faults": ("faults.bench", "a thousand faults in short runs: what is lost, doubled or wrongly scored"),
    }
)
"""Name → the bench's module below ``bench``, and what it measures."""


class Bench(Protocol):
    """A bench's module."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Name the options."""

    def run(self, options: argparse.Namespace) -> dict[str, Json]:
        """Measure, and return the bench object."""

    def table(self, result: dict[str, Json]) -> str:
        """Draw a bench object."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one bench and return the exit status; errors of the user are one line, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = build_parser().parse_args(given[:1]).name
    bench = cast(Bench, import_module(f"bench.{BENCHES[name][0]}"))
    options = options_parser(name, bench).parse_args(given[1:])
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # asyncio takes that well
    try:
        result = {"command": shlex.join(("python", "-m", "bench", *given))} | bench.run(options)
    except EtudeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return ExitCode.FAILED if isinstance(error, InfrastructureError) else ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print(f"bench: {name} was interrupted before anything was measured", file=sys.stderr)
        return ExitCode.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    result = {"bench": name, "command": shlex.join(["python", "-m", "bench", *given]), **result}
    print(json.dumps(result, indent=2) if options.json else bench.table(result))
    return ExitCode.INTERRUPTED if result.get("interrupted") else 0


def build_parser() -> argparse.ArgumentParser:
    """Parse the name alone: a bench's own options take the import of its module."""
    listed = "\n".join(f"  {name:<10} {text}" for name, (_, text) in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure a claim on this machine.",
        epilog=f"benches:\n{listed}\n\npython -m bench NAME --help lists the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=BENCHES)
    return parser


def options_parser(name: str, bench: Bench) -> argparse.ArgumentParser:
    """Parse the options of one bench."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=BENCHES[name][1])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    bench.add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
