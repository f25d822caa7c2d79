"""Files of recorded sessions: one tool call and its observation per line, for people and for the audit.

    {"session": "monday-7", "tool": "bash", "arguments": {"command": "ls"}, "observation": "a.py\\n",
     "exit_code": 0, "seconds": 0.031}

``session`` and ``observation`` are required, all else may be missing; unknown keys are refused, since a tell that
nobody reads would stay. Lines of one session may stand anywhere. Production records its own sessions this way; ours are
converted from the actions of rollouts.

Owns the format. Does not own what is looked at (:mod:`etude.taskgen.fidelity.features`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from etude.errors import ConfigError
from etude.harnesses.actions import Action

MAX_LINE_BYTES = 4 << 20
"""Most bytes of one tool call; a longer line is no session file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolObservation:
    """One tool call and what the agent saw of it."""

    session: str
    """Id of its session; sessions are told apart, their calls are not independent."""
    observation: str
    """Text that the agent was shown, to the letter."""
    tool: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    seconds: float | None = None
    """From call to observation, where it was measured."""


def read_sessions(path: Path) -> list[ToolObservation]:
    """Read a file of sessions. Raises :class:`~etude.errors.ConfigError` that names file and line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_observation(text, f"{path}:{number}") for number, text in _lines(file)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as recorded sessions: {error}") from error


def write_sessions(path: Path, observations: Iterable[ToolObservation]) -> None:
    """Write sessions, one observation a line, for :func:`read_sessions`; unknown fields are left out."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for observation in observations:
            by_name = {name: value for name, value in asdict(observation).items() if value not in (None, "", {})}
            file.write(json.dumps({"observation": "", **by_name}, ensure_ascii=False) + "\n")


def observations_of(session: str, actions: Sequence[Action]) -> list[ToolObservation]:
    """The observations of an agent in one of our rollouts; how long each call took is not recorded there.

    Calls of one reply share what followed it, which stands beside the last of them only.
    """
    last = {action.turn: index for index, action in enumerate(actions)}
    return [
        ToolObservation(
            session=session,
            tool=action.tool,
            arguments=action.arguments,
            observation=action.output if last[action.turn] == index else "",
        )
        for index, action in enumerate(actions)
        if action.output
    ]


def _lines(file: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, text) for number, text in enumerate(file, start=1) if text.strip())


def _observation(text: str, place: str) -> ToolObservation:
    try:
        if len(text) > MAX_LINE_BYTES:
            raise ValueError(f"the line has {len(text)} letters, at most {MAX_LINE_BYTES}")
        record = json.loads(text)
        if not isinstance(record, dict):
            raise TypeError(f"{record!r:.80} is no JSON object")
        unknown = record.keys() - {one.name for one in fields(ToolObservation)}
        if unknown:
            raise ValueError(f"unknown {', '.join(sorted(unknown))}")
        return _checked(record)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'{place}: {error}; expected an object such as {{"session": "s1", "tool": "bash", "arguments": '
            f'{{"command": "ls"}}, "observation": "a.py", "exit_code": 0, "seconds": 0.03}}'
        ) from error


def _checked(record: dict[str, object]) -> ToolObservation:
    missing = {"session", "observation"} - record.keys()
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))} is missing")
    arguments = record.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments {arguments!r} are not an object")
    code, seconds = record.get("exit_code"), record.get("seconds")
    if not isinstance(code, int | None) or not isinstance(seconds, int | float | None):
        raise TypeError(f"exit_code {code!r} or seconds {seconds!r} is not a number")
    if not isinstance(record["observation"], str):
        raise TypeError(f"observation {record['observation']!r} is not a text")
    return ToolObservation(
        session=str(record["session"]),
        tool=str(record.get("tool") or ""),
        arguments={name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()},
        observation=record["observation"],
        exit_code=code,
        seconds=seconds,
    )
