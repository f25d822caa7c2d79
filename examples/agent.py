"""A coding agent in one file and the standard library: how a harness of your own finds its model, and how it ends.

Nothing in it knows étude. Where the model is and the key to it stand in the variables that OpenAI's clients read, and
what is sampled there is recorded on the way. Exit code 0 submits the work, any other one gives up.

    [harness]
    kind = "command"

    [harness.options]
    command = ["python3", "/harness/agent.py", "{prompt}", "{model}", "{temperature}"]
    files = { "agent.py" = "@agent.py" }                                     # this file, beside the recipe
"""

import json
import os
import subprocess
import sys
import urllib.request

TURNS, COMMAND_S, SHOWN_CHARACTERS = 30, 60, 4000
RULES = "You work in a shell. Answer with one command and nothing else; answer `submit` when the task is done."


def ask(messages: list[dict[str, str]], model: str, temperature: float) -> str:
    """What the model says next."""
    body = json.dumps({"model": model, "messages": messages, "temperature": temperature})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        body.encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def play(task: str, model: str, temperature: float) -> int:
    """Work on ``task`` in the current folder; the exit code."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": task}]
    for _ in range(TURNS):
        command = ask(messages, model, temperature)
        if command.strip() == "submit":
            return 0
        try:
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=COMMAND_S)
            seen = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            seen = f"not done after {COMMAND_S} s"
        messages.append({"role": "assistant", "content": command})
        messages.append({"role": "user", "content": seen[-SHOWN_CHARACTERS:] or "(no output)"})
    return 1


if __name__ == "__main__":
    prompt, model, temperature = sys.argv[1:]
    sys.exit(play(prompt, model, float(temperature)))
