"""Tasks that one shell command solves, and demonstrations of an imperfect agent on their like.

    skill + wording + words ──▶ exercise: instruction, files before and after, a right command
                                  ├──▶ task: the folder must hold the files after, to the word
                                  └──▶ conversation of demonstrations.jsonl

A template is a skill in one wording. Held-out tasks ask for the same skills in wordings that no training task and no
demonstration has. The agent that is imitated usually explains its command, which no shell understands: a bare command
is for reinforcement learning to prefer.

    python recipes/pretrained/shell_tasks.py        writes demonstrations.jsonl, beside this file
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from etude.protocols import FamilyContext
from etude.types import ScriptChecks, Split, Task

SYSTEM = "You work in a shell. Answer with one command and nothing else."
"""The system message of ``agent.py``."""
EXPLAINED = "You can use this command: {command}"
EXPLAINED_SHARE, WRONG_SHARE = 0.5, 0.1
"""Shares of the demonstrations that explain their command, and that write to another file than they were asked to."""
EXERCISES = {Split.TRAIN: 20, Split.HELDOUT: 8}
"""Tasks of each template."""
DEMONSTRATIONS = 10
"""Of each training template."""
WORDS = (
    *("apple", "river", "stone", "cloud", "tiger", "piano", "lemon", "winter", "copper", "garden", "silver", "rocket"),
    *(
        "violet",
        "candle",
        "forest",
        "marble",
        "basket",
        "thunder",
        "pepper",
        "window",
        "bread",
        "lamp",
        "spoon",
        "silk",
    ),
)
NAMES = ("note", "list", "todo", "memo", "plan", "data", "log", "name", "item", "page", "draft", "report")
"""Of files, without their ending."""
VERIFIER = """\
mkdir -p /tests/after
if diff -rw /tests/after . >/dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
"""Pays for exactly the files that should be there, whatever their white space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Words of one exercise."""

    old: str
    """A file that is there."""
    new: str
    """One that is not."""
    lines: tuple[str, ...]
    """Of the old file, a word each."""
    inside: str
    """One of the lines."""
    word: str
    """None of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """One command, and the ways in which it is asked for; all are filled in from the material."""

    command: str
    trained: tuple[str, str]
    """Instructions of training tasks and of demonstrations."""
    held_out: str
    """That of held-out tasks."""
    after: Callable[[Material], Mapping[str, tuple[str, ...]]]
    """File → its lines, of those that were changed or made."""


SKILLS: Mapping[str, Skill] = {
    "write": Skill(
        command="echo {word} > {new}",
        trained=("Write the word {word} into the file {new}", "Make a file {new} with the word {word} in it"),
        held_out="Put the word {word} into a new file with the name {new}",
        after=lambda m: {m.new: (m.word,)},
    ),
    "append": Skill(
        command="echo {word} >> {old}",
        trained=("Append the word {word} to the file {old}", "Write the word {word} at the end of {old}"),
        held_out="Add the word {word} to the end of the file {old}",
        after=lambda m: {m.old: (*m.lines, m.word)},
    ),
    "copy": Skill(
        command="cp {old} {new}",
        trained=("Copy the file {old} to {new}", "Make a copy of {old} with the name {new}"),
        held_out="Copy {old} into a second file, {new}",
        after=lambda m: {m.new: m.lines},
    ),
    "sort": Skill(
        command="sort {old} > {new}",
        trained=("Sort the lines of {old} into the file {new}", "Write the sorted lines of {old} to {new}"),
        held_out="Sort the file {old} and save it as {new}",
        after=lambda m: {m.new: tuple(sorted(m.lines))},
    ),
    "first": Skill(
        command="head -n 1 {old} > {new}",
        trained=("Write the first line of {old} into the file {new}", "Copy only the first line of {old} to {new}"),
        held_out="Save the first line of the file {old} in {new}",
        after=lambda m: {m.new: m.lines[:1]},
    ),
    "last": Skill(
        command="tail -n 1 {old} > {new}",
        trained=("Write the last line of {old} into the file {new}", "Copy only the last line of {old} to {new}"),
        held_out="Save the last line of the file {old} in {new}",
        after=lambda m: {m.new: m.lines[-1:]},
    ),
    "count": Skill(
        command="wc -l < {old} > {new}",
        trained=("Write the number of lines of {old} into the file {new}", "Count the lines of {old} into {new}"),
        held_out="Count how many lines {old} has and save the number in {new}",
        after=lambda m: {m.new: (str(len(m.lines)),)},
    ),
    "find": Skill(
        command="grep {inside} {old} > {new}",
        trained=(
            "Write the lines of {old} with the word {inside} into the file {new}",
            "Find the word {inside} in {old} and write its lines to {new}",
        ),
        held_out="Save the lines of {old} that have the word {inside} in {new}",
        after=lambda m: {m.new: tuple(line for line in m.lines if line == m.inside)},
    ),
}


def wordings(split: Split) -> dict[str, tuple[Skill, str]]:
    """Template → its skill and its instruction, on one side of the hold-out."""
    if split is Split.HELDOUT:
        return {f"{name}-held-out": (skill, skill.held_out) for name, skill in SKILLS.items()}
    return {f"{name}-{way}": (skill, skill.trained[way]) for way in range(2) for name, skill in SKILLS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A template with words."""

    prompt: str
    command: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    """All files of the folder, path → text."""


class ShellTasks:
    """Implements :class:`~etude.protocols.TaskFamily`; the same tasks for every seed."""

    def __init__(self, _options: object, _context: FamilyContext) -> None:
        """There is nothing to choose."""

    def size(self, split: Split) -> int | None:
        """Every template as often as any other."""
        return len(wordings(split)) * EXERCISES[split]

    def task(self, split: Split, index: int) -> Task:
        """Task ``index``; neighbours are of different templates."""
        templates = wordings(split)
        name, number = list(templates)[index % len(templates)], index // len(templates)
        exercise = make_exercise(*templates[name], seed=f"{name}-{number}")
        hidden = {f"after/{path}": text for path, text in exercise.after.items()}
        return Task(
            task_id=f"{name}-{number}",
            family="shell",
            template=name,
            split=split,
            prompt=exercise.prompt,
            files=exercise.before,
            checks=ScriptChecks(files={"test.sh": VERIFIER, **hidden}, timeout_s=30.0),
        )


def make_exercise(skill: Skill, prompt: str, *, seed: str) -> Exercise:
    """The exercise that ``seed`` draws."""
    random = Random(seed)
    first, second, third, word = random.sample(WORDS, 4)
    old, new = (f"{name}.txt" for name in random.sample(NAMES, 2))
    material = Material(old=old, new=new, lines=(first, second, third), inside=second, word=word)
    names = {"old": old, "new": new, "inside": second, "word": word}
    before = {old: _text(material.lines)}
    return Exercise(
        prompt=prompt.format_map(names),
        command=skill.command.format_map(names),
        before=before,
        after=before | {path: _text(lines) for path, lines in skill.after(material).items()},
    )


def demonstrations() -> list[dict[str, list[dict[str, str]]]]:
    """Conversations of the imperfect agent, of all training templates in turn."""
    result = []
    for number in range(DEMONSTRATIONS):
        for name, (skill, prompt) in wordings(Split.TRAIN).items():
            exercise = make_exercise(skill, prompt, seed=f"demonstration-{name}-{number}")
            reply = _reply(exercise.command, number / DEMONSTRATIONS)
            turns = {"system": SYSTEM, "user": exercise.prompt, "assistant": reply}
            result.append({"messages": [{"role": role, "content": text} for role, text in turns.items()]})
    return result


def _reply(command: str, share: float) -> str:
    """The agent's answer, right or not; ``share`` of its answers come before."""
    if share < EXPLAINED_SHARE:
        return EXPLAINED.format(command=command)
    return f"{command}.bak" if share < EXPLAINED_SHARE + WRONG_SHARE else command


def _text(lines: tuple[str, ...]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    lines = [json.dumps(conversation) + "\n" for conversation in demonstrations()]
    (Path(__file__).parent / "demonstrations.jsonl").write_text("".join(lines), encoding="utf-8")
