"""Launching a kernel: on a GPU as it is, in Triton's interpreter as an operator that torch knows of."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from headstock_triton.kernels.attend import attend
from headstock_triton.kernels.latent import latent
from headstock_triton.kernels.merge import merge
from headstock_triton.kernels.schedule import schedule
from headstock_triton.kernels.write import write
from headstock_triton.table import compiles

INTERPRETING = not isinstance(attend, triton.JITFunction)
"""Whether Triton was told, before the kernels were imported, to interpret them (`TRITON_INTERPRET=1`)."""


def _kernels() -> Mapping[str, Any]:
    """All kernels by name, those in Gluon only where this Triton was seen to compile them and has their words."""
    kernels = {"attend": attend, "latent": latent, "merge": merge, "schedule": schedule, "write": write}
    if not INTERPRETING and compiles(triton.__version__):
        with suppress(ImportError, AttributeError, TypeError):
            from headstock_triton.kernels.attend_hopper import attend_hopper
            from headstock_triton.kernels.latent_hopper import latent_hopper

            kernels |= {"attend_hopper": attend_hopper, "latent_hopper": latent_hopper}
    return MappingProxyType(kernels)


KERNELS = _kernels()

Grid = tuple[int, ...]
Tensors = Mapping[str, Any]
"""Tensors, None for those that are not there, and descriptors of tensors."""
Numbers = Mapping[str, int | float]


def launch(kernel: str, grid: Grid, tensors: Tensors, numbers: Numbers, constants: Mapping[str, int | bool]) -> None:
    """Runs a kernel by name on the current stream: its pointers, its numbers, and what it is compiled for."""
    if not INTERPRETING:
        KERNELS[kernel][grid](**tensors, **numbers, **constants, enable_fp_fusion=True)
        return
    given = {name: x for name, x in tensors.items() if x is not None}
    absent = {name: None for name in tensors if name not in given}
    words = json.dumps([kernel, list(given), list(numbers), {**absent, **constants}])
    _operator()(words, list(grid), list(given.values()), list(numbers.values()))


@cache
def _operator() -> Any:
    """A launch as a torch operator: a recording of operators, the CPU's stand-in for a graph, sees nothing else."""
    schema = "(str words, int[] grid, Tensor(a!)[] tensors, Scalar[] numbers) -> ()"
    torch.library.define("headstock_triton::launch", schema)
    torch.library.impl("headstock_triton::launch", "CPU", _interpret)
    return torch.ops.headstock_triton.launch


def _interpret(words: str, grid: list[int], tensors: list[Tensor], numbers: list[int | float]) -> None:
    kernel, names, counts, constants = json.loads(words)
    pointers = {name: _pointer(x) for name, x in zip(names, tensors, strict=True)}
    KERNELS[kernel][tuple(grid)](**pointers, **dict(zip(counts, numbers, strict=True)), **constants)


def _pointer(x: Tensor) -> Tensor:
    """One element where x begins. After a launch the interpreter copies the whole storage of each argument onto itself:
    more work than the launch for a cache, and for one that is mostly address space more than there is memory."""
    if x.numel() == 0:
        return x
    first = (ctypes.c_uint8 * x.itemsize).from_address(x.data_ptr())
    return torch.frombuffer(first, dtype=torch.uint8).view(x.dtype)
