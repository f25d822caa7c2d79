"""Training state on disk: whole, verified, never half-written.

One safetensors file per step, ``step-00000012.safetensors``, beside its SHA-256. A file is written under another name
and renamed when it is complete, so a crash leaves the previous one. The last two are kept.
"""

import hashlib
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from etude.errors import DamagedError

KEEP = 2
"""Checkpoints kept: the newest, and the one before it until the newest is known to be committed."""


class Checkpoints:
    """The training checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Write the state after ``step`` and drop the oldest."""
        payload = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        self._write(self._digest_file(step), hashlib.sha256(payload).hexdigest().encode())
        self._write(self._file(step), payload)
        for old in self.steps()[:-KEEP]:
            self._file(old).unlink()
            self._digest_file(old).unlink()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return sorted(int(file.stem.removeprefix("step-")) for file in self._folder.glob("step-*.safetensors"))

    def load(self, step: int) -> dict[str, Tensor]:
        """Read and verify a checkpoint. Raises :class:`~etude.errors.DamagedError` naming the file and the way out."""
        file = self._file(step)
        way_out = "restore the file from a copy, or start a new run from the last published weights"
        try:
            payload = file.read_bytes()
            expected = self._digest_file(step).read_text()
            if hashlib.sha256(payload).hexdigest() != expected:
                raise DamagedError(f"checkpoint {file} does not match its SHA-256; {way_out}")
            return load(payload)
        except (OSError, SafetensorError, ValueError) as error:
            raise DamagedError(f"checkpoint {file} cannot be read: {error}; {way_out}") from error

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.safetensors"

    def _digest_file(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.sha256"

    def _write(self, file: Path, payload: bytes) -> None:
        partial = file.with_suffix(file.suffix + ".partial")
        with partial.open("wb") as stream:
            stream.write(payload)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
