"""The task that `etude play` shows, as the agent of a run solves it.

    version ──▶ engine ──▶ harness, sandbox, grader as in the run ──▶ each turn as it is sampled ──▶ the verdict

Owns what is printed. A task is played by :mod:`etude.run.playing`, and nothing of it is recorded.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.aio import background_task
from etude.cli.console import console
from etude.config.recipe import is_pass
from etude.dashboard.formatting import visible
from etude.dashboard.rollout_text import Block
from etude.dashboard.terminal import ACCENT, DIM, GOOD, WARN
from etude.engines.http import http_engines
from etude.errors import ConfigError
from etude.protocols import Completion, SamplingParams
from etude.run.data_copies import bring_data
from etude.run.folder import RunFolder
from etude.run.keys import KeyRole
from etude.run.playing import Stage, play
from etude.run.process_name import ENGINE
from etude.run.rollouts import heldout_tasks
from etude.run.serve_version import READY_S, ServedRun, serving_version, wait_until_ready
from etude.run.task_families import open_family
from etude.run.working_folder import open_run_folder
from etude.tokens.jinja import load_format
from etude.tokens.messages import ChatFormat
from etude.types import Rollout, RolloutStatus, Task, TokenIds, as_list

WIDE = 120
"""Columns from which on two versions are printed side by side."""


def show_task(run: str, number: int, versions: Sequence[int | None], *, temperature: float) -> None:
    """Play a held-out task of a run with each of some weight versions and print it; ``None`` is the newest version.

    Raises :class:`~etude.errors.UserError`.
    """
    folder, out = open_run_folder(run), console()
    task = task_of(folder, number)
    out.print(Text.assemble((f"held-out task {number} · ", DIM), visible(task.template), (f"  {task.task_id}", DIM)))
    out.print(Block("", Text(visible(task.prompt), DIM)))
    with contextlib.ExitStack() as stack:
        sys.stderr.write("starting an engine for each version …\n")
        served = [stack.enter_context(serving_version(folder, each)) for each in versions]
        for each in served:
            wait_until_ready(each)
        asyncio.run(_show([VersionPlayer(each, task, temperature) for each in served], out))


def task_of(folder: RunFolder, number: int) -> Task:
    """A held-out task of a run. Raises :class:`~etude.errors.ConfigError` where there are not as many."""
    bring_data(folder, "tasks")
    tasks = heldout_tasks(open_family(folder.config()), number + 1)
    if not 0 <= number < len(tasks):
        raise ConfigError(f"--task {number}: this run has held-out tasks 0 to {len(tasks) - 1}")
    return tasks[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """One model call, as text."""

    number: int
    """From 0."""
    versions: tuple[int, ...]
    added: str
    """Text that is new in the context: the task, or a tool's result."""
    reply: str


@final
@dataclass(slots=True)
class Transcript:
    """Converts completions to turns: the new text of a context is the text that no earlier turn has read or sampled."""

    chat: ChatFormat
    turns: list[PlayedTurn] = field(default_factory=list)
    _contexts: list[list[int]] = field(default_factory=list)

    def add(self, prompt_ids: TokenIds, completion: Completion) -> PlayedTurn:
        """The turn in which ``completion`` was sampled."""
        prompt, sampled = as_list(prompt_ids), as_list(completion.token_ids)
        before = max((len(context) for context in self._contexts if prompt[: len(context)] == context), default=0)
        turn = PlayedTurn(
            number=len(self.turns),
            versions=tuple(sorted(set(as_list(completion.versions)))),
            added=self.chat.decode(prompt[before:]).strip(),
            reply=self.chat.decode(sampled).strip(),
        )
        self._contexts.append(prompt + sampled)
        self.turns.append(turn)
        return turn


@final
class VersionPlayer:
    """One version and the task that it plays."""

    def __init__(self, served: ServedRun, task: Task, temperature: float) -> None:
        self.version = served.version
        self._served = served
        self._task = task
        self._temperature = temperature
        self._printed: asyncio.Queue[RenderableType | None] = asyncio.Queue()

    async def blocks(self) -> AsyncGenerator[RenderableType, None]:
        """Yield each turn as it ends, ready to print; the grade comes last."""
        async with background_task(self._play()) as playing:
            while (block := await self._printed.get()) is not None:
                yield block
            yield verdict(await playing, self._served.folder.config().eval.pass_at)

    async def _play(self) -> Rollout:
        folder = self._served.folder
        config = folder.config()
        chat = load_format(folder.model, config.gateway.chat_template_kwargs)
        transcript = Transcript(chat)

        def tell(prompt_ids: TokenIds, completion: Completion) -> None:
            self._printed.put_nowait(turn_block(transcript.add(prompt_ids, completion)))

        try:
            async with http_engines(READY_S, key=folder.key(KeyRole.ENGINE)) as connect:
                engine = connect(folder.endpoints.url(ENGINE))
                # Its kernels may have to be compiled first, which is no fault of the model's that plays.
                await engine.generate(np.zeros(1, np.int32), SamplingParams(max_tokens=1), session="")
                stage = Stage(
                    config=config,
                    chat=chat,
                    engine=engine,
                    folder=Path(folder.path),
                    max_length=config.engine.max_length,
                )
                return await play(stage, self._task, temperature=self._temperature, tell=tell)
        finally:
            self._printed.put_nowait(None)


async def _show(players: Sequence[VersionPlayer], out: Console) -> None:
    """Print the versions one after the other, or side by side if the terminal is wide enough."""
    if len(players) == 1 or out.width < WIDE or not out.is_terminal:
        for player in players:
            out.print(heading(player.version))
            async for block in player.blocks():
                out.print(block)
        return
    out.print(side_by_side([heading(player.version) for player in players]))
    streams = [player.blocks() for player in players]
    try:
        while any(row := await asyncio.gather(*(anext(stream, None) for stream in streams))):
            out.print(side_by_side([block or Text() for block in row]))
    finally:
        for stream in streams:
            await stream.aclose()


def heading(version: int) -> RenderableType:
    """The line above a version's turns."""
    return Text.assemble(("━━ ", DIM), (f"v{version}", f"bold {ACCENT}"))


def side_by_side(blocks: Sequence[RenderableType]) -> RenderableType:
    """One row, a column for each version."""
    table = Table.grid(padding=(0, 3), expand=True)
    for _ in blocks:
        table.add_column(ratio=1)
    table.add_row(*blocks)
    return table


def turn_block(turn: PlayedTurn) -> RenderableType:
    """One turn: the text that the model was given, and its reply."""
    return Group(*_turn_lines(turn))


def _turn_lines(turn: PlayedTurn) -> Iterator[RenderableType]:
    yield Text(f"turn {turn.number}", f"bold {ACCENT}")
    yield Block("  < ", Text(visible(turn.added), DIM))
    yield Block("  > ", Text(visible(turn.reply)), f"bold {ACCENT}")


def verdict(rollout: Rollout, pass_at: float) -> RenderableType:
    """The end: the reason why the agent stopped, and the grade."""
    if rollout.status is not RolloutStatus.GRADED or rollout.reward is None:
        return Text(f"failed: {visible(rollout.reason)}", WARN)
    is_solved = is_pass(rollout.reward, pass_at)
    text = Text.assemble(("ended ", DIM), visible(rollout.reason), (" · graded ", DIM), f"{rollout.reward:.3f} · ")
    return text.append("passed" if is_solved else "not passed", f"bold {GOOD if is_solved else WARN}")
