"""What is read from a model's JSON files: objects, and records of them that are checked field by field."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headstock.errors import ModelError
from headstock.files import parse_json, read_text

Size = Annotated[int, Field(gt=0, le=2**31)]
Factor = Annotated[float, Field(gt=0)]
T = TypeVar("T", bound=BaseModel)
FOLDER = "a Hugging Face model folder (config.json, *.safetensors, tokenizer.json) or a .gguf file"
PUBLISHED = "the config.json that the model was published with"


class Record(BaseModel):
    """What is fixed once read: unknown fields, other types and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; raises ModelError when there is none."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise ModelError(f"cannot read {path}: it is no regular file", works=FOLDER)
    content = parse_json(read_text(path, FOLDER, ModelError), path, "download the file again", ModelError)
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds no JSON object", given=type(content).__name__, works='an object: {"key": value, …}'
        )
    return content


def bad_config(what: str, given: object = None, works: str = PUBLISHED) -> ModelError:
    """The refusal of what a `config.json` says."""
    return ModelError(f"config.json: {what}", given=given, works=works)


def parse(record: type[T], raw: dict[str, Any], where: str = "") -> T:
    """Validate, turning the first fault into one line that names the key."""
    try:
        return record.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([*where.split(), *map(str, first["loc"])])
        if first["type"] == "missing":
            raise bad_config(f"{key} is required, and missing") from None
        given, works = f"{key}={first['input']!r:.200}", first["msg"].removeprefix("Input should be ")
        raise bad_config(f"{key} is not valid", given, works) from None
