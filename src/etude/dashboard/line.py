"""Progress as one line, for logs and pipes."""

from etude.config.recipe import RunConfig
from etude.dashboard.story import RunStory
from etude.dashboard.units import decimal


def render_line(story: RunStory, config: RunConfig, now_s: float) -> str:
    """A run's progress in a line of text, and what it waits for."""
    return "; ".join((_course(story, config, now_s), *outage_lines(story, now_s)))


def outage_lines(story: RunStory, now_s: float) -> list[str]:
    """A line for each thing that a process waits for, since when and why."""
    return [
        f"{process} waits for {what}, away for {now_s - outage.at_s:.0f} s: {outage.event.reason}"
        for (process, what), outage in story.outages.items()
    ]


def _course(story: RunStory, config: RunConfig, now_s: float) -> str:
    start = f"[{story.total_s(now_s):6.0f} s] {story.phase or 'starting'}"
    if story.imitation.get(story.phase or ""):
        progress = story.imitation[story.phase or ""][-1].event
        return (
            f"{start}: step {progress.step}/{progress.steps}, loss {progress.loss:.3f}, "
            f"{progress.tokens_per_s:,.0f} tokens/s"
        )
    if story.phase == "rl" and story.steps:
        recent = [timed.event for timed in story.steps[-4:]]
        reward = sum(step.reward_mean for step in recent) / len(recent)
        last = recent[-1]
        bound = config.numerics.warn_k3
        warning = f" above {bound:g}!" if last.mismatch_k3 > bound else ""
        entropy = decimal(last.entropy if last.loss_tokens else None, 3)
        signal = f"signal in {last.groups - last.degenerate_groups} of {last.groups} groups, " if last.groups else ""
        hints = f"{last.hinted_turns} turns hinted at {last.hint_kl:.2f} nats, " if last.hinted_turns else ""
        return (
            f"{start}: step {last.step}/{config.trainer.steps}, reward {reward:.3f}, {signal}"
            f"entropy {entropy}, {hints}staleness ≤ {last.staleness_max}, k3 {last.mismatch_k3:.1e}{warning}"
        )
    return start
