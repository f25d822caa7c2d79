"""A sandbox provider: the local one, with a clock of its own. ``sandboxes.kind = "@provider.py:Zoned"``."""

from collections.abc import Mapping
from dataclasses import replace

from etude.config.section import Section
from etude.protocols import Sandbox
from etude.sandbox_spec import SandboxSpec
from etude.sandboxes.local.provider import LocalSandboxes
from etude.sandboxes.providers import ProviderContext


class ZoneOptions(Section):
    """The local provider, with a time zone."""

    zone: str = "UTC"
    """The time zone of every sandbox."""


class Zoned:
    Options = ZoneOptions

    def __init__(self, options: ZoneOptions, context: ProviderContext) -> None:
        self._zone, self._inner = {"TZ": options.zone}, LocalSandboxes(workers=1)
        self.capabilities, self.close = self._inner.capabilities, self._inner.close

    async def create(self, files: Mapping[str, str], spec: SandboxSpec | None = None) -> Sandbox:
        spec = spec or SandboxSpec()
        return await self._inner.create(files, replace(spec, environment=self._zone | dict(spec.environment)))
