"""The dataset family: prompts or conversations with their right answers, from the user's files.

    row ──▶ columns ──▶ prompt (and earlier messages), right answer ──▶ Task, graded by AnswerChecks

All rows are read and checked when the family is opened, so that an error names file, line and column before a run
starts. Rows with the same question and answer are one task. The hold-out does not depend on the seed: it is the rows of
another file, or one in n rows by the hash of the question, so that copies of a question are on one side. Owns the
meaning of columns; :mod:`etude.tasks.datasets.rows` reads the rows, :mod:`etude.rewards.graders.answers` compares
answers.
"""

import hashlib
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Literal

import orjson

from etude.config.tasks import DatasetOptions
from etude.errors import ConfigError
from etude.protocols import FamilyContext
from etude.tasks.corpora.transcripts import Message
from etude.tasks.datasets.rows import DatasetRow, read_rows
from etude.types import AnswerChecks, Json, PromptMessage, Split, Task

MAX_REJECTIONS = 10
"""Largest number of bad rows in an error message."""
LETTERS = string.ascii_uppercase
"""Letters of the choices."""
ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
"""Role in a row → role of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetQuestion:
    """The question of one row and its right answer."""

    place: str
    history: tuple[PromptMessage, ...]
    prompt: str
    answer: str

    @property
    def digest(self) -> bytes:
        """SHA-256 of the conversation, without the answer."""
        conversation = [*((message.role, message.content) for message in self.history), ("user", self.prompt)]
        return hashlib.sha256(orjson.dumps(conversation)).digest()


class DatasetTasks:
    """The tasks of a data set; implements :class:`~etude.protocols.TaskFamily`."""

    @classmethod
    def open(cls, options: DatasetOptions, context: FamilyContext) -> "DatasetTasks":
        """Read the rows of a recipe. Raises :class:`~etude.errors.ConfigError` with the unusable rows."""
        if options.match == "math" and find_spec("math_verify") is None:
            raise ConfigError("tasks.options.match = 'math' needs math-verify: pip install -e '.[math]'")
        questions = read_questions(options, Path(options.path), "tasks.options.path")
        if options.heldout_path:
            heldout = read_questions(options, Path(options.heldout_path), "tasks.options.heldout_path")
            _check_apart(questions, heldout)
            return cls(options, {Split.TRAIN: questions, Split.HELDOUT: heldout})
        sides: dict[Split, list[DatasetQuestion]] = {split: [] for split in Split}
        for question in questions:
            sides[_side(question, context.heldout_every)].append(question)
        return cls(options, sides)

    def __init__(self, options: DatasetOptions, sides: Mapping[Split, Sequence[DatasetQuestion]]) -> None:
        self._options = options
        # The evaluation set is the first few tasks: sorting by digest makes them diverse.
        heldout = sorted(sides[Split.HELDOUT], key=lambda question: question.digest)
        self._questions = {Split.TRAIN: sides[Split.TRAIN], Split.HELDOUT: heldout}

    def size(self, split: Split) -> int | None:
        """Number of tasks of a split."""
        return len(self._questions[split])

    def task(self, split: Split, index: int) -> Task:
        """Task number ``index`` of a split."""
        question, options = self._questions[split][index], self._options
        return Task(
            task_id=_identity(question),
            family="dataset",
            template="",  # the kinds of rows are unknown
            split=split,
            prompt=question.prompt,
            files={},
            checks=AnswerChecks(answer=question.answer, match=options.match, after=options.answer_after),
            history=question.history,
        )


class DatasetDemonstrations:
    """The rows as conversations, for mid-training; implements
    :class:`~etude.tasks.corpora.corpus.Demonstrations`.
    """

    def __init__(self, family: DatasetTasks, options: DatasetOptions, split: Split) -> None:
        self._family = family
        self._right_answer = options.right_answer
        self._split = split
        self._size = family.size(split) or 0

    def code(self, rng: Random) -> Sequence[Message]:
        """A question and its right answer."""
        return self._conversation(rng, right_answer=1.0)

    def session(self, rng: Random) -> Sequence[Message]:
        """A question and the answer of an agent that is not always right."""
        return self._conversation(rng, self._right_answer)

    def _conversation(self, rng: Random, right_answer: float) -> list[Message]:
        task = self._draw(rng)
        answered = task if rng.random() < right_answer else self._draw(rng)
        assert isinstance(answered.checks, AnswerChecks)
        history = [Message(message.role, message.content) for message in task.history]
        reply = f"{answered.checks.after}{answered.checks.answer}"
        return [*history, Message("user", task.prompt), Message("assistant", reply)]

    def _draw(self, rng: Random) -> Task:
        return self._family.task(self._split, rng.randrange(self._size))


def read_questions(options: DatasetOptions, path: Path, key: str) -> list[DatasetQuestion]:
    """The questions of a data set without duplicates. Raises :class:`~etude.errors.ConfigError` for unusable rows."""
    columns = [column for column in (options.messages or options.prompt, options.answer, options.choices) if column]
    questions: dict[str, DatasetQuestion] = {}
    rejections: list[str] = []
    for row in read_rows(path, key, columns):
        try:
            question = _question(row, options)
        except ValueError as error:
            rejections.append(f"{row.place}: {error}")
        else:
            questions.setdefault(_identity(question), question)
    if rejections:
        named = "\n  ".join(rejections[:MAX_REJECTIONS])
        more = f"\n  and {len(rejections) - MAX_REJECTIONS} more" if len(rejections) > MAX_REJECTIONS else ""
        raise ConfigError(f"{key} has rows that cannot be used:\n  {named}{more}")
    return list(questions.values())


def _question(row: DatasetRow, options: DatasetOptions) -> DatasetQuestion:
    """Read the question of a row. Raises ``ValueError`` with the column and the reason."""
    if row.fault:
        raise ValueError(row.fault)
    if options.messages:
        messages = list(_messages(row, options.messages))
    else:
        messages = [PromptMessage(role="user", content=_text(row, options.prompt))]
    if options.answer:
        answer, of = _text(row, options.answer), options.answer
    else:
        answer, of = _last_reply(messages, options.messages), options.messages
    *history, last = messages
    if last.role != "user":
        raise ValueError(f"column {options.messages!r} ends with a message of {last.role}, which asks nothing")
    prompt = last.content
    if options.answer_after:
        answer = answer.rpartition(options.answer_after)[2]
    if options.choices:
        choices = _choices(row, options.choices)
        prompt = "\n".join([prompt, *(f"{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=False))])
        answer = _letter(answer.strip(), choices, of)
    elif options.match == "choice":
        answer = answer.strip(" ().").upper()
        if answer not in LETTERS:
            raise ValueError(f"column {of!r} is not a letter of a choice: {answer!r:.60}")
    if not answer.strip():
        raise ValueError(f"column {of!r} has no answer: {answer!r}")
    return DatasetQuestion(place=row.place, history=tuple(history), prompt=prompt, answer=answer.strip())


def _last_reply(messages: list[PromptMessage], column: str) -> str:
    """Remove the right answer from the end of a conversation and return it."""
    if len(messages) < 2 or messages[-1].role != "assistant":
        raise ValueError(
            f"column {column!r} does not end with the assistant's answer: name a column of answers "
            f"(tasks.options.answer)"
        )
    return messages.pop().content


def _messages(row: DatasetRow, column: str) -> Iterator[PromptMessage]:
    listed = _value(row, column)
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"column {column!r} is not a list of messages: {listed!r:.60}")
    for number, item in enumerate(listed, start=1):
        where = f"column {column!r}, message {number}"
        if not isinstance(item, dict):
            raise ValueError(f"{where} is not an object: {item!r:.60}")
        role, content = ROLES.get(str(item.get("role"))), item.get("content")
        if role is None:
            raise ValueError(f"{where} has no role out of {', '.join(ROLES)}: {item.get('role')!r:.60}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"{where} has no text as its content: {content!r:.60}")
        yield PromptMessage(role=role, content=content)


def _text(row: DatasetRow, column: str) -> str:
    """The text of a column; a number is converted to text."""
    value = _value(row, column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"column {column!r} is not a text or number: {value!r:.60}")
    text = str(value)
    if not text.strip():
        raise ValueError(f"column {column!r} is empty")
    return text


def _value(row: DatasetRow, column: str) -> Json:
    if column not in row.fields:
        raise ValueError(f"there is no column {column!r}, but {', '.join(row.fields) or 'none at all'}")
    return row.fields[column]


def _choices(row: DatasetRow, column: str) -> list[str]:
    listed = _value(row, column)
    if not isinstance(listed, list) or not 2 <= len(listed) <= len(LETTERS):
        raise ValueError(f"column {column!r} is not a list of 2 to {len(LETTERS)} answers: {listed!r:.60}")
    if not all(isinstance(text, str) for text in listed):
        raise ValueError(f"column {column!r} has an answer that is not a text: {listed!r:.60}")
    return [str(text) for text in listed]


def _letter(answer: str, choices: Sequence[str], column: str) -> str:
    """The letter of the right answer, which a row gives as a letter, a number from 0 or its text."""
    letters = LETTERS[: len(choices)]
    if answer in letters:
        return answer
    if answer.isdecimal() and int(answer) < len(choices) and answer not in choices:
        return letters[int(answer)]
    if choices.count(answer) == 1:
        return letters[choices.index(answer)]
    raise ValueError(
        f"column {column!r} is none of the {len(choices)} answers: {answer!r:.60}; expected one of {letters}, a number "
        f"from 0 or an answer's own text"
    )


def _check_apart(train: Sequence[DatasetQuestion], heldout: Sequence[DatasetQuestion]) -> None:
    """Raise :class:`~etude.errors.ConfigError` if a held-out question is also a training question."""
    places = {question.digest: question.place for question in heldout}
    for question in train:
        if question.digest in places:
            raise ConfigError(
                f"tasks.options.heldout_path: {places[question.digest]} asks what {question.place} asks, so that a "
                f"held-out task would be trained on: take it out of one of them"
            )


def _side(question: DatasetQuestion, one_in: int) -> Split:
    return Split.TRAIN if int.from_bytes(question.digest[:8], "big") % one_in else Split.HELDOUT


def _identity(question: DatasetQuestion) -> str:
    return hashlib.sha256(question.digest + question.answer.encode()).hexdigest()[:16]
