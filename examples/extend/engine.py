"""An engine: the native one, with its load in its log. ``engine.kind = "@engine.py:Logged"``."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from etude.config.inference import NativeOptions
from etude.engines.kinds import EngineContext, ServedEngine
from etude.engines.native.opener import open_native
from etude.weights.replica import PulledWeights


class Logged(AbstractAsyncContextManager[ServedEngine]):
    Options = NativeOptions

    def __init__(self, context: EngineContext, weights: PulledWeights) -> None:
        self._native = open_native(context, weights)

    async def __aenter__(self) -> ServedEngine:
        self._served = await self._native.__aenter__()
        return replace(self._served, tasks=(*self._served.tasks, self._tell))

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._native.__aexit__(*error)

    async def _tell(self) -> None:
        while True:
            print("load:", await self._served.engine.health())
            await asyncio.sleep(10.0)
