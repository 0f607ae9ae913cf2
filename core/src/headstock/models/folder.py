"""Where a model is: the folder behind a path, a GGUF file, or the embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.models.config import DType
    from headstock.models.gguf import Progress


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


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
