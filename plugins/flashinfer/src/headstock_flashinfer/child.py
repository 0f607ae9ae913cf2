"""`python -m headstock_flashinfer.child GENERATOR ARGUMENTS`: the process that compiles one module of FlashInfer."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import torch

DTYPES = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32"}


def main(generator: str, arguments: str) -> None:
    """Compiles what a generator describes, "module:name", or the first of several names that the module has."""
    module, _, names = generator.partition(":")
    source = import_module(module)
    generate = next(getattr(source, name) for name in names.split() if hasattr(source, name))
    given = [getattr(torch, each) if each in DTYPES else each for each in json.loads(arguments)]
    generate(*given).build(verbose=True, need_lock=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
