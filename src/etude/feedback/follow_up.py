"""Follow-up messages: a rule that detects if a user is dissatisfied with the previous reply.

    "no, that's not what I asked for"   1      negation, retry, complaint, undoing
    "thanks! now add a test"            0      thanks, praise
    "and what about Windows?"           —      neither: no signal

Owns the rule, whose name is its version: a run keeps the rule that it started with. To use another rule, set
``feedback.follow_up = "module:Name"`` to a class that takes no arguments and is a :class:`FollowUpRule`. The process
``feedback`` calls it once per follow-up, after the window of a session is over.
"""

import re
from typing import Protocol, final

from etude.types import Turn

READ_CHARACTERS = 400
"""Number of characters to read; a verdict on the last reply is at the start of a message."""
DISSATISFIED = re.compile(
    r"""^\W*(?:(?:hmm+|well|ok(?:ay)?|actually|sorry|um+)\W+)*(?:
      (?:no|nope)(?=\s*[,.;:!]|\s*$|\s+(?:i|it|that|this|you|not)\b)
    | (?:wrong|incorrect|undo|revert)\b
    | not\s+(?:quite|what|right|correct|good|working|like\s+that)\b
    | (?:still|again)\b.{0,40}?\b(?:not|n['’]t|fails?|failing|broken|wrong|errors?|same)\b
    | (?:try|do)\s+(?:it\s+|that\s+)?(?:again|over)\b
    | (?:please\s+)?(?:redo|retry|fix\s+(?:it|this|that|your))\b
    )
    | \b(?:that|this|it|you)(?:['’]s|\s+is|['’]re|\s+are)\s+(?:still\s+)?
      (?:wrong|incorrect|broken|not\s+(?:right|correct|what))\b
    | \b(?:that|this|it)\s+(?:(?:does|did|do)(?:n['’]t|\s+not)|(?:is|was)n['’]t)\s+
      (?:work|compile|run|help|right|correct|what)\b
    | \bnot\s+what\s+i\s+(?:asked|wanted|meant|said)\b
    | \bi\s+(?:said|asked\s+(?:you\s+)?(?:for|to)|told\s+you|already\s+(?:said|asked|told))\b
    | \b(?:you\s+(?:broke|ignored|missed|forgot|didn['’]t)|makes?\s+no\s+sense|undo\s+(?:that|this|it))\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
SATISFIED = re.compile(
    r"""^\W*(?:
      (?:many\s+)?thanks?\b | thank\s+you\b | thx\b | ty\b
    | (?:perfect|great|excellent|awesome|nice|good\s+(?:job|work)|well\s+done|exactly|lgtm)\b
    | (?:that|it|this)\s+(?:works?|worked|helps?|helped)\b
    )""",
    re.IGNORECASE | re.VERBOSE,
)


class FollowUpRule(Protocol):
    """Rule that judges a user's next message."""

    @property
    def name(self) -> str:
        """The unique name of the rule with its version: letters, digits, dots and hyphens."""
        ...

    def judge(self, reply: Turn, message: str) -> float | None:
        """Return 1 if the user is dissatisfied with ``reply``, 0 if satisfied, a value between if in doubt, and
        ``None`` if the message does not tell.
        """
        ...


@final
class WordRule:
    """Rule by words for negation, retry and thanks in English; version 1."""

    name = "follow-up-v1"

    def judge(self, reply: Turn, message: str) -> float | None:
        """Return 1, 0 or ``None``; a message that starts with thanks and then complains is a complaint."""
        text = message[:READ_CHARACTERS]
        if DISSATISFIED.search(text):
            return 1.0
        return 0.0 if SATISFIED.search(text) else None
