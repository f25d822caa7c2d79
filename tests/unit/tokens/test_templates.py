"""Jinja as chat templates expect it, and nothing that a template could break out of."""

from datetime import datetime, timedelta

import pytest

from etude.errors import DamagedError
from etude.tokens.templates import JinjaTemplate

NOON = datetime(2026, 7, 1, 12)


def test_templates_run_in_a_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{% set _ = messages.append(1) %}", "{{ range(99999999) | list }}"):
        with pytest.raises(ValueError, match="does not take"):
            JinjaTemplate(source, {}, lambda: NOON).render(["x"], opening=True)


def test_json_is_not_escaped_for_html() -> None:
    template = JinjaTemplate("{{ messages | tojson }} {{ messages | tojson(indent=1) }}", {}, lambda: NOON)
    assert template.render(["<é>"], opening=False) == '["<é>"] [\n "<é>"\n]'


def test_blocks_leave_no_lines_behind_and_loops_can_be_left() -> None:
    source = "{% for m in messages %}\n  {% if m == 'stop' %}\n    {% break %}\n  {% endif %}\n{{ m }},{% endfor %}"
    assert JinjaTemplate(source, {}, lambda: NOON).render(["a", "b", "stop", "c"], opening=False) == "a,b,"


def test_generation_marks_a_scope_and_writes_nothing() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert JinjaTemplate(source, {}, lambda: NOON).render([], opening=False) == "21"


def test_the_day_is_asked_once_per_rendering() -> None:
    moments = iter(NOON + timedelta(days=day) for day in range(9))
    template = JinjaTemplate("{{ strftime_now('%d') }}{{ strftime_now('%d') }}", {}, lambda: next(moments))
    assert [template.render([], opening=False) for _ in range(2)] == ["0101", "0202"]


def test_variables_and_the_opening_are_known() -> None:
    template = JinjaTemplate(
        "{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}", {"bos_token": "<s>"}, lambda: NOON
    )
    assert template.render([], opening=True) == "<s>TrueTrue"
    assert template.render([], ["x"], opening=False) == "<s>FalseFalse"


def test_a_source_that_is_no_template_is_damage() -> None:
    with pytest.raises(DamagedError, match="does not compile"):
        JinjaTemplate("{% if %}", {}, lambda: NOON)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% for i in range(9999) %}{{ range(9999) | sum }}{% endfor %}",
        "{{ 'a' * 9999999999 }}",
        "{{ [0] * 9999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ range(999999999999) | list }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    template = JinjaTemplate(source, {}, lambda: NOON)
    with pytest.raises(ValueError, match=r"more than (2,000,000 steps: it loops|4096 bits)|recursion depth"):
        template.render([], opening=True)


def test_counted_loops_and_operators_are_jinjas() -> None:
    source = (
        "{% for m in messages %}{{ loop.index ~ '/' ~ loop.length ~ m * 2 + '!' }}{{ ',' if not loop.last }}{% else %}"
        "none{% endfor %} {% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %} {{ 2 ** 3 * 2 + 1 }} {{ 2 * 'x' }}"
    )
    assert JinjaTemplate(source, {}, lambda: NOON).render(["a", "b"], opening=True) == "1/2aa!,2/2bb! a1 17 xx"
    assert JinjaTemplate(source, {}, lambda: NOON).render([], opening=True) == "none a1 17 xx"


def test_what_a_template_reads_is_what_it_does_not_set() -> None:
    source = (
        "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ effort | default('low') }}{{ name }}"
        "{% for message in messages %}{% if x %}{% set text = message %}{% endif %}{{ text ~ bos_token }}{% endfor %}"
        "{% macro show(y) %}{{ y ~ tools ~ range(2) }}{% endmacro %}{{ show(1) ~ strftime_now ~ raise_exception }}"
    )
    template = JinjaTemplate(source, {}, lambda: NOON)
    assert template.reads == {"thinking", "effort", "name", "x"}
    assert template.render([], (), {"thinking": True, "effort": "high", "name": "n"}, opening=True).startswith("highn1")
