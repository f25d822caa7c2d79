"""Adapters that a native engine serves beside its own weights, by the names in requests.

An adapter never changes: a newer one of the same name is another object, and completions that began with the older one
end with it. Owns the names; :mod:`etude.models.lora` assigns adapters to rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from etude.models.adapters import factors_of
from etude.models.decoder import Decoder
from etude.models.lora import Factors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedAdapter:
    """One adapter, and the name of its weights."""

    name: str
    version: int
    digest: str
    factors: Factors
    chain: int
    """Negative number in the prefix index."""


@final
class ServedAdapters:
    """The adapters of one engine."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._by_name: dict[str, ServedAdapter] = {}
        self._added = 0

    def add(self, name: str, state: Mapping[str, Tensor], *, version: int, digest: str) -> None:
        """Serve an adapter over the engine's base as ``name``, for all later requests with this name.

        Raises ``ValueError`` if the engine serves whole weights or the name is empty, and
        :class:`~etude.errors.DamagedError` for an adapter of another base.
        """
        if self._model.adapters is None or not name:
            raise ValueError(f"adapter {name!r}: it needs a name, and an engine of a run with lora.rank above 0")
        factors = factors_of(self._model, state)
        self._added += 1
        self._by_name[name] = ServedAdapter(
            name=name, version=version, digest=digest, factors=factors, chain=-self._added
        )

    def remove(self, name: str) -> None:
        """Stop serving new requests with an adapter. Raises ``ValueError`` if there is none of this name."""
        del self._by_name[self.named(name).name]

    def named(self, name: str) -> ServedAdapter:
        """The adapter of a name. Raises ``ValueError`` if there is none."""
        adapter = self._by_name.get(name)
        if adapter is None:
            raise ValueError(f"there is no adapter {name!r}, only {sorted(self._by_name) or 'what the run serves'}")
        return adapter

    def __iter__(self) -> Iterator[ServedAdapter]:
        yield from self._by_name.values()
