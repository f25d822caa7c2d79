"""mini-swe-agent for a very small model: its own loop and its own shell, one command a task.

Ours is the class that it asks its model by, a protocol of mini-swe-agent's: the standard library, and the variables
that OpenAI's clients read. Its own class for such servers imports LiteLLM, which takes three seconds, ten times as long
as the rest of a task.
"""

import json
import os
import sys
import urllib.request
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment

SYSTEM = "You work in a shell. Answer with one command and nothing else."
"""Demonstrations begin with it (``shell_tasks.py``)."""
REPLY_TOKENS, COMMAND_S = 40, 5


class Model:
    """Implements mini-swe-agent's ``Model``: a whole reply is one command."""

    config = None

    def __init__(self, name: str, temperature: float) -> None:
        self._name = name
        self._temperature = temperature

    def query(self, messages: list[dict[str, Any]], **_options: Any) -> dict[str, Any]:
        """The next message, with the command in it."""
        body = {
            "model": self._name,
            "messages": messages,
            "temperature": self._temperature,
            "max_tokens": REPLY_TOKENS,
        }
        request = urllib.request.Request(
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        )
        with urllib.request.urlopen(request) as response:
            text = json.load(response)["choices"][0]["message"]["content"] or ""
        return {"role": "assistant", "content": text, "extra": {"actions": [{"command": text}]}}

    def format_message(self, **message: Any) -> dict[str, Any]:
        """A message as :meth:`query` takes it."""
        return message

    def format_observation_messages(
        self, _message: dict[str, Any], outputs: list[dict[str, Any]], _variables: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """What commands printed."""
        return [{"role": "user", "content": output["output"]} for output in outputs]

    def get_template_vars(self, **_options: Any) -> dict[str, Any]:
        """Nothing for templates."""
        return {}

    def serialize(self) -> dict[str, Any]:
        """Nothing for mini-swe-agent's own record: the gateway keeps the tokens."""
        return {}


if __name__ == "__main__":
    prompt, name, temperature = sys.argv[1:]
    agent = DefaultAgent(
        Model(name, float(temperature)),
        LocalEnvironment(timeout=COMMAND_S),
        system_template=SYSTEM,
        instance_template="{{task}}",
        step_limit=1,
    )
    agent.run(prompt)
