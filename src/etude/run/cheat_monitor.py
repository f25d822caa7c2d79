"""Watches rollouts for cheating: baits before, a look afterwards, and a verdict over everything that was done.

Wiring only: baits are :mod:`etude.tasks.honeypots`'s, detectors and policy :mod:`etude.rewards`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.config.tasks import CheatingConfig
from etude.harnesses.actions import Finding, Severity, read_actions
from etude.protocols import Grade, Sandbox
from etude.rewards.monitor.monitor import inspect, scene_of
from etude.rewards.monitor.policy import Policy, judge
from etude.tasks.honeypots import Bait, draw_baits, lift, look, plant, touches
from etude.tasks.impossible import is_impossible
from etude.types import Disposition, Ids, Task, Turn, Verdict


def policy_of(config: CheatingConfig) -> Policy:
    """What a recipe makes of findings."""
    return Policy(
        by_severity={
            Severity.LOW: Disposition(config.on_low),
            Severity.MEDIUM: Disposition(config.on_medium),
            Severity.HIGH: Disposition(config.on_high),
        },
        by_name={name: Disposition(disposition) for name, disposition in config.exceptions.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BaitingMonitor:
    """Watches every rollout of a run; implements :class:`~etude.rollouts.worker.CheatMonitor`."""

    decode: Callable[[Ids], str]
    """The text of token ids."""
    policy: Policy
    honeypots: bool
    bare_shell: bool
    """Whether replies are shell commands without any mark (``recipes/external-harness``)."""

    async def begin(self, task: Task, sandbox: Sandbox) -> "BaitedRollout":
        """Lay baits in a fresh sandbox. Raises :class:`~etude.errors.SandboxError`."""
        baits = await plant(sandbox, draw_baits()) if self.honeypots else ()
        return BaitedRollout(self, task, sandbox, baits)


class BaitedRollout:
    """One rollout under watch; implements :class:`~etude.rollouts.worker.MonitoredRollout`."""

    def __init__(self, watch: BaitingMonitor, task: Task, sandbox: Sandbox, baits: Sequence[Bait]) -> None:
        self._watch = watch
        self._task = task
        self._sandbox = sandbox
        self._baits = tuple(baits)
        self._found: tuple[Finding, ...] = ()

    async def look(self) -> None:
        """Look at the baits and take them away, so that none is graded. Raises :class:`~etude.errors.SandboxError`."""
        if self._baits:
            self._found = await look(self._sandbox, self._baits)
            await lift(self._sandbox, self._baits)

    def beside(self, sandbox: Sandbox) -> "BaitedRollout":
        """The same baits lie in the copy."""
        return BaitedRollout(self._watch, self._task, sandbox, self._baits)

    def judge(self, reward: Grade, turns: Sequence[Turn]) -> Verdict:
        """What becomes of it, now that it is graded."""
        actions = read_actions(tuple(turns), self._watch.decode, bare_shell=self._watch.bare_shell)
        findings = (*self._found, *touches(actions, self._baits), *inspect(actions, scene_of(self._task)))
        return judge(reward, findings, self._watch.policy, impossible=is_impossible(self._task))
