"""Where a model is: the folder behind a path, a GGUF file, or the embedded default."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from headstock.errors import ModelError
from headstock.models.record import FOLDER

if TYPE_CHECKING:
    from headstock.models.config import DType
    from headstock.models.gguf import Progress


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


def check_folder(folder: Path) -> None:
    """Raises ModelError, with the cause, for a path that leads to no folder."""
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise ModelError(f"{folder} is no folder and no .gguf file", works=FOLDER)
    except FileNotFoundError:
        works = f"{FOLDER} on this machine, as headstock downloads nothing; or no model named, for the embedded one"
        raise ModelError(f"there is no model at {folder}", works=works, type=_download(folder)) from None
    except (OSError, ValueError) as error:  # a loop of links, a name that is too long or holds a zero
        raise ModelError(f"cannot read {folder}: {getattr(error, 'strerror', error)}", works=FOLDER) from None


def _download(folder: Path) -> str | None:
    """How to get what looks like a name on Hugging Face's hub."""
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(folder)) or folder.parent.exists():
        return None
    return f"hf download {folder} --local-dir {shlex.quote(folder.name)}, and then --model {shlex.quote(folder.name)}"


def model_folder(
    model: str | Path | None = None,
    dtype: DType = "bfloat16",
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The Hugging Face folder of a model: `model` itself, or what a GGUF file was converted to, once per dtype.

    None stands for the embedded default. Raises ModelError where there is neither folder nor usable file.
    """
    from headstock.models.embedded import embedded_model

    path = Path(model) if model is not None else embedded_model()
    if not is_gguf(path):
        return path
    from headstock.models.cache import default_cache_dir
    from headstock.models.gguf import convert

    return convert(path, cache_dir or default_cache_dir(), dtype, progress)
