"""Probes of sandboxes: every property is read, repeatably, and differences are named clearly."""

import asyncio

import pytest

from etude.sandboxes.ns.provider import NamespaceSandboxes
from etude.taskgen.fidelity.probes import (
    CLOCK,
    NO_ANSWER,
    PROBES,
    TIMED_OUT,
    describe_clock,
    diff,
    probe,
    render_diff,
)


def test_a_sandbox_answers_everything_the_same_way_twice() -> None:
    async def scenario() -> None:
        provider = NamespaceSandboxes()
        try:
            if not await provider.capabilities():
                pytest.skip("no sandbox of namespaces can be made on this machine")
            sandbox = await provider.create({"a.py": "x = 1\n"})
            answers = await probe(sandbox)
            assert answers.keys() == PROBES.keys() | {CLOCK}
            assert answers["user"].startswith("uid=1000(agent)")
            assert answers["working folder"].startswith("/work\n")
            assert answers[CLOCK] == "right"
            assert TIMED_OUT not in answers.values()
            assert diff(answers, await probe(sandbox)) == ()
        finally:
            await provider.close()

    asyncio.run(scenario())


def test_differences_are_said_line_by_line() -> None:
    differences = diff({"kernel": "Linux 6.1", "user": "a\nb"}, {"kernel": "Linux 4.4.0", "user": "a\nb"})
    assert [one.name for one in differences] == ["kernel"]
    assert render_diff(differences).splitlines()[1:] == ["kernel:", "    - Linux 6.1", "    + Linux 4.4.0"]
    assert diff({"new": "x"}, {})[0].simulated == NO_ANSWER
    assert "alike" in render_diff(())


@pytest.mark.parametrize(
    ("message", "expected"), [("1000", "right"), ("8200", "off by +2 h"), ("", NO_ANSWER), ("soon", NO_ANSWER)]
)
def test_a_clock_is_right_or_off(message: str, expected: str) -> None:
    assert describe_clock(message, 1010.0) == expected
