"""The built-in coding agent: one tool call in plain text per turn, until it submits or a limit is reached.

    prompt ──▶ model ──call──▶ sandbox ──observation──▶ model ──▶ … ──▶ submit
                 ╰─ full context ─▶ model ──summary──▶ a new context from task, to-do list and summary

Owns the order of requests to the model and the execution of tools in a sandbox. :mod:`etude.harnesses.tools` and
:mod:`etude.harnesses.summaries` own the texts, :mod:`etude.harnesses.contexts` decides when a new context starts, and
:mod:`etude.harnesses.completions` calls the model. Does not grade.
"""

from collections import Counter
from collections.abc import Iterable

import aiohttp

from etude.config.rollouts import CodingOptions
from etude.errors import AgentFault, OutOfTime
from etude.harnesses import tools
from etude.harnesses.completions import CompletionClient, CompletionReply, HarnessContext, Message
from etude.harnesses.contexts import Context, Recall, Step, TodoList, Window
from etude.harnesses.summaries import KeptState, open_again, read_summary
from etude.protocols import HarnessResult, Sandbox, Session
from etude.sandboxes.folders import is_whole
from etude.sandboxes.function_calls import call_function, same_value
from etude.types import (
    AnswerChecks,
    Checks,
    FunctionChecks,
    NamedChecks,
    QueryChecks,
    ScriptChecks,
    Task,
    TestChecks,
    TurnKind,
)

OBSERVATION_CHARACTERS = 20_000
"""Longest observation: far longer than any context here, far shorter than the gateway's limit of a request."""
PYTEST_OPTIONS = ("-x", "-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider")
"""Options to report the first failing test and write no files."""
COUNTED_AS = {
    tools.ReadFile: tools.READ,
    tools.EditFile: tools.EDIT,
    tools.RunTests: tools.TEST,
    tools.FindName: tools.FIND,
    tools.OpenItem: tools.TODO,
    tools.CloseItem: tools.DONE,
    tools.Submit: tools.SUBMIT,
    tools.Malformed: "malformed",
}
"""Kind of call → its name in the counts; ``answer`` counts as ``submit``."""


class CodingHarness:
    """Drives the model with the text tools; implements :class:`~etude.protocols.Harness`."""

    def __init__(self, config: CodingOptions, http: aiohttp.ClientSession) -> None:
        """``http`` is shared by all sessions; the caller closes it."""
        self._config = config
        actor = CompletionClient(http, max_tokens=config.max_tokens_per_turn, timeout_s=config.turn_timeout_s)
        summariser = CompletionClient(
            http, max_tokens=config.max_tokens_per_summary, timeout_s=config.turn_timeout_s, kind=TurnKind.SUMMARY
        )
        self._models = {Step.ACT: actor, Step.SUMMARISE: summariser}

    @classmethod
    def open(cls, options: CodingOptions, context: HarnessContext) -> "CodingHarness":
        """The harness of a recipe."""
        return cls(options, context.http)

    async def run(self, task: Task, session: Session, sandbox: Sandbox, *, temperature: float) -> HarnessResult:
        """Work until ``submit``, the last turn (``turns``), a truncated turn (``length``), a full context
        (``context``), the end of the time for commands (``time``), or damage to its sandbox (``agent_fault``).

        Counts calls by the name of the tool, and ``malformed``; a truncated turn does not count as a call. Measures
        ``todo_opened`` and ``todo_open`` (items), ``summaries`` and ``restarts`` (contexts after the first); with
        summaries, and a task whose answer needs facts, also ``facts_seen`` and ``facts_kept``
        (:class:`~etude.harnesses.contexts.Recall`). Raises :class:`~etude.errors.InfrastructureError` for failures of
        gateway, session or sandbox.
        """
        work = _Work(self._config, task, sandbox)
        while (step := work.window.step) is not Step.STOP:
            if step is Step.RESTART:
                work.restart()
                continue
            reply = await self._models[step].complete(session, work.question(), temperature=temperature)
            if reply.finish == "context":
                work.make_room()
            elif step is Step.ACT:
                await work.act(reply)
            else:
                work.summarise(reply)
        return work.result()


class _Work:
    """The state and the results of one session."""

    def __init__(self, config: CodingOptions, task: Task, sandbox: Sandbox) -> None:
        self._config = config
        self._task = task
        self._sandbox = sandbox
        self.window = Window(config)
        self.context = Context(task.prompt)
        self._counts: Counter[str] = Counter()
        self._todo = TodoList()
        self._recall = Recall(task.checks.facts if isinstance(task.checks, AnswerChecks) else ())
        self._summary = ""  # the newest
        self._answer = ""

    def question(self) -> list[Message]:
        """Messages of the next request."""
        return self.context.ask(self._config.summary_request if self.window.step is Step.SUMMARISE else "")

    def make_room(self) -> None:
        """Handle a request that did not fit into the context: take another step, or shorten the last result."""
        if self.window.refused(can_shorten=self.context.can_shorten):
            self.context.shorten()

    async def act(self, reply: CompletionReply) -> None:
        """Execute the call in the model's reply."""
        self._recall.show(self.context.unseen)
        if reply.finish == "length":
            self.window.stop("length")
            return
        call = self._parse(reply.text)
        self._counts[COUNTED_AS[type(call)]] += 1
        if isinstance(call, tools.Submit):
            self._answer = call.answer
            self.window.stop(tools.SUBMIT)
            return
        try:
            observation = await self._carry_out(call, reply.text)
        except (OutOfTime, AgentFault) as over:
            self.window.stop(over.REASON)
            return
        self.context.acted(reply.text, observation)
        self.window.replied(reply.tokens)

    def summarise(self, reply: CompletionReply) -> None:
        """Accept a summary unchanged: the model continues from it even if it is truncated or empty."""
        self._recall.show(self.context.unseen)
        self._summary = read_summary(reply.text).text
        self._recall.summarise(self._summary)
        self.window.replied(reply.tokens)

    def restart(self) -> None:
        """Start a new context."""
        self.window.restarted()
        prompt = self._task.prompt
        if self._config.context == "truncate":
            self.context = Context(prompt, self.context.unseen)
            return
        state = KeptState(summaries=self.window.restarts, open_items=self._todo.open_items)
        self.context = Context(open_again(prompt, self._summary, state))

    def result(self) -> HarnessResult:
        """Result of the session."""
        summarises = self._config.context == "summary"
        measures = {
            "todo_opened": self._todo.opened,
            "todo_open": len(self._todo.open_items),
            "summaries": self.window.restarts if summarises else 0,
            "restarts": self.window.restarts,
        }
        if summarises and self._recall.facts:
            measures |= {"facts_seen": self._recall.seen, "facts_kept": self._recall.recalled}
        return HarnessResult(reason=self.window.reason, counts=self._counts, answer=self._answer, measures=measures)

    def _parse(self, text: str) -> tools.Call:
        """The call in a reply; malformed if the recipe does not have its tool."""
        call = tools.parse_call(text)
        return tools.Malformed() if isinstance(call, tools.FindName) and not self._config.find else call

    async def _carry_out(self, call: tools.Call, text: str) -> str:
        """The observation of a call that does not end the session; ``text`` is the reply, for a malformed call."""
        match call:
            case tools.Malformed():
                return tools.explain(text) if self._config.usage else tools.BAD_CALL
            case tools.FindName(name):
                return tools.limit(await _find(self._sandbox, name, self._task.files), OBSERVATION_CHARACTERS)
            case tools.OpenItem(text):
                return f"{tools.TODO} {self._todo.add(text)}"
            case tools.CloseItem(number):
                return tools.OK if self._todo.close(number) else tools.NO_TODO
            case _:
                return await observe(call, self._task.checks, self._sandbox)


async def observe(call: tools.Call, checks: Checks, sandbox: Sandbox) -> str:
    """Execute a tool call in a sandbox and return the observation; ``bad call`` for a call without a sandbox.

    Raises :class:`~etude.errors.SandboxError`.
    """
    match call:
        case tools.ReadFile(path, first):
            text = await _read(sandbox, path)
            shown = tools.NO_FILE if text is None else tools.number_lines(text, first)
            return tools.limit(shown, OBSERVATION_CHARACTERS)
        case tools.EditFile():
            return await _edit(sandbox, call)
        case tools.RunTests():
            return tools.limit(await _test(sandbox, checks), OBSERVATION_CHARACTERS)
        case tools.FindName() | tools.OpenItem() | tools.CloseItem() | tools.Submit() | tools.Malformed():
            return tools.BAD_CALL


async def _find(sandbox: Sandbox, name: str, paths: Iterable[str]) -> str:
    """List the files that contain a name now."""
    texts = {path: await _read(sandbox, path) for path in paths}
    return tools.list_files(name, {path: text for path, text in texts.items() if text is not None})


async def _read(sandbox: Sandbox, path: str) -> str | None:
    try:
        return await sandbox.read_file(path)
    except ValueError:
        return None  # a path outside the sandbox, or not a plain file: no file for the agent


async def _edit(sandbox: Sandbox, edit: tools.EditFile) -> str:
    text = await _read(sandbox, edit.path)
    edited = None if text is None or not is_whole(text) else tools.apply_edit(text, edit)
    if edited is None:
        return tools.BAD_EDIT
    try:
        await sandbox.write_file(edit.path, edited)
    except ValueError:
        return tools.BAD_EDIT  # a program may have made its own file read-only
    return tools.OK


async def _test(sandbox: Sandbox, checks: Checks) -> str:
    """Run the visible tests and describe the first failure."""
    match checks:
        case FunctionChecks():
            return await _call_visible(sandbox, checks)
        case TestChecks():
            command = [*checks.command, *PYTEST_OPTIONS, *checks.visible]
            result = await sandbox.exec(command, timeout_s=checks.timeout_s)
            return tools.PASS if result.exit_code == 0 else tools.render_report(result.stdout)
        case ScriptChecks() | QueryChecks() | AnswerChecks() | NamedChecks():
            return tools.NO_TESTS


async def _call_visible(sandbox: Sandbox, checks: FunctionChecks) -> str:
    calls = [case.arguments for case in checks.visible]
    outcomes = await call_function(sandbox, checks.path, checks.function, calls)
    for outcome, case in zip(outcomes, checks.visible, strict=True):
        if not (outcome.ok and same_value(outcome.value, case.expected)):
            return tools.render_failure(checks.function, case, outcome.shown)
    return tools.PASS
