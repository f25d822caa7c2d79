"""Transcripts of an agent with a shell: every observation is the command's real output, in the harness's format."""

import re
import subprocess
from pathlib import Path
from random import Random

import jinja2
import pytest
import yaml

from etude.config.tasks import BugfixOptions
from etude.tasks.bugfix import BugfixFamily
from etude.tasks.corpora.corpus import demonstration_sources, tokenizer_texts
from etude.tasks.corpora.mixture import Side
from etude.tasks.corpora.shell_transcripts import (
    CHECK_FILE,
    SHELL,
    SUBMIT,
    SYSTEM,
    ShellTasks,
    check_program,
    observation,
    shell_transcript,
)
from etude.tasks.corpora.texts import PlainText
from etude.tasks.corpora.transcripts import BugfixDemonstrations, Message
from etude.tasks.programs import KINDS
from etude.tokens.chat import ChatTemplate
from etude.types import Split

MINI = yaml.safe_load((Path(__file__).parents[4] / "recipes/external-harness/mini.yaml").read_text(encoding="utf-8"))
ALL_KINDS = BugfixOptions(kinds=("arith", "slice", "comp", "loop", "range"))
CONTEXT_TOKENS = 512
"""Of the longest transcript: well within any recipe's engine."""


def sessions(count: int, config: BugfixOptions = ALL_KINDS) -> list[list[Message]]:
    family, rng = BugfixFamily(config, seed=0), Random("shell")
    demonstrations = BugfixDemonstrations(family, BugfixOptions(), SHELL)
    return [demonstrations.session(rng) for _ in range(count)]


def run(command: str, folder: Path) -> tuple[int, str]:
    """A command as mini-swe-agent's local environment runs it."""
    done = subprocess.run(
        command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.returncode, done.stdout


def test_observations_are_what_the_commands_print(tmp_path: Path) -> None:
    family, rng = BugfixFamily(ALL_KINDS, seed=0), Random("observations")
    for _ in range(12):
        problem, checks = family.graded_problem(Split.TRAIN, rng)
        (tmp_path / problem.path).write_text("\n".join(problem.broken))
        (tmp_path / CHECK_FILE).write_text(check_program(checks))
        messages = shell_transcript(problem, checks, BugfixOptions(test_after=0.9, retry=0.9), rng)
        replies, answers = messages[2::2], messages[3::2]
        for reply, answer in zip(replies, answers, strict=False):
            (command,) = re.findall(MINI["model"]["action_regex"], reply.content, re.DOTALL)
            assert observation(*run(command, tmp_path)) == answer.content
        assert replies[-1].content == SUBMIT


def test_the_templates_of_the_recipe_say_what_the_transcripts_say() -> None:
    template = jinja2.Template(MINI["model"]["observation_template"], undefined=jinja2.StrictUndefined)
    for code, output in (
        (0, ""),
        (1, "FAIL f(1) = 2 want 3\n"),
        (127, "x: not found\n"),
        (0, "def f():\n"),
        (1, ""),
        (-1, "part"),
    ):
        rendered = template.render(output={"returncode": code, "output": output, "exception_info": ""})
        assert rendered == observation(code, output)
    assert jinja2.Template(MINI["agent"]["system_template"]).render() == SYSTEM
    assert jinja2.Template(MINI["agent"]["instance_template"]).render(task="fix f in a.py") == "fix f in a.py"


def test_transcripts_have_the_roles_of_a_conversation() -> None:
    for messages in sessions(50):
        roles = [message.role for message in messages]
        assert roles[:2] == ["system", "user"]
        assert roles[2:] == ["assistant", "user"] * ((len(roles) - 3) // 2) + ["assistant"]


def test_answer_lines_need_no_quoting() -> None:
    """The lines are text of a ``sed`` command in single quotes."""
    for kind in KINDS.values():
        for template in kind.templates:
            for naming in kind.namings:
                assert not set(kind.answer_line(template, naming)) & set("'\\\n")


def test_the_check_says_what_is_wrong(tmp_path: Path) -> None:
    family = BugfixFamily(ALL_KINDS, seed=0)
    task = ShellTasks(family).task(Split.HELDOUT, 3)
    plain = family.task(Split.HELDOUT, 3)
    assert dict(task.files) == dict(plain.files) | {CHECK_FILE: check_program(plain.function_checks)}
    assert task.task_id == plain.task_id
    for path, text in task.files.items():
        (tmp_path / path).write_text(text)
    code, output = run(f"python3 {CHECK_FILE}", tmp_path)
    assert code == 1
    assert output.startswith(f"FAIL {task.function_checks.function}(")
    checks = task.function_checks
    (tmp_path / checks.path).write_text(f"def {checks.function}(*args):\n    raise KeyError\n")
    assert "= KeyError want" in run(f"python3 {CHECK_FILE}", tmp_path)[1]


def test_the_check_knows_no_hidden_case() -> None:
    task = ShellTasks(BugfixFamily(ALL_KINDS, seed=0)).task(Split.TRAIN, 0)
    shown = task.files[CHECK_FILE]
    visible = {repr(case.arguments) for case in task.function_checks.visible}
    for case in task.function_checks.hidden:
        if repr(case.arguments) not in visible:
            assert ", ".join(map(repr, case.arguments)) not in shown


@pytest.mark.parametrize("config", [BugfixOptions(), ALL_KINDS], ids=["quick", "full"])
def test_no_heldout_answer_is_in_any_transcript(config: BugfixOptions) -> None:
    forbidden = BugfixFamily(config, seed=0).forbidden
    shown = re.compile(r"^(?:sed -i '\d+c\\)? *(.*?)(?:' \w+\.py)?$", re.MULTILINE)
    for messages in sessions(400, config):
        for message in messages:
            assert not set(shown.findall(message.content)) & forbidden


def test_the_leak_test_can_fail() -> None:
    family = BugfixFamily(BugfixOptions(), seed=0)
    problem, checks = family.graded_problem(Split.HELDOUT, Random(0))
    config = BugfixOptions(right_edit=1.0, read_first=0.0)
    messages = shell_transcript(problem, checks, config, Random(0))
    shown = re.compile(r"^sed -i '\d+c\\ *(.*?)' \w+\.py$", re.MULTILINE)
    assert {line for message in messages for line in shown.findall(message.content)} & family.forbidden


def test_a_session_fits_a_short_context() -> None:
    family = BugfixFamily(BugfixOptions(), seed=0)
    texts = tokenizer_texts(BugfixDemonstrations(family, BugfixOptions(), SHELL), 0)
    chat = ChatTemplate.train(texts, 576)
    longest = max(
        sum(len(chat.render_message(message.role, message.content)) for message in messages)
        for messages in sessions(200, BugfixOptions())
    )
    assert longest <= CONTEXT_TOKENS
    demonstrations = BugfixDemonstrations(family, BugfixOptions(), SHELL)
    sources = demonstration_sources(demonstrations, PlainText(chat), Side(seed=0, one_in=20), context_weight=0.3)
    documents = [source.document(index) for source in sources.values() for index in range(100)]
    seen = "".join(chat.decode(document.token_ids.tolist()) for document in documents)
    assert SUBMIT in seen
    assert "sed -i '3c\\    return" in seen
