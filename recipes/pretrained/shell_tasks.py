"""Tasks that one shell command solves, and demonstrations of an imperfect agent on their like.

    template + words ──▶ exercise: instruction, files before and after, a right command
                          ├──▶ task: the folder must hold the files after, to the word
                          └──▶ conversation of demonstrations.jsonl

No template of a held-out task is a training task's, or has demonstrations. The agent that is imitated usually explains
its command, which no shell understands: a bare command is for reinforcement learning to prefer.

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
EXPLAINED_SHARE, WRONG_SHARE = 0.5, 0.15
"""Shares of the demonstrations that explain their command, and that write to another file than they were asked to."""
EXERCISES = {Split.TRAIN: 40, Split.HELDOUT: 8}
"""Tasks of each template."""
DEMONSTRATIONS = 20
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
    """Of the old file; the last repeats the first."""
    inside: str
    """One of the lines."""
    word: str
    """None of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One abstract task."""

    prompt: str
    command: str
    """A right answer; both are filled in from the material."""
    after: Callable[[Material], Mapping[str, tuple[str, ...]]]
    """File → its lines, of those that were changed or made."""


TRAINED: Mapping[str, Template] = {
    "write": Template(
        prompt="Write the word {word} into the file {new}",
        command="echo {word} > {new}",
        after=lambda m: {m.new: (m.word,)},
    ),
    "append": Template(
        prompt="Append the word {word} to the file {old}",
        command="echo {word} >> {old}",
        after=lambda m: {m.old: (*m.lines, m.word)},
    ),
    "copy": Template(
        prompt="Copy the file {old} to {new}",
        command="cp {old} {new}",
        after=lambda m: {m.new: m.lines},
    ),
    "sort": Template(
        prompt="Sort the lines of {old} into the file {new}",
        command="sort {old} > {new}",
        after=lambda m: {m.new: tuple(sorted(m.lines))},
    ),
    "first": Template(
        prompt="Write the first line of {old} into the file {new}",
        command="head -n 1 {old} > {new}",
        after=lambda m: {m.new: m.lines[:1]},
    ),
    "count": Template(
        prompt="Write the number of lines of {old} into the file {new}",
        command="wc -l < {old} > {new}",
        after=lambda m: {m.new: (str(len(m.lines)),)},
    ),
    "find": Template(
        prompt="Write the lines of {old} with the word {inside} into the file {new}",
        command="grep {inside} {old} > {new}",
        after=lambda m: {m.new: tuple(line for line in m.lines if line == m.inside)},
    ),
    "numbers": Template(
        prompt="Write the numbers from 1 to 5 into the file {new}",
        command="seq 1 5 > {new}",
        after=lambda m: {m.new: ("1", "2", "3", "4", "5")},
    ),
}
"""Name → template of training tasks and demonstrations."""

HELD_OUT: Mapping[str, Template] = {
    "last": Template(
        prompt="Write the last line of {old} into the file {new}",
        command="tail -n 1 {old} > {new}",
        after=lambda m: {m.new: m.lines[-1:]},
    ),
    "reverse": Template(
        prompt="Sort the lines of {old} in reverse order into the file {new}",
        command="sort -r {old} > {new}",
        after=lambda m: {m.new: tuple(sorted(m.lines, reverse=True))},
    ),
    "words": Template(
        prompt="Write the number of words of {old} into the file {new}",
        command="wc -w < {old} > {new}",
        after=lambda m: {m.new: (str(len(m.lines)),)},
    ),
    "without": Template(
        prompt="Write the lines of {old} without the word {inside} into the file {new}",
        command="grep -v {inside} {old} > {new}",
        after=lambda m: {m.new: tuple(line for line in m.lines if line != m.inside)},
    ),
    "sentence": Template(
        prompt="Write the sentence {word} is {inside} into the file {new}",
        command="echo {word} is {inside} > {new}",
        after=lambda m: {m.new: (f"{m.word} is {m.inside}",)},
    ),
    "empty": Template(
        prompt="Create an empty file with the name {new}",
        command="touch {new}",
        after=lambda m: {m.new: ()},
    ),
    "replace": Template(
        prompt="Replace the word {inside} by {word} in the file {old}",
        command="sed -i s/{inside}/{word}/ {old}",
        after=lambda m: {m.old: tuple(m.word if line == m.inside else line for line in m.lines)},
    ),
    "once": Template(
        prompt="Sort the lines of {old} without repetitions into the file {new}",
        command="sort -u {old} > {new}",
        after=lambda m: {m.new: tuple(sorted(set(m.lines)))},
    ),
}
"""Name → template of held-out tasks."""
TEMPLATES: Mapping[Split, Mapping[str, Template]] = {Split.TRAIN: TRAINED, Split.HELDOUT: HELD_OUT}


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
        return len(TEMPLATES[split]) * EXERCISES[split]

    def task(self, split: Split, index: int) -> Task:
        """Task ``index``; neighbours are of different templates."""
        names = list(TEMPLATES[split])
        name, number = names[index % len(names)], index // len(names)
        exercise = make_exercise(TEMPLATES[split][name], f"{name}-{number}")
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


def make_exercise(template: Template, seed: str) -> Exercise:
    """The exercise of ``template`` that ``seed`` draws."""
    random = Random(seed)
    first, second, third, word = random.sample(WORDS, 4)
    old, new = (f"{name}.txt" for name in random.sample(NAMES, 2))
    material = Material(old=old, new=new, lines=(first, second, third, first), inside=second, word=word)
    names = {"old": old, "new": new, "inside": second, "word": word}
    before = {old: _text(material.lines)}
    return Exercise(
        prompt=template.prompt.format_map(names),
        command=template.command.format_map(names),
        before=before,
        after=before | {path: _text(lines) for path, lines in template.after(material).items()},
    )


def demonstrations() -> list[dict[str, list[dict[str, str]]]]:
    """Conversations of the imperfect agent, of all training templates in turn; no task has an exercise of theirs."""
    result = []
    for number in range(DEMONSTRATIONS):
        for name, template in TRAINED.items():
            seed = f"demonstration-{name}-{number}"
            exercise = make_exercise(template, seed)
            turns = {"system": SYSTEM, "user": exercise.prompt, "assistant": _reply(exercise.command, Random(seed))}
            result.append({"messages": [{"role": role, "content": text} for role, text in turns.items()]})
    return result


def _reply(command: str, random: Random) -> str:
    """The agent's answer, right or not."""
    drawn = random.random()
    if drawn < EXPLAINED_SHARE:
        return EXPLAINED.format(command=command)
    return f"{command}.bak" if drawn < EXPLAINED_SHARE + WRONG_SHARE else command


def _text(lines: tuple[str, ...]) -> str:
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    lines = [json.dumps(conversation) + "\n" for conversation in demonstrations()]
    (Path(__file__).parent / "demonstrations.jsonl").write_text("".join(lines), encoding="utf-8")
