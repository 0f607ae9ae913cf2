"""The table of measured configurations, and what else was found out by running kernels rather than by reading."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def table() -> dict[str, Any]:
    """All of `configs.json`."""
    text = resources.files("headstock_triton").joinpath("configs.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def compiles(triton: str) -> bool:
    """Whether the kernels in Gluon were compiled by this version of Triton, or by one between two that did.

    Gluon is experimental: in another release the same words may mean something else, or nothing.
    """
    first, last = ([int(n) for n in version.split(".")] for version in table()["gluon"])
    try:
        return first <= [int(n) for n in triton.split(".")[:2]] <= last
    except ValueError:  # a version that is no number was released by nobody
        return False
