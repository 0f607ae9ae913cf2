"""The settings of one run: flags over the configuration file over defaults, with the origin of each that was set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headstock.cli.options import Choices, Limits, flag_name
from headstock.engine.sampling import SamplingParams
from headstock.errors import HeadstockError
from headstock.files import read_toml
from headstock.offer import canonical, describe_validation_error

RECORDS: tuple[type[BaseModel], ...] = (Choices, Limits, SamplingParams)
PATHS = ("model", "decision", "profile_file")  # relative to the file that names them
Record = TypeVar("Record", bound=BaseModel)


@dataclass(frozen=True)
class Settings:
    """Every option of a run. `origins` tells by field where what was set came from: a flag, or a key of `file`."""

    choices: Choices
    limits: Limits
    sampling: SamplingParams
    file: Path | None
    origins: Mapping[str, str]

    @classmethod
    def load(cls, config: Path | None, flags: Mapping[str, Any]) -> Settings:
        """Lays `flags`, by field name, over the file `config`, by default the one found from here upward.

        Raises HeadstockError, naming the flag or the file and its key, for what is unknown or out of range.
        """
        file = config or find_file(working_folder())
        written, typed = read_file(file) if file else {}, dict(flags)
        if "backend_option" in typed:
            options = _by_backend(typed["backend_option"])
            for name, values in written.get("backend_option", {}).items():
                options[name] = {**values, **options.get(name, {})}
            typed["backend_option"] = options
        origins = {name: f"{file}: {_key(name)}" for name in written} | {name: flag_name(name) for name in typed}
        choices, limits, sampling = (_build(record, {**written, **typed}, origins) for record in RECORDS)
        return cls(choices, limits, sampling, file, origins)  # type: ignore[arg-type]

    def asked(self) -> list[str]:
        """The choices that were set, by what: "--page-size 16", or "/home/me/headstock.toml: page-size 16"."""
        return [f"{self.origins[name]} {value}" for name, value in self.choices if name in self.origins]


def find_file(folder: Path) -> Path | None:
    """The nearest headstock.toml, or pyproject.toml with a table tool.headstock, in `folder` or above it.

    Raises HeadstockError where one folder has both, since neither could be ignored silently.
    """
    for place in (folder, *folder.parents):
        own, project = place / "headstock.toml", place / "pyproject.toml"
        in_project = project.is_file() and "headstock" in _table(read_toml(project), project, "tool")
        if own.is_file() and in_project:
            given = f"{own} and [tool.headstock] in {project.name}"
            raise HeadstockError("two configurations in one folder", given=given, works="one of them")
        if own.is_file() or in_project:
            return own if own.is_file() else project
    return None


def read_file(file: Path) -> dict[str, Any]:
    """The options of a configuration file by field name, its keys known and its paths taken from where it lies."""
    content = read_toml(file)
    if file.name == "pyproject.toml":
        content = _table(_table(content, file, "tool"), file, "headstock")
    known = {_key(name): name for record in RECORDS for name in record.model_fields}
    for key in content:
        if key not in known:
            near = get_close_matches(key.replace("_", "-"), known, 1)
            works = f"{near[0]}, perhaps" if near else ", ".join(known)
            raise HeadstockError(f"{file}: unknown key", given=key, works=works)
    written = {known[key]: value for key, value in content.items()}
    for name in PATHS:
        if path := written.get(name):
            written[name] = file.parent / path if isinstance(path, str) else path
    if "backend_option" in written:
        options = _table(content, file, _key("backend_option"), "[backend-option.NAME]")
        tables = {name: _table(options, file, name, "[backend-option.NAME]") for name in options}
        written["backend_option"] = {canonical(name): table for name, table in tables.items()}
    return written


def working_folder() -> Path:
    """The current folder; HeadstockError where it was removed, in which torch cannot be loaded either."""
    try:
        return Path.cwd()
    except OSError as error:
        raise HeadstockError(f"the working folder is gone: {error.strerror}", works="cd to one that exists") from None


def _table(content: Mapping[str, Any], file: Path, name: str, works: str = "[tool.headstock]") -> dict[str, Any]:
    """The table `name` in `content`, empty where there is none; HeadstockError where it is something else."""
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise HeadstockError(f"{file}: {name} is no table", given=f"{found!r:.80}", works=f"a table {works}")
    return found


def _by_backend(options: list[str]) -> dict[str, dict[str, Any]]:
    """NAME.KEY=VALUE, each, by backend; values stay text, which the backend's own model of its options reads."""
    found: dict[str, dict[str, Any]] = {}
    for option in options:
        target, equals, value = option.partition("=")
        name, dot, key = target.partition(".")
        if not (equals and dot and name and key):
            raise HeadstockError("--backend-option cannot be read", given=option, works="NAME.KEY=VALUE")
        found.setdefault(canonical(name), {})[key] = value
    return found


def _build(record: type[Record], values: Mapping[str, Any], origins: Mapping[str, str]) -> Record:
    """A record of those `values` that are its fields; each is tried alone, so that a refusal can tell its origin."""
    own = {name: value for name, value in values.items() if name in record.model_fields}
    for name, value in own.items():
        try:
            record(**{name: value})
        except HeadstockError as error:
            raise type(error)(f"{origins[name]}: {error.what}", given=error.given, works=error.works) from None
        except ValidationError as error:
            reason = describe_validation_error(error).removeprefix(f"{name}: ").removeprefix(f"{name}.")
            raise HeadstockError(f"{origins[name]}: {reason}") from None
    return record(**own)


def _key(name: str) -> str:
    """How a field is spelled in the configuration file."""
    return flag_name(name).removeprefix("--")
