"""The chat template of a model: Jinja as `transformers` gives it to chat templates, which are programs of strangers."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstock.errors import ModelError

LONGEST = 1 << 24
"""Characters that a template may write, and the largest number that it may hand to a call."""
SLOWEST = 10.0
"""Seconds that a template may take."""


class ChatTemplate:
    """A template, compiled on construction; raises ModelError for one that is not Jinja."""

    def __init__(self, source: str):
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            given = " ".join(str(error).split())
            raise ModelError(
                "the chat template is not Jinja", given=given, works="a raw prompt", type="--raw"
            ) from error

    def render(self, values: Mapping[str, Any]) -> str:
        """The text that the template writes; whatever it raises passes, and LimitError where it takes too much."""
        self._sandbox.deadline = time.monotonic() + SLOWEST
        parts, length = [], 0
        for part in self._template.generate(values):
            parts.append(part)
            length += len(part)
            self._sandbox.check(length)
        return "".join(parts)


class LimitError(jinja2.TemplateError):
    """What a template does takes too long or too much memory."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of a template: nothing of the host can be reached, and what runs is bounded step by step.

    The clock is looked at whenever a template writes, calls, filters or calculates, and numbers that would make one
    such step huge are refused. A loop that does none of these is not interrupted, and texts joined by `~` may fill the
    memory: a model's files deserve the trust that its weights get.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.deadline = math.inf
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def check(self, length: int = 0) -> None:
        """Raises LimitError past the deadline, and for a step that makes something of such a length."""
        if time.monotonic() > self.deadline:
            raise LimitError(f"it takes more than {SLOWEST:g} seconds")
        if length > LONGEST:
            raise LimitError(f"it makes something longer than {LONGEST} characters")

    def call(self, context: Context, function: Any, /, *values: Any, **named: Any) -> Any:
        """Every call of a template; methods of texts format and pad them."""
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            self.check(_format_width(text) if function.__name__ == "format" else _largest(*values, *named.values()))
        self.check()
        return super().call(context, function, *values, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every intercepted operator of a template."""
        self.check(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that looks at the clock first, and at the width where it pads or formats."""

        @functools.wraps(function)  # which keeps what Jinja notes on it
        def checked(*values: Any, **named: Any) -> Any:
            self.check(_largest(*values, *named.values()) if name in ("center", "indent") else 0)
            self.check(_format_width(values[0]) if name == "format" else 0)
            return function(*values, **named)

        return checked


def _largest(*values: Any) -> int:
    """The largest number among the arguments of what pads a text."""
    return max((value for value in values if isinstance(value, int)), default=0)


def _format_width(text: Any) -> int:
    """The largest width in a format; more than any where it is left to an argument."""
    fields = re.findall(r"(?:%|:)[^a-zA-Z%]*?(\d{6,}|\*)", str(text))
    return max((LONGEST + 1 if field == "*" else int(field[:20]) for field in fields), default=0)


def _size(operator: str, left: Any, right: Any) -> int:
    """The characters or items that an operator gives, or the bits where it gives a power; 0 for an ordinary number."""
    sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
    match operator, sizes:
        case "%", [int(), _] if isinstance(left, str):
            return _format_width(left)
        case "+", [int(one), int(other)]:
            return one + other
        case "*", [int(size), None] | [None, int(size)]:
            times = right if sizes[1] is None else left
            return size * times if isinstance(times, int) else 0
        case "**", [None, None] if isinstance(left, int) and isinstance(right, int):
            return left.bit_length() * right * 1000  # arithmetic on it is slow long before it is large
    return 0


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own would escape HTML


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's words for training: here, its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
