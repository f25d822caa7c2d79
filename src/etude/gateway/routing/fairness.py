"""Fair shares of a queue, pure: the next of those that wait, and the one that gives way when there is no more room.

    add ──▶ one line for each account ──next──▶ of the account with the fewest calls in progress
                                     └─longest─▶ the newest call of the longest line gives way to one of a shorter line

Max-min fairness (Bertsekas and Gallager, *Data Networks*, 1992, section 6.5.2): an account uses whatever is idle, and
no more than its share as soon as others want theirs. Who gives way is the longest queue drop of B. Suter, T. Lakshman,
D. Stiliadis and A. Choudhury (INFOCOM 1998): a full room never keeps out an account whose line is shorter.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar, final

Call = TypeVar("Call")


@final
class FairQueue(Generic[Call]):
    """Calls that wait, by account; of one account first come, first served."""

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[Call, None]] = {}  # none is empty; the account served longest ago first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, account: str, call: Call) -> None:
        """Let a call wait behind those of its account."""
        self._lines.setdefault(account, OrderedDict())[call] = None
        self._size += 1

    def remove(self, account: str, call: Call) -> None:
        """Let go of a call that waits."""
        line = self._lines[account]
        del line[call]
        if not line:
            del self._lines[account]
        self._size -= 1

    def pop(self, in_progress: Mapping[str, int]) -> Call:
        """The next call: of the account with the fewest ``in_progress``; of several, of those in turn."""
        account = min(self._lines, key=lambda one: in_progress.get(one, 0))
        line = self._lines.pop(account)
        call, _ = line.popitem(last=False)
        if line:
            self._lines[account] = line  # behind the others
        self._size -= 1
        return call

    def displaced_by(self, account: str) -> tuple[str, Call] | None:
        """The call that gives way to one of ``account``, and whose it is; ``None`` where no line is longer by two."""
        longest = max(self._lines, key=lambda one: len(self._lines[one]), default=account)
        if len(self._lines.get(longest, ())) < len(self._lines.get(account, ())) + 2:
            return None
        return longest, next(reversed(self._lines[longest]))
