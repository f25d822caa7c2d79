"""An external harness, in a sandbox, on a suite, with a model behind another vendor's API."""

import os
from pathlib import Path

import pytest

from api_models import KEY, ApiModel, Messages, behind
from etude.cli.main import main
from etude.dashboard.suite_results import read_results

ROOT = Path(__file__).parents[2]
HARNESS = Path(os.environ.get("ETUDE_HARNESS_PYTHON", ROOT / ".venv-harness/bin/python"))
RECIPE = ROOT / "recipes/external-harness"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def looks_and_submits(messages: Messages) -> str:
    """A model's reply that reads the file named in the prompt, and then submits."""
    if any(each["role"] == "assistant" for each in messages):
        return SUBMIT
    return f"cat {str(messages[-1]['content']).split()[-1]}"


@pytest.mark.heavy("mini-swe-agent: make .venv-harness/stamp", missing=not HARNESS.exists())
def test_mini_swe_agent_is_tried_at_a_suite_though_the_api_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HARNESS.parents[2])
    monkeypatch.setenv("MODEL_KEY", KEY)
    model = ApiModel(looks_and_submits, [429])
    with behind(model) as url:
        command = ["suite", "run", str(RECIPE), "--url", url, "--model", "m", "--key-env", "MODEL_KEY"]
        assert main([*command, "--harness", str(RECIPE), "--tasks", "2", "--out", str(tmp_path / "out")]) == 0
    results = read_results(tmp_path / "out")
    assert (results.harness, len(results.tries), results.missing()) == ("command", 2, [])
    for each in results.tries:
        assert (each.reward, each.measures["calls"]) == (0.0, 2)
        assert each.measures["sampled_tokens"] == 2 + len(SUBMIT.split())
    contents = [message["content"] for request in model.requests for message in request["messages"]]
    assert any("def " in content for content in contents), "what the command printed was shown to the model"
