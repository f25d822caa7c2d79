"""The messages of a session as a tree, and which of its replies a new call continues.

Owns when two messages count as the same although a client changed them on the way back. Knows no tokens: a node that a
model spoke carries the number of the turn in which it did.

    system ─ user ──▶ reply A (turn 0) ─ tool output ──▶ reply B (turn 1)
                │                     └─ edited output ─▶ reply C (turn 2)      an edited history opens a branch
                └───▶ reply D (turn 3)                                          asked again, or with n > 1

Tolerance is sound: whichever reply is continued, the next prompt is made of ids that an engine saw and sampled, and it
is that prompt which the model is conditioned on and which is recorded. Being too strict would cost a prefix, being too
lenient would show the model its own words where a client changed white space in them; neither makes a record wrong.

Messages are compared, not hashed: an unchanged history costs little more than comparing its bytes, of several replies
that look alike the one that was meant can be told, and no text is kept twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from etude.tokens.messages import Message

EXACT, ALIKE = 2, 1
"""How well a message fits a node: it is the same, or what a client may have made of it. 0: it is another one."""


@dataclass(slots=True, eq=False)
class Node:
    """One message at its place in a conversation."""

    message: Message
    """As it first came, or as a reply was read."""
    parent: "Node | None" = None
    """``None`` for the root, which is no message."""
    turn: int | None = None
    """In which turn of the session a model said it; ``None`` where no model of ours did."""
    children: "list[Node]" = field(default_factory=list)
    echo: Message | None = None
    """As its caller last sent it back: comparing with it spares reading the arguments of calls again."""

    def add(self, message: Message, turn: int | None = None) -> "Node":
        """A new node below this one."""
        child = Node(message, self, turn)
        self.children.append(child)
        return child

    def path(self) -> list[Message]:
        """The conversation up to this message."""
        messages, node = [], self
        while node.parent is not None:
            messages.append(node.message)
            node = node.parent
        return messages[::-1]

    def likeness(self, message: Message) -> int:
        """``EXACT``, ``ALIKE`` or 0."""
        if message == self.message:
            return EXACT
        if message == self.echo:
            return ALIKE
        if not alike(message, self.message):
            return 0
        self.echo = message
        return ALIKE


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How much of a conversation a tree knows."""

    reply: Node | None
    """The deepest node on its way that a model spoke; ``None`` if there is none."""
    depth: int
    """How many of the messages lead to ``reply``, itself included; 0 if there is none."""
    last: Node
    """The deepest node of any kind."""
    known: int
    """How many of the messages lead to ``last``."""
    ends: tuple[Node, ...]
    """Every node at which the whole conversation ends; none if it is not known to its end."""


def new_root() -> Node:
    """An empty tree."""
    return Node(Message(role="system"))


def find(root: Node, messages: Sequence[Message]) -> Found:
    """Follow ``messages`` from the root as far as the tree goes.

    Where several replies look alike, all are followed; of those that are equally deep the one that fits best wins, then
    the newest: its caller asked again because it never saw the older one.
    """
    level = [(root, 0)]
    reply, depth, last, known = None, 0, root, 0
    for count, message in enumerate(messages, 1):
        level = [
            (child, fit + likeness)
            for node, fit in level
            for child in node.children
            if (likeness := child.likeness(message))
        ]
        if not level:
            break
        last, known = _best(level), count
        if spoken := [match for match in level if match[0].turn is not None]:
            reply, depth = _best(spoken), count
    ends = tuple(node for node, _ in level) if known == len(messages) else ()
    return Found(reply=reply, depth=depth, last=last, known=known, ends=ends)


def insert(found: Found, messages: Sequence[Message]) -> Node:
    """The node of the last of ``messages``, which :func:`find` looked for; what was not known is added."""
    node = found.last
    for message in messages[found.known :]:
        node = node.add(message)
    return node


def twins_of(root: Node) -> dict[Node, Node]:
    """A copy of a whole tree: every node of it and its twin. Messages, which never change, are shared."""
    twins, nodes = {root: Node(root.message)}, [root]
    while nodes:
        node = nodes.pop()
        for child in node.children:
            twins[child] = twins[node].add(child.message, child.turn)
            twins[child].echo = child.echo
        nodes.extend(node.children)
    return twins


def dissolve(root: Node) -> None:
    """Take a tree apart, so that its memory is free at once and not when the garbage collector comes by."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        node.children.clear()


def alike(one: Message, other: Message) -> bool:
    """Whether a client may have made one of the other.

    Of an assistant's message count the content without surrounding white space and the names and arguments of its
    calls; thinking and the ids of calls are left out, as many clients do not send them back. Of other messages the
    content counts, and not which call a tool's output answers.
    """
    if one.role != other.role:
        return False
    if one.role != "assistant":
        return one.content == other.content
    return (
        one.content.strip() == other.content.strip()
        and len(one.tool_calls) == len(other.tool_calls)
        and all(
            mine.name == theirs.name and _same_arguments(mine.arguments, theirs.arguments)
            for mine, theirs in zip(one.tool_calls, other.tool_calls, strict=True)
        )
    )


def _best(matches: Sequence[tuple[Node, int]]) -> Node:
    if len(matches) == 1:
        return matches[0][0]
    return max(matches, key=_rank)[0]


def _rank(match: tuple[Node, int]) -> tuple[int, int]:
    node, fit = match
    return fit, -1 if node.turn is None else node.turn


def _same_arguments(one: str, other: str) -> bool:
    """Equal as JSON, whatever the order of keys and the white space; as text if either is no JSON."""
    if one == other:
        return True
    try:
        return bool(orjson.loads(one or "{}") == orjson.loads(other or "{}"))
    except (ValueError, RecursionError):  # the latter from comparing what is nested a thousand levels deep
        return False
