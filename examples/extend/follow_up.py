"""A judge of follow-up messages, for products whose users write German. ``follow_up = "@follow_up.py:German"``."""

from etude.types import Turn


class German:
    name = "german-v1"

    def judge(self, reply: Turn, message: str) -> float | None:
        words = message.lower()
        if words.startswith(("nein", "falsch")) or "stimmt nicht" in words:
            return 1.0
        return 0.0 if "danke" in words else None
