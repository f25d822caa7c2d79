"""``python -m bench NAME``: measure a claim on this machine."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from bench.programs import PYTHON_PATH
from etude.cli.options import FAILED, USER_ERROR, names
from etude.errors import EtudeError, InfrastructureError
from etude.types import Json

Measured: TypeAlias = tuple[dict[str, Json], Callable[[dict[str, Json]], str]]
"""A bench object, and how it is drawn for people."""
TRIALS: Mapping[str, str] = MappingProxyType(
    {"quantised": "quickstart", "hints": "quickstart", "summaries": "self-summary"}
)
"""Bench of whole runs → the recipe that it runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one bench and return the exit status; errors of the user are one line, never a traceback."""
    os.environ["PYTHONPATH"] = PYTHON_PATH  # of the programs that it starts
    options = build_parser().parse_args(arguments)
    try:
        return run_bench(options)
    except EtudeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return FAILED if isinstance(error, InfrastructureError) else USER_ERROR


def build_parser() -> argparse.ArgumentParser:
    """Every bench and its options."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure a claim on this machine.")
    benches = parser.add_subparsers(required=True, metavar="NAME")
    parsers = {}
    for name, text in (
        ("loop", "time to one held-out pass rate, asynchronous, synchronous, and by TRL"),
        ("trainer", "tokens per second of an optimiser step beside transformers' Trainer, and share of the peak"),
        ("losses", "value and gradient of every loss beside TRL's and verl's own code"),
        ("weights", "delta codecs and publishing, against other systems' codecs and memcpy"),
        ("sync", "from a step's end to the last engine, over emulated long-distance links"),
        ("engine", "tokens per CPU second beside vLLM and transformers, weight swaps, prefix reuse"),
        ("numerics", "how far the trainer's logprobs are from the engine's, and what replay removes"),
        ("quantised", "what RL learns with experts in FP8, MXFP8 and NVFP4, against bfloat16"),
        ("hints", "how fast a bad habit goes by a hint on the turn that has it, against reward alone"),
        ("summaries", "what RL learns with summaries, without training on them, without any, with room for all"),
        ("gateway", "calls per second and what each costs, beside LiteLLM's proxy and one that does nothing"),
        ("sandbox", "starting sandboxes, how many live, what they leave, beside bubblewrap, crun, podman and gVisor"),
        ("grading", "attacks on graders, and honest solutions: what is accepted"),
        ("templates", "chat templates of llama.cpp, vLLM and TRL: whose tool calls are read back"),
        ("faults", "a thousand things that go wrong in short runs: what is lost, doubled or wrongly scored"),
    ):
        parsers[name] = benches.add_parser(name, help=text)
        parsers[name].add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        parsers[name].set_defaults(name=name)
    loop = parsers["loop"]
    loop.add_argument("--steps", type=int, help="optimiser steps per contestant (default: 60)")
    loop.add_argument("--marks", type=int, help="versions of each that are measured (default: 6); 0: speed alone")
    loop.add_argument("--quality", action="store_true", help="instead: what staleness costs, over seeds, in hours")
    loop.add_argument("--recipe", type=Path, default=Path("recipes/quickstart"), help="of --quality")
    loop.add_argument("--out", type=Path, default=Path("runs/bench-loop"), help="of --quality: keeps its runs; goes on")
    loop.add_argument("--seeds", type=int, default=3, help="of --quality: how many")
    parsers["weights"].add_argument("--size-gb", type=float, default=2.0, help="size of the tiled state")
    parsers["engine"].add_argument("--threads", type=int, default=1, help="of each contestant, on a core each")
    for name, recipe in TRIALS.items():
        trials = parsers[name]
        trials.add_argument("--recipe", type=Path, default=Path("recipes") / recipe, help="what is learnt")
        trials.add_argument("--out", type=Path, default=Path(f"runs/bench-{name}"), help="keeps the runs; goes on")
        trials.add_argument("--seeds", type=int, default=3, help="how many")
        trials.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override its recipe"
        )
    parsers["quantised"].add_argument("--formats", metavar="A,B,…", help="only these (default: all)")
    parsers["summaries"].add_argument("--contestants", metavar="A,B,…", help="only these arms (default: all)")
    parsers["hints"].add_argument("--weight", type=float, default=0.1, help="of hints, beside reward (default: 0.1)")
    parsers["templates"].add_argument("--from", type=Path, dest="folder", metavar="DIR", help="has the archives")
    faults = parsers["faults"]
    faults.add_argument("--faults", type=int, help="how many (default: 1000, or 50 with --quick)")
    faults.add_argument("--seed", type=int, default=0, help="of what goes wrong and when")
    faults.add_argument("--out", type=Path, help="keeps each run's verdict; goes on (default: runs/bench-faults-…)")
    faults.add_argument("--quick", action="store_true", help="see that it runs, in minutes")
    parsers["sandbox"].add_argument("--cycles", type=int, help="of start and kill, before looking for leaks")
    for name in ("loop", "trainer", "losses", "engine", "numerics", "gateway", "sandbox", "grading"):
        parsers[name].add_argument("--quick", action="store_true", help="see that it runs, in seconds")
        parsers[name].add_argument("--contestants", metavar="A,B,…", help="only these (default: all)")
    return parser


def run_bench(options: argparse.Namespace) -> int:
    """Measure and print."""
    result, table = (_run_trials if options.name in TRIALS else _run_once)(options)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


def _run_once(options: argparse.Namespace) -> Measured:
    """A bench that measures all in one sitting."""
    match options.name:
        case "loop" if options.quality:
            from bench.loop.quality import bench_quality, table

            result = bench_quality(options.recipe, options.out, seeds=range(options.seeds))
        case "loop":
            from bench.loop.bench import bench_loop, table
            from bench.loop.contestants import loop_options

            result = bench_loop(
                loop_options(names(options.contestants), steps=options.steps, marks=options.marks, quick=options.quick)
            )
        case "trainer":
            from bench.trainer.bench import bench_trainer, table, trainer_options

            result = bench_trainer(trainer_options(names(options.contestants), quick=options.quick))
        case "losses":
            from bench.losses.bench import bench_losses, losses_options, table

            result = bench_losses(losses_options(names(options.contestants), quick=options.quick))
        case "weights":
            from bench.weights.bench import bench_weights, table

            result = bench_weights(size_gb=options.size_gb)
        case "engine":
            from bench.engine.bench import bench_engine, table
            from bench.engine.options import engine_options

            result = bench_engine(
                engine_options(names(options.contestants), quick=options.quick, threads=options.threads)
            )
        case "numerics":
            from bench.numerics.bench import bench_numerics, numerics_options, table

            result = bench_numerics(numerics_options(names(options.contestants), quick=options.quick))
        case "gateway":
            from bench.gateway.bench import bench_gateway, gateway_options, table

            result = bench_gateway(gateway_options(names(options.contestants), quick=options.quick))
        case "sandbox":
            from bench.sandbox.bench import bench_sandbox, sandbox_options, table

            result = bench_sandbox(
                sandbox_options(names(options.contestants), quick=options.quick, cycles=options.cycles)
            )
        case "grading":
            from bench.grading.bench import bench_grading, grading_options, table

            result = bench_grading(grading_options(names(options.contestants), quick=options.quick))
        case "templates":
            from bench.templates.bench import bench_templates, table

            result = bench_templates(options.folder)
        case "faults":
            from bench.faults.bench import bench_faults, fault_options, table

            result = bench_faults(
                fault_options(options.faults, seed=options.seed, out=options.out, quick=options.quick)
            )
        case "sync":
            from bench.sync.bench import bench_sync, table

            result = bench_sync()
        case other:
            raise AssertionError(f"no bench {other!r}")
    return result, table


def _run_trials(options: argparse.Namespace) -> Measured:
    """A bench of whole runs, seed by seed, which are kept."""
    seeds = range(options.seeds)
    match options.name:
        case "quantised":
            from bench.trials.quantised import FORMATS, bench_quantised, table

            result = bench_quantised(
                options.recipe,
                options.out,
                seeds=seeds,
                formats=names(options.formats) or FORMATS,
                overrides=options.set,
            )
        case "hints":
            from bench.trials.hints import bench_hints, table

            result = bench_hints(options.recipe, options.out, seeds=seeds, weight=options.weight, overrides=options.set)
        case "summaries":
            from bench.trials.summaries import ARMS, bench_summaries, table

            result = bench_summaries(
                options.recipe,
                options.out,
                seeds=seeds,
                arms=names(options.contestants) or ARMS,
                overrides=options.set,
            )
        case other:
            raise AssertionError(f"no bench {other!r}")
    return result, table


if __name__ == "__main__":
    sys.exit(main())
