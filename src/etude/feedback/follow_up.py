"""Follow-up messages: whether a user came back dissatisfied with the reply before.

    "no, that's not what I asked for"   1      negation, retry, complaint, undoing
    "thanks! now add a test"            0      thanks, praise
    "and what about Windows?"           —      it says neither: no signal

Owns the rule, which is versioned by its name: a run keeps the one that it began with. A judge of your own takes its
place by ``feedback.follow_up = "module:Name"``, a class that is called without arguments and is a
:class:`FollowUpRule`. It is asked once for each follow-up, in the process ``feedback``, when the window of a session is
over.
"""

import re
from typing import Protocol, final

from etude.types import Turn

READ_CHARACTERS = 400
"""A verdict on the last reply stands at the beginning of a message."""
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
    """Judges a user's next message."""

    @property
    def name(self) -> str:
        """The rule and its version, of letters, digits, dots and hyphens; another rule has another name."""
        ...

    def judge(self, reply: Turn, message: str) -> float | None:
        """1 for a user who is dissatisfied with ``reply``, 0 for one who is satisfied, between for doubt; ``None``
        where the message does not tell.
        """
        ...


@final
class WordRule:
    """Judges by negation, retry and thanks in English; version 1."""

    name = "follow-up-v1"

    def judge(self, reply: Turn, message: str) -> float | None:
        """1, 0 or ``None``; a message that begins with thanks and goes on to complain is a complaint."""
        text = message[:READ_CHARACTERS]
        if DISSATISFIED.search(text):
            return 1.0
        return 0.0 if SATISFIED.search(text) else None
