"""A run folder full of rollouts, written by the real ledger: what the page's table is measured and looked at with.

    python -m bench.ui.rollouts FOLDER --groups 12500        100,000 rollouts in some minutes

Owns made-up conversations of the built-in coding tools: edits, failing tests, summaries, hints, cheats, branches,
failed machines. They are the same for the same seed. No model was asked: log-probabilities are drawn.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from etude.config.loading import default_recipe
from etude.ledger.changes import TRAIN
from etude.ledger.ledger import Ledger
from etude.run.folder import RunFolder
from etude.tokens.chat import ChatTemplate
from etude.types import (
    Branch,
    Case,
    Disposition,
    Finish,
    FunctionChecks,
    Hint,
    Rollout,
    RolloutStatus,
    Split,
    Task,
    Turn,
    TurnKind,
    Verdict,
)

SIZE = 8
"""Rollouts of a group."""
GROUPS_PER_STEP = 16
BRANCHES = ("credit.kind=shared_prefix", "credit.options.branches=2", "sandboxes.kind=ns")
"""Settings under which rollouts may branch."""
TEMPLATES = ("off_by_one", "wrong_operator", "missing_return", "swapped_arguments", "shadowed_name", "stale_cache")
SOURCE = """def total(prices, rate):
    result = 0
    for price in prices[1:]:
        result += price * rate
    return result


def mean(prices):
    return total(prices, 1) / len(prices)
"""
NUMBERED = "\n".join(f"{number} {line}" for number, line in enumerate(SOURCE.splitlines(), start=1))
PROMPT = "The function total in shop.py leaves a price out. Find out why, fix it, run the tests and submit."
FIX = "edit shop.py 3\n    for price in prices:"
WRONG = "edit shop.py 4\n        result = price * rate"
FAIL = "FAIL total([1, 2], 1) = 2 want 3"
ASK = "The context is full: summarise what matters."
SUMMARY = (
    "the loop leaves out the first price\nnothing else is wrong\nsummary\nshop.py line 3: prices[1:] drops a price"
)
CONVERSATIONS: Sequence[Sequence[tuple[str, str]]] = (
    ((PROMPT, "read shop.py"), (NUMBERED, FIX), ("ok", "test"), ("PASS", "submit")),
    ((PROMPT, "read shop.py"), (NUMBERED, WRONG), ("ok", "test"), (FAIL, FIX), ("ok", "test"), (FAIL, "submit")),
    ((PROMPT, "test"), (FAIL, "read shop"), ("no file", "read shop.py"), (NUMBERED, "todo look at mean"),
     ("todo 1", FIX), ("ok", "done 1"), ("ok", "test"), ("PASS", "submit")),
    ((PROMPT, "raed shop.py"), ("bad call", "read shop.py"), (NUMBERED, "submit")),
)  # fmt: skip
"""Text that is new in the context, and the reply, turn by turn."""
RESTART = f"{PROMPT}\nsummary 1\nshop.py line 3: prices[1:] drops a price"


def main() -> None:
    """Write a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_run(options.folder, options.groups, options.seed)


def write_run(path: Path, groups: int, seed: int = 0) -> RunFolder:
    """A new run folder with a ledger of ``groups`` × :data:`SIZE` rollouts, most of them in committed steps."""
    folder = RunFolder.create(path, default_recipe([f"rollouts.group_size={SIZE}", *BRANCHES]))
    chat = ChatTemplate.train([PROMPT, NUMBERED, SUMMARY, FIX, WRONG, FAIL, ASK], 400)
    chat.save(folder.model)
    author = _Author(chat, random.Random(seed))
    with Ledger.open(folder.ledger) as ledger:
        for index in range(groups):
            task = author.task(index)
            ledger.admit_group(task, TRAIN, SIZE, index // GROUPS_PER_STEP)
            for rollout in author.group(index, task):
                ledger.record(rollout, TRAIN)
            if index % GROUPS_PER_STEP == GROUPS_PER_STEP - 1:
                step = (index + 1) // GROUPS_PER_STEP
                if ledger.claim_batch(step, GROUPS_PER_STEP) is not None:
                    ledger.commit_step(step)
    return folder


class _Author:
    """Makes tasks and rollouts up."""

    def __init__(self, chat: ChatTemplate, chance: random.Random) -> None:
        self._chat, self._chance = chat, chance
        self._ids: dict[str, list[int]] = {}
        self._newest = 0

    def task(self, index: int) -> Task:
        template = TEMPLATES[index % len(TEMPLATES)]
        checks = FunctionChecks(
            path="shop.py", function="total", visible=(), hidden=(Case(arguments=([1, 2], 1), expected=3),)
        )
        return Task(
            task_id=f"{template}-{index:06d}", family="bugfix", template=template, split=Split.TRAIN, prompt=PROMPT,
            files={"shop.py": SOURCE}, checks=checks,
        )  # fmt: skip

    def group(self, index: int, task: Task) -> Iterator[Rollout]:
        """The attempts of a group, in order."""
        first, self._newest = "", index // GROUPS_PER_STEP
        for slot in range(SIZE):
            name = f"{self._chance.getrandbits(128):032x}"
            if self._chance.random() < 0.02:
                yield self._failed(f"{self._chance.getrandbits(128):032x}", index, slot)
                yield self._graded(name, index, slot, 1, "")
            else:
                yield self._graded(name, index, slot, 0, first)
            first = first or name

    def _failed(self, name: str, index: int, slot: int) -> Rollout:
        reason = "sandbox: the machine went away while a test ran"
        return Rollout(
            rollout_id=name, group_index=index, slot=slot, attempt=0, status=RolloutStatus.FAILED_INFRA, reward=None,
            reason=reason, seconds=self._chance.uniform(1, 40),
        )  # fmt: skip

    def _graded(self, name: str, index: int, slot: int, attempt: int, first: str) -> Rollout:
        chance, version = self._chance, max(0, index // GROUPS_PER_STEP - self._chance.choice((0, 0, 1, 2)))
        spoken = chance.choice(CONVERSATIONS)
        summarises = chance.random() < 0.1
        turns = self._turns(spoken, version, summarises=summarises)
        reward = float(spoken[-1][0] == "PASS")
        cheats = chance.random() < 0.01
        verdict = Verdict(disposition=Disposition.KEEP, graded=reward)
        if cheats:
            how = Disposition.ZERO if reward else Disposition.KEEP
            why = "edits_tests" if reward else ""
            verdict = Verdict(disposition=how, reason=why, flags=("edits_tests",), hacked=True, graded=reward)
        hints = (Hint(turn=1, text="Look at the slice in the loop before editing.", source="judge"),)
        return Rollout(
            rollout_id=name, group_index=index, slot=slot, attempt=attempt, status=RolloutStatus.GRADED,
            reward=0.0 if cheats else reward, reward_parts={"tests": reward, "brevity": -0.01 * len(turns)},
            reason=chance.choice(("submit", "submit", "turns", "length")), counts={"read": 1, "edit": 1, "test": 1},
            turns=turns, seconds=chance.lognormvariate(2, 0.7), verdict=verdict,
            hints=hints if chance.random() < 0.05 else (),
            branch=Branch(rollout_id=first, turns=1) if first and chance.random() < 0.05 else None,
        )  # fmt: skip

    def _turns(self, spoken: Sequence[tuple[str, str]], version: int, *, summarises: bool) -> tuple[Turn, ...]:
        """A conversation as turns; one that summarises begins a new context after its third turn."""
        turns: list[Turn] = []
        context: list[int] = []
        for number, (heard, reply) in enumerate(spoken):
            if summarises and number == 3:
                turns.append(self._turn(context + self._encode(f"{heard}\n{ASK}"), SUMMARY, version, TurnKind.SUMMARY))
                context, heard = [], RESTART
            turns.append(self._turn(context + self._encode(heard), reply, version))
            context = [*turns[-1].prompt_ids.tolist(), *turns[-1].completion_ids.tolist()]
        return tuple(turns)

    def _turn(self, prompt: list[int], reply: str, version: int, kind: TurnKind = TurnKind.ACT) -> Turn:
        ids = [*self._encode(reply), self._chat.end_id]
        draws = [min(0.0, -self._chance.expovariate(1.6)) for _ in ids]
        later = len(ids) // 2 if self._chance.random() < 0.1 else len(ids)
        versions = [min(version + (place >= later), self._newest) for place in range(len(ids))]
        return Turn(
            prompt_ids=np.array(prompt, np.int32), completion_ids=np.array(ids, np.int32),
            logprobs=np.array(draws, np.float32), versions=np.array(versions, np.int32), finish=Finish.STOP, kind=kind,
        )  # fmt: skip

    def _encode(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self._chat.encode(text)
        return self._ids[text]


if __name__ == "__main__":
    main()
