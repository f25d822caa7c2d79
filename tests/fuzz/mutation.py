"""Mutations of inputs: of bytes, and of the JSON, TOML and headed JSON that they may be."""

import json
import struct
import tomllib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import tomli_w

MOST_BYTES = 1 << 16
"""An input is cut off here: faults of what is larger are those of what is as large."""
DEEP = 3000
"""Levels of nesting that no reader has to follow, more than Python's own limit."""
NESTED = "@@nested@@"
"""Stands for a deep value while a tree is written."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(0.0, -0.5, 0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", "a", "\x00", "\ud800", "é", "\u2028", "٣", "-1", "1e999", "../..", "/", "\n", "{}", "a" * 5000),
    *([], {}, [[]], [None], [{}], {"": None}, {"type": None}, {"type": "text"}, [1, 2, 3], ["a", "b"], NESTED),
)
"""Values that are at some edge."""
WORDS = (
    *(
        b"\x00",
        b"\xff",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"'",
        b",",
        b":",
        b"\\",
        b"\\u",
        b"=",
    ),
    *(
        b"null",
        b"NaN",
        b"Infinity",
        b"-1",
        b"1e999",
        b"9" * 30,
        b"data: ",
        b"[DONE]",
        b"```",
        b"```json\n",
        b"<",
        b"/>",
    ),
    *(b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"${", b"$(", b"<<E"),
    *(b"{{", b"}}", b"{%", b"%}", b"\xc3\x28", b"../", b"#", b"|", b";", b"&&", b"inf", b"\t", b"0x", b"_", b"."),
)
HEADS = (struct.Struct("<Q"), struct.Struct("<I"))
"""The length of a JSON header: of safetensors, and of records that are laid out like it."""


def mutate(random: Random, pool: Sequence[bytes]) -> bytes:
    """An input like one of a pool."""
    data = random.choice(pool)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        data = random.choice(WAYS)(random, data, pool)
    return data[:MOST_BYTES]


def _flip(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _overwrite(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    at, size = random.randint(0, len(data)), random.choice((1, 2, 4, 8))
    return data[:at] + random.choice((b"\x00", b"\xff", b"\x7f", b"\x01")) * size + data[at + size :]


def _insert(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + random.choice(WORDS) + data[at:]


def _cut(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    first, last = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
    return data[:first] + data[last:] if random.random() < 0.7 else data[:last]


def _repeat(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    first, last = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
    return (data[:first] + data[first:last] * random.choice((2, 3, 50)) + data[last:])[:MOST_BYTES]


def _splice(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    other = random.choice(pool)
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def _number(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Replace a digit by another text of a number."""
    places = [at for at, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    at = random.choice(places)
    return data[:at] + random.choice((b"-", b"0", b"1" * 20, b"1e400", b".5", b"x")) + data[at + 1 :]


def _json(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change a value in a JSON text or in one of its lines."""
    try:
        return _changed_json(random, data)
    except (ValueError, RecursionError):
        pass
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    text = lines[at].removeprefix(b"data: ")
    try:
        lines[at] = lines[at][: len(lines[at]) - len(text)] + _changed_json(random, text)
    except (ValueError, RecursionError):
        return _insert(random, data, pool)
    return b"\n".join(lines)


def _headed(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change a value in a JSON header, and adjust its length."""
    for form in HEADS:
        try:
            (length,) = form.unpack_from(data)
            head = _changed_json(random, data[form.size : form.size + length])
        except (ValueError, RecursionError, struct.error):
            continue
        return form.pack(len(head)) + head + data[form.size + length :]
    return _flip(random, data, pool)


def _changed_json(random: Random, text: bytes) -> bytes:
    return _nested(json.dumps(_changed(random, json.loads(text)))).encode()


def _toml(random: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change a value in a TOML text."""
    try:
        return _nested(tomli_w.dumps(_changed(random, tomllib.loads(data.decode())))).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _insert(random, data, pool)


def _nested(text: str) -> str:
    return text.replace(f'"{NESTED}"', "[" * DEEP + "]" * DEEP)


def _changed(random: Random, tree: Any) -> Any:
    """A tree with one value changed, left out, doubled or moved."""
    if not isinstance(tree, dict | list) or not tree or random.random() < 0.15:
        return random.choice(VALUES)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    key, fate = random.choice(keys), random.random()
    if isinstance(tree, list):
        if fate < 0.15:
            return tree[:key] + tree[key + 1 :]
        if fate < 0.3:
            return [*tree, tree[key]]
        return [*tree[:key], _changed(random, tree[key]), *tree[key + 1 :]]
    if fate < 0.1:
        return {name: value for name, value in tree.items() if name != key}
    if fate < 0.2:
        return tree | {random.choice(("", "type", "name", "id", "é", f"{key}s", "x" * 300)): tree[key]}
    if fate < 0.3:
        return tree | {key: tree[random.choice(list(tree))]}
    return tree | {key: _changed(random, tree[key])}


Way = Callable[[Random, bytes, Sequence[bytes]], bytes]
WAYS: tuple[Way, ...] = (
    *(_flip, _overwrite, _insert, _cut, _repeat, _splice, _number),
    *(_json, _json, _json, _json, _headed, _toml, _toml),
)
"""Those that keep an input readable are tried more often: they get further into a reader."""
