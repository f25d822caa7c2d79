"""`bench templates`: whose tool calls are read back, of the chat templates that other projects ship.

    source distributions ──▶ templates ──probe calls──▶ rendered, read back
                         └─▶ vLLM's tests of parsers ──▶ (what a model writes, its calls) ──▶ as many as agree

A template counts as rendering calls if it writes one, as read back if the grammar that was chosen reads a call with a
text out of it, and as wholly so if every probe comes back (:mod:`etude.tokens.grammar_detection`). The archives come
from a folder or by pip; what cannot be had is named. vLLM's cannot be had by pip alone, which would want torch to ask
for its metadata.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.report import Goal, envelope
from bench.tables import draw, page, results_of
from bench.templates.harvest import Case, harvest
from etude.errors import DamagedError, UserError
from etude.taskgen.failures import SourceError
from etude.taskgen.sources import ARCHIVES, fetch, remove
from etude.tokens.grammar_detection import CallSupport
from etude.tokens.grammars import GRAMMARS
from etude.tokens.jinja import Checkpoint, JinjaFormat
from etude.tokens.messages import Tool
from etude.tokens.reader import read_text
from etude.tokens.toolcalls import Grammar, ReplyMarks
from etude.types import Json

END = "<|end of a reply|>"
VARIABLES = {"bos_token": "<|bos|>", "eos_token": END, "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
COPIES = "_training.jinja"
"""Ending of TRL's copies of templates, with marks for losses."""
TOOL = Tool(name="any")
READ_BACK = Goal(
    "read back",
    "at least",
    95,
    "Chat templates of llama.cpp, vLLM and TRL whose tool calls are read back from what they write.",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A project that ships templates."""

    name: str
    requirement: str
    templates: str
    """Their paths, as a pattern."""


SOURCES = (
    Source("llama.cpp", "llama-cpp-python==0.3.36", "vendor/llama.cpp/models/templates/*.jinja"),
    Source("vLLM", "vllm==0.33.0", "examples/tool_chat_template_*.jinja"),
    Source("TRL", "trl==1.13.0", "trl/chat_templates/*.jinja"),
)
TESTS: Mapping[str, str] = MappingProxyType(
    {
        "parser/mistral/test_tool_calls": "mistral",
        "tool_parsers/test_pythonic_tool_parser": "pythonic",
        "tool_parsers/test_llama4_pythonic_tool_parser": "pythonic",
        "tool_parsers/test_hunyuan_a13b_tool_parser": "listed",
        "tool_parsers/test_gigachat3_tool_parser": "gigachat",
        "tool_parsers/test_olmo3_tool_parser": "pythonic",
    }
)
"""vLLM's tests that say text and calls in rows → the grammar of the models that they are of."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Name the options of the command line."""
    parser.add_argument("--from", type=Path, dest="folder", metavar="DIR", help="has the archives")


def run(options: argparse.Namespace) -> dict[str, Json]:
    """Measure with the options of the command line."""
    return bench_templates(options.folder)


def bench_templates(folder: Path | None = None) -> dict[str, Json]:
    """Read every template and every case; ``folder`` holds source distributions, else pip fetches them."""
    started_s = time.monotonic()
    results: list[Json] = []
    templates: list[Json] = []
    cases: list[Json] = []
    for source in SOURCES:
        with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
            try:
                tree = _tree(source, folder, Path(scratch) / "source")
                supports = {file.stem: _support(file) for file in _files(tree, source)}
                cases += _cases(tree / "tests")
            except (SourceError, UserError) as error:
                results.append({"contestant": source.name, "version": source.requirement, "missing": str(error)})
                continue
            finally:
                remove(Path(scratch) / "source")
        templates += [_template_row(source, name, calls) for name, calls in supports.items()]
        results.append(_result(source, list(supports.values())))
    rows = [row for row in results if isinstance(row, dict) and "missing" not in row]
    is_whole = len(rows) == len(SOURCES)
    total = sum(int(str(row["read back"])) for row in rows)
    goals: dict[str, Json] = {READ_BACK.name: READ_BACK.judge(total if is_whole else None, "not every source is here")}
    figures: dict[str, Json] = {"results": results, "templates": templates, "cases": cases, "goals": goals}
    return envelope("templates", time.monotonic() - started_s, figures)


def table(result: dict[str, Json]) -> str:
    """Each source, its templates with unread parts, and the results on vLLM's cases."""
    rows = [row for row in results_of(result) if "missing" not in row]
    columns = ("contestant", "version", "templates", "with calls", "read back", "wholly")
    problems = [row for row in results_of(result, "templates") if row["problem"] and row["rendered"]]
    return page(
        result,
        draw("chat templates", rows, columns),
        draw("not wholly read back", problems, ("case", "grammar", "problem")),
        draw("vLLM's cases", results_of(result, "cases"), ("case", "grammar", "cases", "agree")),
    )


def _tree(source: Source, folder: Path | None, target: Path) -> Path:
    """The unpacked source distribution."""
    if folder is None:
        return fetch(f"pypi:{source.requirement}", target)
    name, _, version = source.requirement.partition("==")
    stems = {f"{spelling}-{version}" for spelling in (name, name.replace("-", "_"))}
    for stem in sorted(stems):
        if (folder / stem).is_dir():
            return folder / stem
        for ending in ARCHIVES:
            if (folder / f"{stem}{ending}").is_file():
                return fetch(str(folder / f"{stem}{ending}"), target)
    raise UserError(f"{folder} has neither {' nor '.join(sorted(stems))}, unpacked or packed")


def _files(tree: Path, source: Source) -> list[Path]:
    return [file for file in sorted(tree.glob(source.templates)) if not file.name.endswith(COPIES)]


def _support(file: Path) -> CallSupport | None:
    """Find out how the calls of a template are read; ``None`` if it is no template for us."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["a"], trainers.BpeTrainer(vocab_size=257, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(END, normalized=False, special=True)])
    source = file.read_text(encoding="utf-8")
    stop_ids = (tokenizer.get_vocab_size() - 1,)
    checkpoint = Checkpoint(tokenizer=tokenizer, templates={"default": source}, variables=VARIABLES, stop_ids=stop_ids)
    try:
        return JinjaFormat(checkpoint).calls
    except DamagedError:
        return None


def _template_row(source: Source, name: str, calls: CallSupport | None) -> dict[str, Json]:
    return {
        "case": f"{source.name}: {name}",
        "grammar": calls.grammar.name if calls and calls.grammar else None,
        "rendered": bool(calls and calls.rendered),
        "problem": calls.problem if calls else "the template does not compile",
    }


def _result(source: Source, supports: list[CallSupport | None]) -> dict[str, Json]:
    calls = [support for support in supports if support and support.rendered]
    return {
        "contestant": source.name,
        "version": source.requirement,
        "templates": len(supports),
        "with calls": len(calls),
        "read back": sum(support.is_read for support in calls),
        "wholly": sum(not support.problem for support in calls),
    }


def _cases(tests: Path) -> list[Json]:
    """Count the cases of each file that agree; a project without such tests has none."""
    grammars = {grammar.name: grammar for grammar in GRAMMARS}
    rows: list[Json] = []
    for name, grammar in TESTS.items():
        if (file := tests / f"{name}.py").is_file():
            cases = harvest(file.read_text(encoding="utf-8"))
            agree = sum(_agrees(grammars[grammar], case) for case in cases)
            rows.append({"case": name, "grammar": grammar, "cases": len(cases), "agree": agree})
    return rows


def _agrees(grammar: Grammar, case: Case) -> bool:
    _, calls = read_text(case.text, ReplyMarks(grammar=grammar), [TOOL])
    return tuple((call.name, json.loads(call.arguments)) for call in calls) == case.calls
