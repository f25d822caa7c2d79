"""``bench gateway``: the upstream gives the scripted replies, wrong answers are found, and goals follow the rounds."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from bench.gateway.bench import (
    OURS,
    Cell,
    GatewayOptions,
    Round,
    Row,
    bench_gateway,
    capture_us,
    conversation,
    gateway_options,
    judged_rows,
    table,
    write_script,
)
from bench.gateway.contestants import CONTESTANTS, LITELLM_VARIABLE, NO_KEY
from bench.gateway.load import Crowd, Endpoint, Measured, Order, quantile
from bench.gateway.upstream import LOGPROB, VERSION, Connection, Replies, Script
from etude.engines.http import http_engines
from etude.errors import UserError
from etude.protocols import SamplingParams
from etude.tokens.chat import ChatTemplate

SCRIPT = Script(token_ids=(7, 8, 9), words=("a", " b", "c"))
SHORT, LONG = Cell(tokens=16, concurrency=64), Cell(tokens=300, concurrency=64)
ALONE = Cell(tokens=16, concurrency=1)


@asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    """Serve the script's two and three tokens; yields the port."""
    loop = asyncio.get_running_loop()
    replies = {tokens: Replies.of(SCRIPT, tokens) for tokens in (2, 3)}
    server = await loop.create_server(lambda: Connection(replies, loop), "127.0.0.1", 0)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        yield port
        await asyncio.sleep(0.02)  # hang-ups are seen, and their connections closed


def run(metrics: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(metrics, 30))


def order(port: int, **fields: Any) -> Order:
    cell = Cell(tokens=2, concurrency=1, stream=fields.get("stream", False))
    usual: dict[str, Any] = {"expected": '"completion_tokens":2', "concurrency": 3, "seconds": 0.05}
    return Order(endpoint=Endpoint(port=port, key=NO_KEY), bodies=conversation(SCRIPT, cell), **usual | fields)


def row(contestant: str, cell: Cell, *rates: float, p50_s: float = 1.0, cpu_s: float = 1.0) -> Row:
    rounds = [
        Round(measured=Measured(calls=1000, per_s=rate, p50_s=p50_s, p99_s=2.0, first_p50_s=None), cpu_s=cpu_s)
        for rate in rates
    ]
    return Row(contestant=contestant, cell=cell, rounds=tuple(rounds))


def test_the_upstream_speaks_our_engines_protocol() -> None:
    async def metrics() -> None:
        async with upstream() as port, http_engines(1.0) as connect:
            engine = connect(f"http://127.0.0.1:{port}")
            params = SamplingParams(max_tokens=3)
            whole = await engine.generate([1, 2], params, session="s")
            chunks = [chunk async for chunk in engine.stream([1, 2], params, session="s")]
            assert (await engine.health()).version == VERSION
            assert whole.token_ids.tolist() == [7, 8, 9]
            assert whole.logprobs.tolist() == pytest.approx([LOGPROB] * 3)
            assert [token for chunk in chunks for token in chunk.token_ids.tolist()] == [7, 8, 9]
            assert chunks[-1].completion is not None and chunks[-1].completion.token_ids.tolist() == [7, 8, 9]
            with pytest.raises(ValueError, match=r".*"):
                await engine.generate([1], SamplingParams(max_tokens=5), session="s")

    run(metrics())


def test_the_upstream_speaks_openais_protocol() -> None:
    async def metrics() -> None:
        async with upstream() as port, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            async with http.post(url, json={"max_tokens": 2}) as answer:
                choice = (await answer.json())["choices"][0]
            assert choice["message"]["content"] == "a b" and choice["token_ids"] == [7, 8]
            async with http.post(url, json={"max_tokens": 2, "stream": True}) as answer:
                lines = (await answer.text()).splitlines()
            *events, last = [line.removeprefix("data: ") for line in lines if line]
            deltas = [orjson.loads(event)["choices"][0]["delta"] for event in events]
            assert "".join(delta.get("content", "") for delta in deltas) == "a b" and last == "[DONE]"

    run(metrics())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_counted_and_timed(stream: bool) -> None:
    async def metrics() -> None:
        async with upstream() as port:
            expected = "data: [DONE]" if stream else '"completion_tokens":2'
            measured = await Crowd(order(port, stream=stream, expected=expected)).run()
        assert measured.calls >= 3 and measured.per_s > 0
        assert 0 < measured.p50_s <= measured.p99_s
        assert (measured.first_p50_s is not None) is stream
        assert measured.first_p50_s is None or measured.first_p50_s <= measured.p50_s

    run(metrics())


def test_a_wrong_answer_fails_the_order() -> None:
    async def metrics() -> None:
        async with upstream() as port:
            with pytest.raises(ExceptionGroup) as caught:
                await Crowd(order(port, expected='"completion_tokens":3')).run()
        assert "completion_tokens" in str(caught.value.exceptions[0])

    run(metrics())


def test_orders_survive_the_way_to_their_process() -> None:
    sent = order(1, stream=True)
    assert Order.parse(json.dumps(asdict(sent))) == sent


def test_a_conversation_repeats_what_was_said(tmp_path: Path) -> None:
    script = write_script(tmp_path, 40)
    assert script.text(40) == ChatTemplate.load(tmp_path).decode(script.token_ids)
    first, second, *_ = (orjson.loads(body) for body in conversation(script, Cell(tokens=40, concurrency=1)))
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2]["content"] == script.text(40)


def test_a_quick_call_measures_the_contestants_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LITELLM_VARIABLE, "/nowhere/python")
    options = replace(gateway_options(("direct", "bare", "litellm"), quick=True), seconds=0.05)
    result = bench_gateway(options)
    printed = json.loads(json.dumps(result))
    by_name = {one["contestant"]: one for one in printed["results"] if "streamed" in one["case"]}
    assert by_name["direct"]["per_s"] > 0 and by_name["direct"]["added_p50_ms"] == 0.0
    assert by_name["bare"]["missing"] or by_name["bare"]["per_s"] > 0
    assert "/nowhere/python" in by_name["litellm"]["missing"]
    goals = printed["goals"]
    assert set(goals) == {"throughput_vs_litellm", "added_latency_vs_litellm", "throughput_vs_bare_proxy"}
    assert "/nowhere/python" in goals["throughput_vs_litellm"]["reason"]
    assert "/nowhere/python" not in goals["throughput_vs_bare_proxy"]["reason"]
    assert "litellm" in table(result)


def test_goals_are_ratios_of_rounds_in_their_cells() -> None:
    rows = [
        row("etude", SHORT, 3000, 3000, 9000),
        row("litellm", SHORT, 50, 60, 60),
        row("etude", LONG, 1000, 1000, 1000),
        row("bare", LONG, 1600, 2000, 2500),
        row("direct", ALONE, 1, p50_s=0.001),
        row("etude", ALONE, 1, p50_s=0.0015),
        row("litellm", ALONE, 1, p50_s=0.021),
    ]
    goals = json.loads(json.dumps(judged_rows({(one.contestant, one.cell): one for one in rows})))
    assert goals["throughput_vs_litellm"]["value"] == 60.0 and goals["throughput_vs_litellm"]["met"]
    assert goals["throughput_vs_bare_proxy"]["value"] == 0.5 and goals["throughput_vs_bare_proxy"]["met"]
    assert goals["added_latency_vs_litellm"]["value"] == 0.025 and goals["added_latency_vs_litellm"]["met"]
    assert goals["throughput_vs_bare_proxy"]["case"] == LONG.label


def test_capture_costs_the_difference() -> None:
    rows = [row("etude", SHORT, 1, cpu_s=0.3), row("etude-uncaptured", SHORT, 1, cpu_s=0.25), row("etude", LONG, 1)]
    assert capture_us({(one.contestant, one.cell): one for one in rows}) == {SHORT.label: 50.0}


def test_single_calls_are_asked_of_ours_alone() -> None:
    cells = gateway_options(quick=True).cells
    assert {name for cell in cells if cell.turns == 1 for name in CONTESTANTS if cell.concerns(name)} == set(OURS)
    assert all(cell.concerns("direct") for cell in cells if cell.turns > 1)
    assert len(conversation(SCRIPT, next(cell for cell in cells if cell.turns == 1))) == 1


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100)]
    assert quantile(values, 0.5) == 50 and quantile(values, 0.99) == 99 and quantile([4.0], 0.99) == 4.0


def test_unknown_contestants_are_refused() -> None:
    with pytest.raises(UserError, match="nobody"):
        GatewayOptions(contestants=("nobody",))
