"""A sandbox provider: the local one, with notes in every sandbox. ``sandboxes.kind = "@provider.py:WithNotes"``."""

from collections.abc import Mapping

from etude.config.section import Section
from etude.protocols import Sandbox
from etude.sandbox_spec import SandboxSpec
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.providers import ProviderContext


class NotesOptions(Section):
    """The local provider, with notes in every sandbox."""

    notes: str = "Be careful.\n"
    """Text of the file NOTES."""


class WithNotes:
    Options = NotesOptions

    def __init__(self, options: NotesOptions, context: ProviderContext) -> None:
        self._notes, self._inner = {"NOTES": options.notes}, LocalSandboxes(workers=1)
        self.capabilities, self.close = self._inner.capabilities, self._inner.close

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        return await self._inner.create(self._notes | dict(files), spec)
