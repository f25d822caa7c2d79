"""What a judge is: a digest of everything on our side that decides a verdict.

    model's name · words of the prompt · rubric · votes, temperature, lengths, schema ──▶ pin

A calibration is a statement about one pin and holds for no other. Where the model runs is not in it, nor what the
endpoint says of itself: the first may change, and the second is watched (:mod:`etude.rewards.judge.drift`).
"""

import hashlib
from dataclasses import asdict, dataclass

import orjson

from etude.rewards.judge.prompts import prompt_digest
from etude.rewards.judge.rubrics import Rubric


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeParams:
    """How votes are taken."""

    model: str
    votes: int = 1
    temperature: float = 0.0
    max_tokens: int = 256
    """Of a reply, thoughts included."""
    text_characters: int = 20_000
    """That are shown of the task and of the work, each."""
    structured: bool = False
    """Whether replies are held to a JSON schema."""


def judge_fingerprint(rubric: Rubric, params: JudgeParams) -> str:
    """SHA-256, in hex, of a judge of one aspect."""
    pinned = {"manner": asdict(params), "prompt": prompt_digest(), "rubric": rubric.digest}
    return hashlib.sha256(orjson.dumps(pinned, option=orjson.OPT_SORT_KEYS)).hexdigest()
