"""Simulated users of a live product, and a page for real ones: ``python recipes/live/users --url URL --truth FILE``.

The product's key is in ``ETUDE_PRODUCT_KEY``. Nothing here is the trainer's: it reaches the run by the product
gateway's URL alone, with the OpenAI API and ``POST /feedback``.
"""

import argparse
import asyncio
import os
import sys
from contextlib import AsyncExitStack, closing
from pathlib import Path

import aiohttp
from aiohttp import web
from backend import Product, Requests
from population import draw_population
from reports import FeedbackReports
from simulation import DayPlan, Simulation, Truth, run_day
from web import Page

from etude.api.feedback import FeedbackClient
from etude.errors import EtudeError
from etude.sandboxes.local.provider import LocalSandboxes

KEY = "ETUDE_PRODUCT_KEY"
"""Environment variable with the product's key."""
SERVING_S = 3600.0


def main() -> int:
    """Run the users of one day."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="the product gateway's, without /v1")
    parser.add_argument("--truth", type=Path, required=True, help="hidden truth, a line of JSON a session; appended to")
    parser.add_argument("--day-s", type=float, default=900.0, help="length of the day in seconds")
    parser.add_argument("--overtime-s", type=float, default=0.0, help="seconds for which people still come after it")
    parser.add_argument("--begun-s", type=float, default=0.0, help="seconds of the day that are over already")
    parser.add_argument("--rate", type=float, default=12.0, help="sessions a second at noon")
    parser.add_argument("--people", type=int, default=300, help="accounts; 0: only the page is served")
    parser.add_argument("--loyal", action="store_true", help="people stay, however bad the product is")
    parser.add_argument("--at-once", type=int, default=48, help="sessions at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="arith,slice", help="kinds of request: tasks.options.kinds of the recipe")
    parser.add_argument("--page-port", type=int, default=0, help="serve the page at this port of this machine")
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two lines of progress")
    options = parser.parse_args()
    key = os.environ.get(KEY, "").strip()
    if not key:
        print(f"users: {KEY} is not set: it holds the product's key, which `etude live` prints", file=sys.stderr)
        return 2
    try:
        asyncio.run(_run(options, key))
    except KeyboardInterrupt:
        return 130
    except EtudeError as error:
        print(f"users: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(options: argparse.Namespace, key: str) -> None:
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        stack.push_async_callback(connector.close)
        sandboxes = LocalSandboxes(workers=2)
        stack.push_async_callback(sandboxes.close)
        product = Product(options.url, key, sandboxes, connector)
        reports = FeedbackReports(stack.enter_context(FeedbackClient(options.url, key)))
        requests = Requests(options.kinds.split(","), options.seed)
        if options.page_port:
            await _serve_page(stack, Page(product, requests, reports), options.page_port)
        if not options.people:
            await asyncio.sleep(SERVING_S * 24)
            return
        plan = DayPlan(
            seconds=options.day_s,
            days=1.0 + options.overtime_s / options.day_s,
            begun_s=options.begun_s,
            rate=options.rate,
            at_once=options.at_once,
            seed=options.seed,
        )
        people = draw_population(options.people, options.seed, loyal=options.loyal)
        truth = stack.enter_context(closing(Truth(options.truth)))
        await run_day(Simulation(people, plan, product, requests, reports, truth), every_s=options.every_s)


async def _serve_page(stack: AsyncExitStack, page: Page, port: int) -> None:
    runner = web.AppRunner(page.app())
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"be one of the users: http://127.0.0.1:{port}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
