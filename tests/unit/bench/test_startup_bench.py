"""``bench startup`` starts the processes that its rows name."""

import argparse

from bench.startup import bench as startup
from bench.tables import results_of


def test_every_command_is_started_and_the_help_is_judged() -> None:
    result = startup.run(argparse.Namespace(starts=1))
    seconds = {row["contestant"]: row["cpu_s"] for row in results_of(result)}
    assert seconds.keys() == startup.COMMANDS.keys()
    assert all(isinstance(each, float) and each > 0 for each in seconds.values())
    goals = result["goals"]
    assert isinstance(goals, dict) and isinstance(goals["help_cpu_s"], dict)
    assert goals["help_cpu_s"]["value"] == seconds["etude --help"]
    assert isinstance(goals["command_help_cpu_s"], dict)
    assert goals["command_help_cpu_s"]["value"] == seconds["etude run --help"]
    assert isinstance(goals["first_step_s"], dict)
    assert isinstance(goals["first_step_s"]["value"], float)
    assert "etude --help" in startup.table(result)
