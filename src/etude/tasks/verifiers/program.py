"""The process that runs an environment of the ``verifiers`` package, controlled over its standard input.

    {"id": 1, "do": "list", "limit": 100}                                        one JSON object per line
    {"id": 2, "do": "run", "index": 0, "base_url": …, "api_key": …, "temperature": …}
    ──▶ {"id": …, "tasks": […]} · {"id": …, "reward": …, "parts": …, "reason": …, "turns": …} · {"id": …, "error": …}

Runs in the Python that has ``verifiers`` 0.4 (its ``v1``) and need not have étude: it uses only the standard library
and that package. Runs many requests concurrently and answers each when it is done. Ends with its standard input.
"""

import asyncio
import importlib
import itertools
import json
import os
import sys
from typing import Any, TextIO

KEY_PREFIX = "ETUDE_API_KEY_"
"""Prefix of variables with API keys for the package's clients, one per request; subprocesses do not inherit them."""
LINE_LIMIT_BYTES = 16 << 20
PROVIDER_ERRORS = ("ProviderError", "InterceptionError", "TunnelError")
"""Names of errors that mean that the model is unreachable."""


def main() -> None:
    """Serve the environment whose settings are the first argument, as JSON."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of environments goes to standard error: it is not an answer
    asyncio.run(serve(json.loads(sys.argv[1]), answers))


async def serve(settings: dict[str, Any], answers: TextIO) -> None:
    """Answer requests until standard input ends."""
    vf = importlib.import_module("verifiers.v1")
    env = vf.load_environment(vf.resolve_env_config(settings))
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    tasks: list[Any] = []
    async with env.serving():
        while line := await reader.readline():
            request = json.loads(line)
            if request["do"] == "list":
                tasks = list(itertools.islice(env.taskset, request["limit"]))
                _reply(answers, request, {"tasks": [_describe(index, task) for index, task in enumerate(tasks)]})
            else:
                answering = asyncio.create_task(_answer(vf, env, tasks, request, answers))
                running.add(answering)
                answering.add_done_callback(running.discard)
        for answering in list(running):
            answering.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _answer(vf: Any, env: Any, tasks: list[Any], request: dict[str, Any], answers: TextIO) -> None:
    variable = f"{KEY_PREFIX}{request['id']}"
    os.environ[variable] = request["api_key"]
    try:
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        sampling = vf.SamplingConfig(temperature=request["temperature"])
        context = vf.ModelContext(model=request["model"], client=client, sampling=sampling)
        [slot] = env.slots(tasks[request["index"]], 1)
        episode = await env.run_slot(slot, context)
        _reply(answers, request, judge(episode))
    finally:
        del os.environ[variable]


def judge(episode: Any) -> dict[str, Any]:
    """The outcome of an episode: the mean of its trained traces' rewards, or the error.

    A deadline of the environment is a normal end; the traces up to then are graded.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable] or list(episode.traces)
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    is_late = episode.is_timeout or any(trace.is_timeout for trace in traces)
    if not traces or (errors and not is_late):
        last = errors[-1] if errors else None
        kind = "provider" if last is not None and last.type in PROVIDER_ERRORS else "environment"
        return {"error": f"{last.type}: {last.message}" if last else "no agent was run", "kind": kind}
    parts: dict[str, float] = {}
    for trace in traces:
        named = {name: reward.score for name, reward in trace.rewards.items()} | dict(trace.metrics)
        for name, value in named.items():
            parts[name] = parts.get(name, 0.0) + value / len(traces)
    return {
        "reward": sum(reward.value for trace in traces for reward in trace.rewards.values()) / len(traces),
        "parts": parts,
        "reason": "timeout" if is_late else str(traces[-1].stop_condition or "submit"),
        "turns": sum(trace.num_turns for trace in traces),
    }


def _describe(index: int, task: Any) -> dict[str, Any]:
    prompt = task.data.prompt
    if prompt is not None and not isinstance(prompt, str):
        prompt = "\n\n".join(str(message.content) for message in prompt)
    name = task.data.name or task.data.id or task.key
    return {"index": index, "name": name, "prompt": prompt or ""}


def _reply(answers: TextIO, request: dict[str, Any], answer: dict[str, Any]) -> None:
    answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
