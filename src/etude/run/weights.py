"""What `etude weights` does: look into a run's weight store, prove it, take a version out of it."""

from pathlib import Path

from etude.errors import RunFolderError
from etude.models.checkpoint import load_spec, save_checkpoint
from etude.run.folder import RunFolder
from etude.run.states import to_tensors
from etude.tokens.chat import ChatTemplate
from etude.weights.log import read_commit, versions
from etude.weights.pull import pull
from etude.weights.store import ObjectStore
from etude.weights.verify import verify


def list_lines(folder: RunFolder) -> list[str]:
    """One line per committed version."""
    store = ObjectStore(folder.store)
    records = [record for version in versions(store) if (record := read_commit(store, version))]
    lines = [
        f"{r.version:>7}  {r.kind:<5}  {r.size_bytes:>12,}  {r.digest[:16]}  step {r.step:<6}  {r.created}"
        for r in records
    ]
    return ["version  kind          bytes  digest            step         created", *lines]


def verify_lines(folder: RunFolder) -> tuple[list[str], bool]:
    """One verdict per version, and whether all are sound."""
    checks = list(verify(ObjectStore(folder.store)))
    lines = [f"{check.version:>7}  {check.fault or 'sound'}" for check in checks]
    return lines or ["no version is published yet"], all(check.fault is None for check in checks)


def export(folder: RunFolder, out: Path, version: int | None) -> int:
    """Write a version as a Hugging Face checkpoint, tokenizer included; returns the version.

    Raises :class:`~etude.errors.RunFolderError` when ``out`` cannot be written or already holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty: choose another folder, nothing is overwritten")
    pulled = pull(ObjectStore(folder.store), version)
    chat = ChatTemplate.load(folder.model)
    try:
        save_checkpoint(out, load_spec(folder.model), to_tensors(pulled.state), end_id=chat.end_id, pad_id=chat.pad_id)
        chat.save(out)
    except OSError as error:
        raise RunFolderError(f"cannot write to {out}: {error.strerror}") from error
    return pulled.version
