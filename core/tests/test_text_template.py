"""Chat templates that take too much end with a word of it, whatever they spend it on."""

from __future__ import annotations

import pytest

from headstock.engine import template
from headstock.engine.template import ChatTemplate, LimitError
from headstock.errors import ModelError


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in text %}{{ j }}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in text %}{% set k = j|upper %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in text %}{% set k = 1 + 1 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_what_goes_on_without_end_is_ended(monkeypatch, source):
    monkeypatch.setattr(template, "SLOWEST", 0.2)
    with pytest.raises(LimitError, match="seconds"):
        ChatTemplate(source).render({"text": "x" * 99_999})


@pytest.mark.parametrize(
    "expression",
    [
        "(10 ** 8) ** (10 ** 8)", "'%1000000000d'|format(5)", "'%1000000000d' % 5", "'%*d' % (1000000000, 5)",
        "'x' * 1000000000", "1000000000 * [1]", "'x'.center(1000000000)", "'x'|center(1000000000)",
        "'x'|indent(width=1000000000)", "'x'.zfill(10 ** 9)",
    ],
)  # fmt: skip
def test_one_step_that_would_be_huge_is_refused(expression):
    with pytest.raises(LimitError):
        ChatTemplate("{{ " + expression + " }}").render({})


def test_a_text_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(template, "LONGEST", 10_000)
    source = "{% for i in range(9000) %}xxxxxxxxxx{% endfor %}"
    with pytest.raises(LimitError):
        ChatTemplate(source).render({})
    doubling = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"
    with pytest.raises(LimitError):
        ChatTemplate(doubling).render({})


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'%s and %5.2f%%' % ('a', 2.5)", "a and  2.50%"), ("'%d'|format(1764000000)", "1764000000"),
        ("2 ** 10", "1024"), ("'ab' * 3", "ababab"), ("[1] + [2]", "[1, 2]"), ("1764000000 * 1000", "1764000000000"),
        ("'x'.rjust(3)", "  x"), ("range(3)|list", "[0, 1, 2]"), ("'100% of 12345678'|trim", "100% of 12345678"),
    ],
)  # fmt: skip
def test_what_templates_ordinarily_do_is_left_alone(expression, text):
    assert ChatTemplate("{{ " + expression + " }}").render({}) == text


@pytest.mark.parametrize("source", ["{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "{% if %}", "{{ 'a"])
def test_what_is_no_template_is_refused_in_one_line(source):
    with pytest.raises(ModelError, match="not Jinja") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)
