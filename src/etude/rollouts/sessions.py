"""Sessions of a gateway over HTTP.

POST   /sessions         admin key   → {"session_id", "api_key"}
DELETE /sessions/{id}    admin key   → {"turns": [{"prompt_ids", "completion_ids", "logprobs", "versions", "finish"}]}
"""

from typing import Any

import aiohttp
import numpy as np
import orjson

from etude.errors import ConfigError, EngineUnavailable, SessionLost
from etude.protocols import Session
from etude.types import Finish, Turn

REASON_CHARS = 200
"""How much of a refusal is quoted."""


class GatewaySessions:
    """Opens and closes sessions of one gateway; ``http`` belongs to the caller."""

    def __init__(self, base_url: str, admin_key: str, http: aiohttp.ClientSession) -> None:
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._http = http

    async def open(self) -> Session:
        """Start a session. Raises :class:`~etude.errors.EngineUnavailable`."""
        fields = await self._call("POST", "/sessions")
        return Session(session_id=fields["session_id"], base_url=f"{self._base_url}/v1", api_key=fields["api_key"])

    async def close(self, session_id: str) -> tuple[Turn, ...]:
        """End a session and fetch its turns. Raises :class:`~etude.errors.SessionLost`, ``EngineUnavailable``."""
        fields = await self._call("DELETE", f"/sessions/{session_id}")
        return tuple(_turn(turn) for turn in fields["turns"])

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        url = self._base_url + path
        try:
            async with self._http.request(method, url, headers=self._headers) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{method} {url}: {type(error).__name__}: {error}") from error
        if status == 200:
            fields: dict[str, Any] = orjson.loads(body)
            return fields
        refusal = f"{method} {url} → {status}: {body[:REASON_CHARS].decode(errors='replace')}"
        if status == 404:
            raise SessionLost(refusal)
        if status in (401, 403):
            raise ConfigError(f"{refusal}; gateway and rollouts must be started with the same admin key")
        raise EngineUnavailable(refusal)


def _turn(fields: dict[str, Any]) -> Turn:
    return Turn(
        prompt_ids=np.array(fields["prompt_ids"], np.int32),
        completion_ids=np.array(fields["completion_ids"], np.int32),
        logprobs=np.array(fields["logprobs"], np.float32),
        versions=np.array(fields["versions"], np.int32),
        finish=Finish(fields["finish"]),
    )
