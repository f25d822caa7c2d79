"""The data of mid-training and SFT: the sources of a phase, the held-out documents, and the read position.

    section of the recipe ──▶ sources ──▶ mixture ──▶ batches, one part for each reader
                                 └──▶ held-out documents

A reader is a process, or the ranks that share a context. The position of each reader is saved with the weights.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from etude.config.data_paths import change_source, in_run
from etude.config.imitation import FAMILY_SOURCES, ImitationConfig
from etude.config.recipe import RunConfig
from etude.errors import RunFolderError
from etude.run.phase_folders import Phase, settings_of
from etude.run.task_families import open_demonstrations
from etude.tasks.corpora.conversations import Conversations
from etude.tasks.corpora.corpus import demonstration_sources
from etude.tasks.corpora.mixture import BatchStream, Cursor, Mixture, Side, Source, Taken, heldout_documents
from etude.tasks.corpora.texts import PlainText, TextFiles
from etude.tokens.messages import ChatFormat
from etude.trainer.optimisation import BatchSchedule
from etude.types import Document, Split

HELDOUT_DOCUMENTS = 64
"""Held-out documents of each source on which the loss is measured: about ten thousand tokens, which take a second."""
HELDOUT_SEED = 0
"""Seed of the held-out documents, the same for every run, so that runs can be compared."""
CURSOR, IDENTITY = "cursor", "identity"
"""In a checkpoint: ``cursor/<source>`` int64 [readers, 2] documents and tokens; ``identity`` uint8 [32] of the data."""
DOCUMENT_BYTES = 1_024
"""Maximum length of a document from a text file: a few hundred tokens, so that it fits any context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationData:
    """The data of a phase."""

    stream: BatchStream
    heldout: Mapping[str, Sequence[Document]]
    """Source → documents excluded from training; empty if nothing is measured, and without sources that have none."""

    @property
    def tokens(self) -> int:
        """Tokens of the whole phase."""
        return self.stream.mixture.tokens


def open_reading(
    config: RunConfig, phase: Phase, chat: ChatFormat, folder: Path, *, reader: int = 0, readers: int = 1
) -> ImitationData:
    """Open the data of a phase for one of its readers: checked sources, their stream, and held-out documents. Sources
    in the run's ``folder`` have the names of its ``run.toml``, so that a checkpoint's cursor names the same sources on
    every machine.

    Raises :class:`~etude.errors.ConfigError` for a source that is missing or has invalid lines.
    """
    named = config.midtrain.shares if phase == "midtrain" else {f"chat:{config.sft.file}": (1.0, 1.0)}
    shares = {change_source(name, lambda path: in_run(path, folder)): share for name, share in named.items()}
    files = dict(zip(shares, named, strict=True))
    sources = _open(config, phase, files, chat, Split.TRAIN)
    tokens = config.midtrain.tokens if phase == "midtrain" else config.sft.epochs * _tokens(sources)
    heldout = _open(config, phase, files, chat, Split.HELDOUT) if config.eval.enabled else {}
    by_source = {name: heldout_documents(source, HELDOUT_DOCUMENTS) for name, source in heldout.items()}
    mixture = Mixture(shares=shares, tokens=tokens)
    return ImitationData(
        stream=BatchStream(mixture=mixture, sources=sources, reader=reader, readers=readers),
        heldout={name: documents for name, documents in by_source.items() if documents},
    )


def _open(
    config: RunConfig, phase: Phase, files: Mapping[str, str], chat: ChatFormat, split: Split
) -> dict[str, Source]:
    """The sources of a phase by name, for one split; none if the phase reads no data. ``files`` maps their names to
    full paths.
    """
    if phase == "midtrain" and not config.midtrain.tokens:
        return {}
    seed = config.seed if split is Split.TRAIN else HELDOUT_SEED
    text, side = PlainText(chat), Side(split=split, seed=seed, one_in=config.eval.heldout_every)
    weight = settings_of(config, phase).context_weight
    opened: dict[str, Source] = {}
    if any(name in FAMILY_SOURCES for name in files):
        opened = demonstration_sources(open_demonstrations(config, split), text, side, context_weight=weight)
    for name, file in files.items():
        kind, _, path = file.partition(":")
        if kind == "text":
            opened[name] = TextFiles(Path(path), text, side, chunk_bytes=DOCUMENT_BYTES)
        elif kind == "chat":
            opened[name] = Conversations(Path(path), chat, side, context_weight=weight)
    return {name: opened[name] for name in files}


def _tokens(sources: Mapping[str, Source]) -> int:
    """Sum over all conversations."""
    return sum(source.tokens for source in sources.values() if isinstance(source, Conversations))


def cursor_tensors(cursors: Sequence[Cursor], identity: str) -> dict[str, Tensor]:
    """The cursors of all readers as tensors of a checkpoint, so that weights and data position are saved together."""
    names = sorted({name for cursor in cursors for name in cursor.taken})
    taken = {name: [cursor.of(name) for cursor in cursors] for name in names}
    tensors = {
        f"{CURSOR}/{name}": torch.tensor([[each.documents, each.tokens] for each in of_all])
        for name, of_all in taken.items()
    }
    return tensors | {IDENTITY: _fingerprint(identity)}


def read_cursors(tensors: Mapping[str, Tensor], identity: str, readers: int) -> list[Cursor]:
    """The inverse of :func:`cursor_tensors`. Raises :class:`~etude.errors.RunFolderError` if the data has changed."""
    if not torch.equal(tensors[IDENTITY], _fingerprint(identity)):
        raise RunFolderError(
            f"the checkpoint was made with other data or another schedule than {identity[:400]}: restore the files and "
            f"run.toml, or start a new run"
        )
    rows = {
        name.removeprefix(f"{CURSOR}/"): tensor.reshape(readers, 2).tolist()  # one reader once had [2]
        for name, tensor in tensors.items()
        if name.startswith(f"{CURSOR}/")
    }
    return [
        Cursor(taken={name: Taken(documents=of_all[at][0], tokens=of_all[at][1]) for name, of_all in rows.items()})
        for at in range(readers)
    ]


def _fingerprint(identity: str) -> Tensor:
    return torch.tensor([*hashlib.sha256(identity.encode()).digest()], dtype=torch.uint8)


def batch_schedule(settings: ImitationConfig, tokens: int) -> BatchSchedule:
    """The batch-size schedule of a phase of ``tokens``."""
    first = settings.first_batch_tokens or settings.batch_tokens
    return BatchSchedule(tokens=tokens, first=first, last=settings.batch_tokens, ramp_share=settings.ramp_share)
