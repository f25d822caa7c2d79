"""An external harness, in a sandbox, with a real gateway: its rollout is recorded like any other."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from etude.clock import SystemClock
from etude.config.inference import GatewayConfig
from etude.config.rollouts import CommandOptions
from etude.engines.fake import FakeEngine
from etude.gateway.http.app import http_server
from etude.gateway.http.auth import Key, Scope, digest_of
from etude.gateway.routing.router import EngineEntry
from etude.gateway.service import Recorder
from etude.harnesses.command import CommandHarness
from etude.ledger.ledger import OpenSlot
from etude.rewards.graders.answers import AnswerGrader
from etude.rollouts.gateway_table import GatewayTable
from etude.rollouts.sandbox import RolloutLimits
from etude.rollouts.sessions import GatewaySessions
from etude.rollouts.worker import RolloutContext, run_rollout
from etude.run.gateway import GatewaySpec, open_gateway
from etude.run.serving import listening
from etude.run.task_sandboxes import EnvironmentTaskSandboxes
from etude.sandbox_spec import WORKDIR
from etude.sandboxes.images.store import ImageStore
from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.tokens.chat import ChatTemplate
from etude.types import Case, FunctionChecks, Rollout, RolloutStatus, Split, Task

AGENT = Path(__file__).parents[2] / "examples" / "agent.py"
COMMAND = ("python3", "/harness/agent.py", "{prompt}", "{model}", "{temperature}")
TURNS = 30
"""After which it gives up."""
TASK = Task(
    task_id="t",
    family="bugfix",
    template="add",
    split=Split.TRAIN,
    prompt="fix add in util.py",
    files={"util.py": "def add(a, b):\n    return a - b\n"},
    checks=FunctionChecks(path="util.py", function="add", visible=(), hidden=(Case(arguments=(5, 5), expected=10),)),
)
SLOT = OpenSlot(group_index=0, slot=0, attempt=0, task=TASK)
REPAIR = "sed -i s/-/+/ util.py"


@asynccontextmanager
async def gateway(chat: ChatTemplate, engine: FakeEngine) -> AsyncIterator[str]:
    """A gateway in front of ``engine``; its admin key is ``admin``."""
    plan = GatewaySpec(
        chat=chat,
        max_length=4096,
        recorder=Recorder(None),
        engines=(EngineEntry(name="engine", url="http://engine"),),
        keys=(Key(key_id="t", digest=digest_of("admin"), scope=Scope.ADMIN),),
    )
    config = GatewayConfig()
    async with (
        open_gateway(plan, config, SystemClock(), lambda url: engine) as parts,
        listening(http_server(parts.gateway.handle), 0) as port,
    ):
        yield f"http://127.0.0.1:{port}"


def attempt(
    folder: Path, replies: Sequence[str], *, command: Sequence[str] = COMMAND, timeout_s: float = 300.0
) -> tuple[Rollout, ChatTemplate]:
    """One rollout of the harness, with a model that gives ``replies``."""
    shutil.copy(AGENT, folder)
    folder.chmod(0o755)
    chat = ChatTemplate.train([AGENT.read_text(), TASK.prompt, *replies], 400)

    async def act() -> Rollout:
        clock = SystemClock()
        engine = FakeEngine(clock, vocab_size=chat.vocab_size, max_length=4096)
        engine.script(*([*chat.encode(reply), chat.end_id] for reply in replies))
        config = CommandOptions(command=tuple(command), timeout_s=timeout_s)
        async with aiohttp.ClientSession() as http, gateway(chat, engine) as url:
            environments = EnvironmentTaskSandboxes(
                NamespaceSandboxes(), ImageStore(folder / "images"), beside={"/harness": folder}, reaches=True
            )
            context = RolloutContext(
                sessions=GatewaySessions(GatewayTable([url]), "admin", http),
                sandboxes=environments,
                harness=CommandHarness(config, http, workdir=WORKDIR),
                grader=environments.grader(900.0, AnswerGrader()),
                clock=clock,
                limits=RolloutLimits(commands_s=60.0),
            )
            try:
                return await run_rollout(SLOT, context, rollout_id="r", temperature=0.7)
            finally:
                await environments.close()

    return asyncio.run(act()), chat


def test_what_an_external_harness_does_is_a_graded_rollout(tmp_path: Path) -> None:
    replies = ["cat util.py", REPAIR, "submit"]
    rollout, chat = attempt(tmp_path, replies)
    assert (rollout.status, rollout.reason, rollout.reward) == (RolloutStatus.GRADED, "submit", 1.0), rollout.reason
    sampled = [turn.completion_ids.tolist() for turn in rollout.turns]
    assert sampled == [[*chat.encode(reply), chat.end_id] for reply in replies]
    assert {turn.temperature for turn in rollout.turns} == {0.7}
    for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False):
        seen = [*earlier.prompt_ids.tolist(), *earlier.completion_ids.tolist()]
        assert later.prompt_ids.tolist()[: len(seen)] == seen
    assert "return a - b" in chat.decode(rollout.turns[1].prompt_ids.tolist())


def test_a_harness_that_gives_up_has_submitted_nothing(tmp_path: Path) -> None:
    rollout, _ = attempt(tmp_path, [REPAIR] * TURNS)
    assert (rollout.status, rollout.reason, rollout.reward) == (RolloutStatus.GRADED, "exit 1", 0.0)
    assert len(rollout.turns) == TURNS


def test_a_harness_that_hangs_is_stopped_and_graded(tmp_path: Path) -> None:
    rollout, _ = attempt(tmp_path, ["sleep 600"], timeout_s=15.0)
    assert (rollout.status, rollout.reason, rollout.reward) == (RolloutStatus.GRADED, "timeout", 0.0)
    assert rollout.seconds < 300


def test_a_harness_that_never_asks_the_model_is_infrastructure(tmp_path: Path) -> None:
    rollout, _ = attempt(tmp_path, [], command=("true", "{prompt}"))
    assert rollout.status is RolloutStatus.FAILED_INFRA
    assert "never reached the gateway" in rollout.reason
