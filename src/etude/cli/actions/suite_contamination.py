"""The findings of `etude suite contamination`: traces of a suite in training texts, and in the memory of a model."""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from etude.cli.actions.build_suite import halves_of, traces_in
from etude.cli.console import OUT
from etude.dashboard.formatting import visible
from etude.gateway.upstream.calls import Upstream
from etude.run.model_calls import ask_each
from etude.taskgen.history.completions import MemoryCheck, check_memory
from etude.taskgen.history.contamination import Traces


def show_contamination(
    suite: Path, texts: Path | None, upstream: Upstream | None, *, concurrency: int, as_json: bool
) -> bool:
    """Search training texts, test a model, and print what was found; ``True`` if anything was."""
    traces = None if texts is None else traces_in(suite, texts)
    memory = None if upstream is None else _memory_of(upstream, suite, concurrency)
    if as_json:
        tree = {**(asdict(traces) if traces else {}), "memory": asdict(memory) if memory else None}
        sys.stdout.write(json.dumps(tree, indent=2) + "\n")
    else:
        for line in [*(_trace_lines(traces) if traces else ()), *(_memory_lines(memory) if memory else ())]:
            OUT.out(visible(line))
    in_texts = traces is not None and bool(traces.canary_in or traces.tasks)
    return in_texts or (memory is not None and memory.is_remembered)


def _memory_of(upstream: Upstream, suite: Path, concurrency: int) -> MemoryCheck:
    """Let a model finish hidden tests of a suite, with and without their place."""
    halves = halves_of(suite)
    prompts = [instruction for half in halves for instruction in half.instructions]
    answers = asyncio.run(ask_each(upstream, prompts, concurrency=concurrency))
    return check_memory(halves, list(zip(answers[::2], answers[1::2], strict=True)))


def _trace_lines(traces: Traces) -> Iterator[str]:
    yield from (f"{file} has the suite's canary" for file in traces.canary_in)
    for each in traces.tasks:
        yield f"{each.task_id} {each.share:.1%} of its words in a row, most in {each.file}"
    yield f"{len(traces.tasks)} tasks with traces in {traces.files} files"


def _memory_lines(memory: MemoryCheck) -> Iterator[str]:
    for each in memory.tests:
        if each.guided > each.general:
            yield f"{each.task_id} {each.guided:.2f} like its test where that is named, {each.general:.2f} otherwise"
    gain = memory.difference
    yield (
        f"{len(memory.tests)} tests finished: {gain.value:+.3f} in ROUGE-L where their place is named "
        f"({gain.low:+.3f} to {gain.high:+.3f}), which is {'memory' if memory.is_remembered else 'no sign of memory'}"
    )
