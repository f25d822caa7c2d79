"""The bodies of ``/v1/models``, one for the clients of both APIs: OpenAI's fields and Anthropic's side by side.

Owns the shape. There is one model, the newest weights; when it was made is not a question of its name, so the dates
are the epoch, as Anthropic's reference has it for unknown ones.
"""

from collections.abc import Sequence

import orjson

from etude.types import Json

EPOCH = "1970-01-01T00:00:00Z"
"""The date of a model whose date is not known."""


def list_body(names: Sequence[str]) -> bytes:
    """The models there are, on one page."""
    return orjson.dumps(
        {
            "object": "list",
            "data": [_model(name) for name in names],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
    )


def one_body(name: str) -> bytes:
    """One model."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Json]:
    openai: dict[str, Json] = {"id": name, "object": "model", "created": 0, "owned_by": "etude"}
    return {**openai, "type": "model", "display_name": name, "created_at": EPOCH, "lifecycle": "active"}
