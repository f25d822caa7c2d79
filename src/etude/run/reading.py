"""Tasks and rollouts as text for people: `etude tasks ls` and `etude show`."""

from collections.abc import Iterator

from etude.config.recipe import RunConfig
from etude.errors import UserError
from etude.ledger.ledger import Ledger
from etude.run.families import open_family
from etude.run.folder import RunFolder
from etude.tokens.chat import ChatTemplate
from etude.types import Checks, FunctionChecks, Group, QueryChecks, Rollout, ScriptChecks, Split, TestChecks


def task_lines(config: RunConfig, split: str, count: int) -> Iterator[str]:
    """The first ``count`` tasks of a split: prompt, files, one visible case."""
    family = open_family(config)
    for index in range(count):
        task = family.task(Split(split), index)
        yield f"── {split} task {index}, {task.task_id}: {task.template}"
        yield task.prompt
        for path, text in task.files.items():
            yield f"{path}:"
            yield from (f"  {line}" for line in text.splitlines())
        yield _example(task.checks)


def _example(checks: Checks) -> str:
    """What a task is about, in a line."""
    match checks:
        case FunctionChecks():
            case = checks.visible[0]
            return f"  {checks.function}{case.arguments} should be {case.expected!r}\n"
        case TestChecks():
            return f"  {checks.about} tests should pass, such as {checks.must_pass[0]}\n"
        case ScriptChecks():
            return f"  {' '.join(checks.command)} should give a reward\n"
        case QueryChecks():
            return f"  {checks.queries[0].sql} should give {[list(row) for row in checks.queries[0].rows]!r}\n"


def group_lines(folder: RunFolder, purpose: str, index: int | None) -> Iterator[str]:
    """The rollouts of one group, turn by turn, with versions and rewards."""
    chat = ChatTemplate.load(folder.model)
    with Ledger.open(folder.ledger) as ledger:
        group = _find_group(ledger, purpose, index)
    yield f"group {group.index} of {purpose}: {group.task.prompt} ({group.task.template})"
    yield f"admitted at weight version {group.admitted_version}"
    for rollout in group.rollouts:
        yield from _rollout_lines(rollout, chat)


def _find_group(ledger: Ledger, purpose: str, index: int | None) -> Group:
    if index is not None:
        try:
            return ledger.group(purpose, index)
        except ValueError as error:
            raise UserError(str(error)) from error
    complete = [group for group in ledger.groups(purpose) if group.rollouts]
    if not complete:
        raise UserError(f"no rollout of purpose {purpose!r} has ended yet")
    return complete[-1]


def _rollout_lines(rollout: Rollout, chat: ChatTemplate) -> Iterator[str]:
    yield f"\n── rollout {rollout.rollout_id}: reward {rollout.reward}, {rollout.reason}, {rollout.seconds:.2f} s"
    known = 0
    for turn in rollout.turns:
        context = turn.prompt_ids[known:].tolist()
        yield f"   < {chat.decode(context)!r}"
        sampled = f"{len(turn.completion_ids)} tokens, versions {sorted(set(turn.versions.tolist()))}"
        yield f"   > {chat.decode(turn.completion_ids.tolist())!r}   [{sampled}]"
        known = len(turn.prompt_ids) + len(turn.completion_ids)
