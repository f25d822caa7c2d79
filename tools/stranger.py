"""Follow the README as a stranger does: a fresh clone, a fresh environment, and no command but those of its pages.

    python tools/stranger.py [--short] [--minutes 10] [--at FOLDER]

Commands are read from Markdown: of the README its first block (``make demo``) and what it says to do by hand, then of
each of its four ways the pages that the way begins with. In a page a block with a title is a file, a block of ``sh`` is
commands, and what is in a block of ``text`` is shown and not run: it needs a GPU, a cluster or users. The ways share
one clone, as the reader of one page has read those before it. Of the environment of this process they inherit how
packages are fetched, and nothing else.

Prints one JSON object with the seconds of each command and what was not run, and exits with 1 if a command failed or a
way took longer than ``--minutes``. ``--short`` makes the runs of the quickstart short; the object says so.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SHORTER = ("midtrain.tokens=40000", "trainer.steps=2", "eval.tasks=6", "rollouts.groups_per_step=4")
"""Settings that make a run of the quickstart short."""
LEFT_OUT = ("make test",)
"""Commands of the README's first block that are no way in."""
INHERITED = re.compile(r"PIP_\w+|(https?|no)_proxy|(SSL|CURL|REQUESTS)_\w+", re.IGNORECASE)
"""Variables that say how packages are fetched here."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TAIL_CHARACTERS = 4_000
"""Quoted length of a failed command's output."""
INTERRUPTED = "interrupted"
"""Failure of a way that Ctrl-C interrupted; later ways are not tried."""
GRACE_S = 20.0
"""Until a command that was interrupted is killed."""
HTTPS_PORT = 443
CONNECT_S = 5.0
"""For a connection to a package index."""

BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SECTION = "^## {}\n(.*?)(?=^## )"
ROW = re.compile(r"^\| \*\*(.+?)\*\* \| (.+?) \|", re.MULTILINE)
"""A way of the README's table: its name, and the pages that it begins with."""
INDEX = re.compile(r" --index-url https://([\w.-]+)\S*")
LINK = re.compile(r"\]\(([^)#]+\.md)[^)]*\)")
COMMENT = re.compile(r"\s+#.*$")
ACTIVATE = re.compile(r"`(\. \.venv/bin/activate)`")
NOTHING_LEARNT = re.compile(r"learnt nothing says so and ends with exit code (\d+)")
PROGRAMS = {"etude", "make", "python", "hf", "pip", "podman", "kubectl"}
"""First words of the commands in a block of ``text``."""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str

    def commands(self) -> list[str]:
        """Its lines without comments and empty ones."""
        return [command for line in self.text.splitlines() if (command := COMMENT.sub("", f" {line}").strip())]


class Readme(NamedTuple):
    """Facts that a stranger reads in the README."""

    first: list[str]
    by_hand: list[str]
    activate: str
    nothing_learnt: int
    """The exit status of a run in which no group had a signal: of a model this small no failure."""
    ways: dict[str, list[str]]
    """Name of a way → the pages that it begins with, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that has ended."""

    command: str
    page: str
    seconds: float
    status: int


@dataclass(slots=True)
class Way:
    """The outcome of one way."""

    name: str
    seconds: float = 0.0
    failure: str = ""
    commands: list[Ran] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    """Commands that its pages only show, for other machines or longer times, and commands that were run before."""


class Failed(Exception):
    """A command without the result that its page promises."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow every way and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="make the runs of the quickstart short")
    parser.add_argument("--minutes", type=float, default=10.0, help="the longest that a way may take")
    parser.add_argument("--at", type=Path, help="a folder that is kept (default: a temporary one)")
    options = parser.parse_args(arguments)
    folder = options.at or Path(tempfile.mkdtemp(prefix="stranger-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it started ends with it
    ways = list[Way]()
    try:
        for way in follow(ROOT, folder, options.minutes * 60, SHORTER if options.short else ()):
            ways.append(way)
            if way.failure == INTERRUPTED:
                break
    finally:
        if options.at is None:
            shutil.rmtree(folder, ignore_errors=True)
    succeeded = not any(way.failure for way in ways)
    print(json.dumps(report(ways, options.minutes, options.short) | {"succeeded": succeeded}, indent=2))
    return 0 if succeeded else 1


def read(readme: str) -> Readme:
    """The README's commands and ways. Raises :class:`Failed` if it has not the form that is read here."""
    start, ways = section(readme, "Two commands"), section(readme, "Four ways in")
    plain = [block.commands() for block in blocks(start)]
    activate, nothing_learnt = ACTIVATE.search(readme), NOTHING_LEARNT.search(" ".join(readme.split()))
    pages = {name: list(dict.fromkeys(LINK.findall(begin))) for name, begin in ROW.findall(ways)}
    if len(plain) != 2 or activate is None or nothing_learnt is None or not all(pages.values()) or len(pages) != 4:
        raise Failed("README.md: two blocks of commands, four ways, `activate` and an exit code were expected")
    return Readme(plain[0], plain[1], activate[1], int(nothing_learnt[1]), pages)


def section(page: str, heading: str) -> str:
    """The text under a heading, to the next one."""
    match = re.search(SECTION.format(re.escape(heading)), page, re.MULTILINE | re.DOTALL)
    if match is None:
        raise Failed(f"README.md: no section '{heading}'")
    return match[1]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    return [Block(*parts) for parts in BLOCK.findall(page)]


def shown_in(page: str) -> list[str]:
    """The commands of a page that are for other machines, or for longer than a tutorial."""
    texts = (block for block in blocks(page) if block.language == "text")
    return [command for block in texts for command in block.commands() if command.split()[0] in PROGRAMS]


def shortened(command: str, settings: Sequence[str]) -> str:
    """A command that does not take minutes, where it runs the quickstart."""
    overrides = " ".join(f"--set {each}" for each in settings)
    if not overrides:
        return command
    if command.startswith("etude run quickstart"):
        return f"{command} {overrides}"
    return f"{command} ARGS='{overrides}'" if command == "make demo" else command


def follow(repository: Path, folder: Path, limit_s: float, settings: Sequence[str]) -> Iterator[Way]:
    """Try each way of the README in a clone inside ``folder``; the installation by hand has its own clone."""
    reader, by_hand = (Stranger(repository, folder / name, settings) for name in ("reader", "by-hand"))
    readme = reader.readme
    for name, pages in readme.ways.items():
        way = Way(name)
        commands = [(command, "README.md") for command in readme.first] if not reader.done else []
        yield reader.go(way, [*commands, *pages], limit_s)
    script, left_out = reachable(" && ".join(shortened(command, settings) for command in readme.by_hand))
    yield by_hand.go(Way("by hand", not_run=left_out), [(script, "README.md")], limit_s)


def reachable(command: str) -> tuple[str, list[str]]:
    """A command without the package indexes that this machine cannot reach, and the removed options: pip's default
    index has the same versions.
    """
    unreachable = [match[0] for match in INDEX.finditer(command) if not _answers(match[1])]
    for option in unreachable:
        command = command.replace(option, "")
    return command, [f"{option.strip()}: not reachable from here" for option in unreachable]


def _answers(host: str) -> bool:
    """True if a host accepts connections; with a proxy that is left to pip."""
    if urllib.request.getproxies():
        return True
    try:
        socket.create_connection((host, HTTPS_PORT), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


class Stranger:
    """A reader with a clone, a home and a shell of their own."""

    def __init__(self, repository: Path, folder: Path, settings: Sequence[str]) -> None:
        self._home, self._clone, self._settings = folder / "home", folder / "etude", settings
        self._home.mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(repository), str(self._clone)], check=True)
        self.readme = read((self._clone / "README.md").read_text(encoding="utf-8"))
        self.done = set[str]()
        """Commands that need not be repeated: a page may begin with commands of the README."""

    def go(self, way: Way, steps: Sequence[tuple[str, str] | str], limit_s: float) -> Way:
        """Run commands of the README and pages until one fails or time is up."""
        started_s = time.monotonic()
        try:
            for command, page in self._commands(way, steps):
                left_s = limit_s - (time.monotonic() - started_s)
                print(f"{way.name}: {command}", file=sys.stderr, flush=True)
                way.commands.append(self._run(command, page, left_s))
        except (Failed, OSError) as error:
            way.failure = str(error)
            print(f"{way.name}: {error}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            way.failure = INTERRUPTED
        way.seconds = round(time.monotonic() - started_s, 1)
        return way

    def _commands(self, way: Way, steps: Sequence[tuple[str, str] | str]) -> Iterator[tuple[str, str]]:
        for step in steps:
            if not isinstance(step, str):
                command, page = step
                if command in LEFT_OUT:
                    way.not_run.append(command)
                    continue
                yield command, page
                self.done |= {command, *(self.readme.by_hand if command == self.readme.first[0] else ())}
                continue
            text = (self._clone / step).read_text(encoding="utf-8")
            way.not_run.extend(shown_in(text))
            for block in blocks(text):
                if block.title:
                    self._write(block)
                    way.files.append(block.title)
                elif block.language == "sh":
                    way.not_run.extend(command for command in block.commands() if command in self.done)
                    yield from ((command, step) for command in block.commands() if command not in self.done)

    def _write(self, block: Block) -> None:
        file = self._clone / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text, encoding="utf-8")

    def _run(self, command: str, page: str, left_s: float) -> Ran:
        """A command in a shell of the reader's. Raises :class:`Failed` for what its page does not say."""
        shell = shortened(command, self._settings)
        if page != "README.md":
            shell = f"{self.readme.activate} && {shell}"
        started_s = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", shell],
            cwd=self._clone,
            env=environment(self._home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=max(1.0, left_s))
        except subprocess.TimeoutExpired:
            raise Failed(f"{page}: {command}: the way took too long\n{ended(process)[-TAIL_CHARACTERS:]}") from None
        except KeyboardInterrupt:
            ended(process)
            raise
        if not self._is_right(command, process.returncode, output):
            raise Failed(f"{page}: {command}: exit status {process.returncode}\n{output[-TAIL_CHARACTERS:]}")
        seconds = round(time.monotonic() - started_s, 1)
        return Ran(command=command, page=page, seconds=seconds, status=process.returncode)

    def _is_right(self, command: str, status: int, output: str) -> bool:
        """True if a command did its work. A run that learnt nothing did; make has a status of its own for it."""
        learnt_nothing = self.readme.nothing_learnt
        if "etude run" in command:
            return status in (0, learnt_nothing)
        return status == 0 or (command.startswith("make ") and f"] Error {learnt_nothing}\n" in output)


def ended(process: subprocess.Popen[str]) -> str:
    """Interrupt a command and all that it started, as Ctrl-C does, and take what it had printed."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def environment(home: Path) -> dict[str, str]:
    """The variables of a login on a new machine, and those by which packages are fetched on this one."""
    inherited = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
    plain = {"HOME": str(home), "PATH": f"{sys.base_prefix}/bin:{SYSTEM_PATH}", "LANG": "C.UTF-8", "TERM": "dumb"}
    return plain | {"COLUMNS": "120"} | inherited


def report(ways: Sequence[Way], minutes: float, short: bool) -> dict[str, object]:
    """The printed object: place and time, shortened commands, and each way."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    inherited = sorted(name for name in os.environ if INHERITED.fullmatch(name))
    return {
        "machine": f"{_processor()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.stdout.strip(),
        "minutes_allowed": minutes,
        "shortened": list(SHORTER) if short else [],
        "inherited": inherited,
        "ways": [asdict(way) for way in ways],
    }


def _processor() -> str:
    """The processor's name, where the system has it."""
    file = Path("/proc/cpuinfo")
    name = (
        re.search(r"^model name\s*: (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if file.exists() else None
    )
    return name[1] if name else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
