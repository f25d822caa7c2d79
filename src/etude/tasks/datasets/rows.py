"""Rows of data sets on disk, in order, each with its position.

    FILE.jsonl · FILE.parquet · FILE.arrow      one file
    FOLDER                                      all such files in it, by name, as in a Hub repository
    FOLDER with state.json                      output of Hugging Face's ``save_to_disk``: Arrow streams, listed there

JSON lines need no extra package. Parquet and Arrow need pyarrow (extra ``datasets``), but not the ``datasets`` package:
a saved set is Arrow's own stream format with a list of its files, and the other features of that package (scripts,
caches, downloads) are not needed here. Owns finding and reading; :mod:`etude.tasks.datasets.family` owns the meaning of
a row.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import orjson

from etude.errors import ConfigError
from etude.types import Json

SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".arrow")
"""Suffixes of the supported files."""
SAVED, SPLITS = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` writes: in the folder of one set, and in the parent folder of several splits."""
BATCH_ROWS = 1_000
"""Rows that pyarrow returns at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One row of a data set."""

    place: str
    """``data/train.jsonl, line 3``; rows of other files are counted from 1."""
    fields: dict[str, Json]
    fault: str = ""
    """The reason why the line is unreadable; empty if it is readable."""


def read_rows(path: Path, key: str, columns: Sequence[str]) -> Iterator[DatasetRow]:
    """Every row of a data set; Parquet and Arrow files are read only for ``columns``.

    Raises :class:`~etude.errors.ConfigError`, which begins with ``key``, for a set that is missing, has another format
    or lacks a column.
    """
    for file in _files(path, key):
        try:
            rows = _json_rows(file) if file.suffix in (".jsonl", ".ndjson") else _table_rows(file, key, columns)
            yield from rows
        except OSError as error:
            raise ConfigError(f"{key}: {file} cannot be read: {error}") from error


def _files(path: Path, key: str) -> list[Path]:
    """The files of a data set, in order."""
    if not path.exists():
        raise ConfigError(f"{key}: there is no {str(path)!r} in {Path.cwd()}: correct the path")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(
                f"{key} = {str(path)!r}: expected one of {', '.join(SUFFIXES)}, or a folder of such files"
            )
        return [path]
    if (path / SPLITS).is_file():
        splits = sorted(child.name for child in path.iterdir() if (child / SAVED).is_file())
        raise ConfigError(
            f"{key} = {str(path)!r} has {len(splits)} splits, {', '.join(splits)}: name one, such as "
            f"{str(path / (splits or ['train'])[0])!r}"
        )
    if (path / SAVED).is_file():
        state = json.loads((path / SAVED).read_text(encoding="utf-8"))
        return [path / Path(file["filename"]).name for file in state["_data_files"]]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise ConfigError(f"{key} = {str(path)!r}: no file in that folder is one of {', '.join(SUFFIXES)}")
    return files


def _json_rows(file: Path) -> Iterator[DatasetRow]:
    """The rows of JSON lines; empty lines are skipped."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                value: Json = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield DatasetRow(place=place, fields={}, fault=f"it is not JSON: {error}")
                continue
            if isinstance(value, dict):
                yield DatasetRow(place=place, fields=value)
            else:
                yield DatasetRow(place=place, fields={}, fault="it is not an object of columns")


def _table_rows(file: Path, key: str, columns: Sequence[str]) -> Iterator[DatasetRow]:
    """The rows of a Parquet file or an Arrow stream."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{key}: {file} needs pyarrow: pip install -e '.[datasets]', or write the rows as JSON lines")
    import pyarrow as pa  # imported here because most runs have no such file

    try:
        batches = _parquet(file, key, columns) if file.suffix == ".parquet" else _arrow(file, key, columns)
        for number, fields in enumerate(batches, start=1):
            yield DatasetRow(place=f"{file}, row {number}", fields=fields)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{key}: {file} is damaged or no {file.suffix[1:]} file: {error}") from error


def _parquet(file: Path, key: str, columns: Sequence[str]) -> Iterator[dict[str, Json]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as table:
        _check_columns(table.schema_arrow.names, file, key, columns)
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)):
            yield from batch.to_pylist()


def _arrow(file: Path, key: str, columns: Sequence[str]) -> Iterator[dict[str, Json]]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        _check_columns(stream.schema.names, file, key, columns)
        for batch in stream:
            yield from batch.select(list(columns)).to_pylist()


def _check_columns(names: Sequence[str], file: Path, key: str, columns: Sequence[str]) -> None:
    missing = [column for column in columns if column not in names]
    if missing:
        raise ConfigError(
            f"{key}: {file} has no column {missing[0]!r}, it has {', '.join(names)}: name its columns in tasks.options"
        )
