"""Votes of a run's judge about one rollout, with reasons, looked up by the judge's input.

A rollout records the values of its aspects, not the votes behind them. The votes are in the judge's caches, each under
a digest of rubric, parameters, task and text; all of these are still known, so the digests can be computed again.
Read-only.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from etude.config.recipe import RunConfig
from etude.dashboard.rollouts import ReadVote
from etude.harnesses import tools
from etude.harnesses.actions import THOUGHTS
from etude.rewards.judge.judge import vote_key
from etude.rewards.judge.prompts import About, JudgeInput
from etude.rewards.judge.votes import StoredVotes
from etude.rewards.transcript import SpokenTurn
from etude.run.folder import RunFolder
from etude.run.judging import judge_params, rubrics_of
from etude.run.scoring import transcript_of
from etude.types import Task, TurnKind


def votes_about(folder: RunFolder, config: RunConfig, task: Task, spoken: Sequence[SpokenTurn]) -> tuple[ReadVote, ...]:
    """The votes about a rollout of a task, by aspect; none without a judge, or if its caches no longer exist."""
    if config.judge.kind == "none":
        return ()
    with StoredVotes(sorted(folder.path.glob("judge-*.db"))) as stored:
        return tuple(_votes(stored, config, task, spoken))


def _votes(stored: StoredVotes, config: RunConfig, task: Task, spoken: Sequence[SpokenTurn]) -> Iterator[ReadVote]:
    params = judge_params(config)
    texts = {About.TRANSCRIPT: [transcript_of(spoken)], About.ANSWER: _answers(spoken)}
    for rubric in rubrics_of(config.judge).values():
        for number, work in product(range(params.votes), texts[rubric.about]):
            vote = stored.get(vote_key(rubric, params, JudgeInput(task=task.prompt, work=work), number))
            if vote is not None:
                yield ReadVote(
                    aspect=rubric.aspect,
                    score=vote.score,
                    lowest=rubric.lowest,
                    highest=rubric.highest,
                    reason=vote.reason,
                )


def _answers(spoken: Sequence[SpokenTurn]) -> list[str]:
    """Texts that may have been judged as the answer: the last message, or the argument of a call that submits it."""
    texts = [THOUGHTS.sub("", turn.text).strip() for turn in spoken if turn.kind is TurnKind.ACT]
    last = next(filter(None, reversed(texts)), "")
    call = tools.parse_call(last)
    handed_in = call.answer if isinstance(call, tools.Submit) else ""
    raw = spoken[-1].text if spoken else ""
    return list(dict.fromkeys(text for text in (last, handed_in, raw) if text))
