"""What a phase reads, and what it is measured on: the sources that a recipe names, opened.

Owns the reading of names such as ``text:PATH``; what the documents are is the sources' business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.config.imitation import PRACTICE_SOURCES, ImitationConfig
from etude.config.recipe import RunConfig
from etude.run.families import open_practice
from etude.run.lineage import Phase
from etude.tasks.corpora.conversations import Conversations
from etude.tasks.corpora.corpus import practice_sources
from etude.tasks.corpora.mixture import Mixture, Side, Source, Stream, heldout_documents
from etude.tasks.corpora.texts import PlainText, TextFiles
from etude.tokens.messages import ChatFormat
from etude.types import Document, Split

HELDOUT_SEED = 0
"""What is measured on does not depend on a run's seed, so that runs can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All that a phase reads."""

    stream: Stream
    heldout: Mapping[str, Sequence[Document]]
    """Source → documents that are never learnt from; without those that have none, or where nothing is measured."""

    @property
    def tokens(self) -> int:
        """Of the whole phase."""
        return self.stream.mixture.tokens


def settings_of(config: RunConfig, phase: Phase) -> ImitationConfig:
    """The section of a phase."""
    return config.midtrain if phase == "midtrain" else config.sft


def open_reading(config: RunConfig, phase: Phase, chat: ChatFormat) -> Reading:
    """The stream of a phase, its sources proven to be readable, and its held-out documents.

    Raises :class:`~etude.errors.ConfigError` for a source that is missing or has lines that cannot be learnt from.
    """
    shares = config.midtrain.shares if phase == "midtrain" else {f"chat:{config.sft.file}": (1.0, 1.0)}
    sources = _open(config, phase, shares, chat, Split.TRAIN)
    tokens = config.midtrain.tokens if phase == "midtrain" else config.sft.epochs * _tokens(sources)
    heldout = _open(config, phase, shares, chat, Split.HELDOUT) if config.eval.enabled else {}
    found = {name: heldout_documents(source, config.eval.documents) for name, source in heldout.items()}
    return Reading(
        stream=Stream(mixture=Mixture(shares=shares, tokens=tokens), sources=sources),
        heldout={name: documents for name, documents in found.items() if documents},
    )


def _open(
    config: RunConfig, phase: Phase, names: Mapping[str, object], chat: ChatFormat, split: Split
) -> dict[str, Source]:
    """The sources of a phase by name, on one side of the hold-out; none where the phase reads nothing."""
    if phase == "midtrain" and not config.midtrain.tokens:
        return {}
    seed = config.seed if split is Split.TRAIN else HELDOUT_SEED
    text, side = PlainText(chat), Side(split=split, seed=seed, one_in=config.eval.heldout_every)
    weight = settings_of(config, phase).context_weight
    opened: dict[str, Source] = {}
    if any(name in PRACTICE_SOURCES for name in names):
        opened = practice_sources(open_practice(config, split), text, side, context_weight=weight)
    for name in names:
        kind, _, path = name.partition(":")
        if kind == "text":
            opened[name] = TextFiles(Path(path), text, side, piece_bytes=config.midtrain.document_bytes)
        elif kind == "chat":
            opened[name] = Conversations(Path(path), chat, side, context_weight=weight)
    return {name: opened[name] for name in names}


def _tokens(sources: Mapping[str, Source]) -> int:
    """Of all conversations."""
    return sum(source.tokens for source in sources.values() if isinstance(source, Conversations))
