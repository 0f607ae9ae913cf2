"""The text files that people hand over, JSON and TOML: read as UTF-8, and refused by name where they cannot be."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from headstock.errors import HeadstockError


def read_text(path: Path, works: str, error: type[HeadstockError] = HeadstockError) -> str:
    """A whole file, without the byte order mark that some editors begin it with.

    Raises `error`, saying what `works`, for one that is missing, cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")  # not as text, which would change line breaks
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror}", works=works) from None
    except ValueError as problem:  # of the encoding, or of the path itself
        raise error(f"cannot read {path}: {problem}", works=f"{works}, in UTF-8") from None


def parse_json(text: str, where: object, works: str, error: type[HeadstockError] = HeadstockError) -> Any:
    """What a JSON text holds; raises `error`, naming `where` it is, for what is not JSON or nested too deeply."""
    try:
        return json.loads(text)
    except ValueError as problem:
        raise error(f"{where} is not JSON: {problem}", works=works) from None
    except RecursionError:
        raise error(f"{where} is nested too deeply", works=works) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises HeadstockError, naming the file, where they cannot be read."""
    works = "lines like page-size = 16"
    try:
        return tomllib.loads(read_text(path, "a TOML file"))
    except ValueError as problem:
        raise HeadstockError(f"{path} is not TOML: {problem}", works=works) from None
    except RecursionError:
        raise HeadstockError(f"{path} is nested too deeply", works=works) from None
