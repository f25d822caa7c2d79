"""``bench templates``: its counts, other projects' test cases, and missing contestants."""

from pathlib import Path

from bench.templates.bench import bench_templates, table
from bench.templates.harvest import Case, harvest
from chat_formats import TEMPLATES

TEST_FILE = """
CALL = FunctionCall(name="get", arguments='{"a": ' "1}")
TEXT = "get(a=1)"
GROWN = "x"
GROWN += "y"
def wrap(text): return f"[{text}]"
@pytest.mark.parametrize("streaming, model_output, expected_tool_calls", [
    pytest.param(True, wrap(TEXT), [CALL], id="one"),
    (False, wrap(TEXT), [CALL]),
    (False, "none", []),
    (False, GROWN, []),
    (False, unknown(), [CALL]),
])
def test_it(): raise AssertionError("this is never run")
@pytest.mark.parametrize(argnames=["model_output", "expected"], argvalues=[
    ("a" + "b", [ToolCall(function=FunctionCall(name="b", arguments=json.dumps({"c": [1]})))]),
])
def test_that(): ...
"""


def test_cases_are_read_out_of_tests_that_are_never_run() -> None:
    assert harvest(TEST_FILE) == [
        Case("[get(a=1)]", (("get", {"a": 1}),)),
        Case("none", ()),
        Case("ab", (("b", {"c": [1]}),)),
    ]


def test_templates_are_counted_and_a_source_that_is_not_here_is_named(tmp_path: Path) -> None:
    for folder, names in (
        ("llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates", ("qwen", "llama")),
        ("vllm-0.33.0/examples", ("coder",)),
    ):
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            source = (TEMPLATES / f"{name}.jinja").read_text()
            (tmp_path / folder / f"tool_chat_template_{name}.jinja").write_text(source)
    (tmp_path / "llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates/broken.jinja").write_text("{% if")
    tests = tmp_path / "vllm-0.33.0/tests/tool_parsers"
    tests.mkdir(parents=True)
    (tests / "test_pythonic_tool_parser.py").write_text(TEST_FILE)
    result = bench_templates(tmp_path)
    rows = result["results"]
    assert isinstance(rows, list)
    counts = [
        [row.get(key) for key in ("templates", "with calls", "read back")] for row in rows if isinstance(row, dict)
    ]
    assert counts == [[3, 2, 2], [1, 1, 1], [None, None, None]]
    assert result["cases"] == [
        {"case": "tool_parsers/test_pythonic_tool_parser", "grammar": "pythonic", "cases": 3, "agree": 2}
    ]
    shown = table(result)
    assert "TRL: " in shown and "trl-1.13.0" in shown and "not every source is here" in shown
